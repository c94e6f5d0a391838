"""`--tp_size` and `--pp_size` of `ingot convert`: numbers are refused that no build of the model would take."""

from ingot.configs.convert import BuildDefaults
from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.ranks import require_parts, too_many_stages


def check_ranks(model: ModelConfig, defaults: BuildDefaults) -> None:
    """Raises UsageError. A build may refuse smaller numbers too: it knows cache groups and quantisation groups."""
    layers, ranks, stages = range(model.num_layers), defaults.tp_size or 1, defaults.pp_size or 1
    attends = {model.writer_of(layer) for layer in layers if model.has_attention(layer)}
    states = [layer for layer in layers if model.mixes(layer) and model.mixer_of(layer) is not None]
    groups = [count for count in (len(attends), len(states)) if count]
    if groups and stages > min(groups):
        raise too_many_stages("--pp_size", stages, min(groups), " + ".join(map(str, groups)))
    whole = model.latent is not None or model.qk_norm is QkNorm.WIDTH or model.inner_norms
    for layer in sorted(attends) if ranks > 1 and not whole else ():
        head = model.head_dim_of(layer)
        require_parts("--tp_size", ranks, f"layers.{layer}/attention_out", model.heads * head, head)
