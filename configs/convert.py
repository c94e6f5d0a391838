"""What a user asks of `ingot convert`."""

import dataclasses
from pathlib import Path

from ingot.configs.build import BuildConfig
from ingot.dtypes import DType
from ingot.errors import UsageError

ROPE_FACTORS = ("short", "long")
WEIGHT_DTYPES = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BuildDefaults:
    """Options of `build` that were given to `convert`; None: not given. precision: w8 or w4g128 (weight only)."""

    precision: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """Either `model_dir`, or `config` and `random_weights`.

    model_dir       Hugging Face directory
    lora            directory of a LoRA adapter, which is merged into the model of model_dir
    config          a Hugging Face config.json; the weights are drawn from the seed `random_weights`
    dtype           type of the stored weights; None keeps each as it is (random weights: bf16)
    max_mem         bytes this process may use
    rope_factors    "short" or "long": which of longrope's factors rotate the tokens; None: short, where there are any
    """

    output_dir: Path
    model_dir: Path | None = None
    config: Path | None = None
    random_weights: int | None = None
    dtype: DType | None = None
    max_mem: int | None = None
    rope_factors: str | None = None
    lora: Path | None = None
    build_defaults: BuildDefaults = dataclasses.field(default_factory=BuildDefaults)

    def __post_init__(self) -> None:
        if (self.model_dir is None) == (self.config is None):
            raise UsageError(
                "give either --model_dir or --config",
                hint="--model_dir takes a model with weights; --config needs --random_weights SEED",
            )
        if (self.config is None) != (self.random_weights is None):
            raise UsageError(
                "--config and --random_weights go together",
                hint="for real weights give the model's directory as --model_dir",
            )
        if self.lora is not None and self.model_dir is None:
            raise UsageError("--lora needs --model_dir, the adapter's base model", got=str(self.lora))
        if self.rope_factors not in (None, *ROPE_FACTORS):
            raise UsageError("--rope_factors is unknown", expected=", ".join(ROPE_FACTORS), got=self.rope_factors)
        if self.random_weights is not None and self.random_weights < 0:
            raise UsageError("--random_weights must not be negative", got=str(self.random_weights))
        if self.dtype is not None and self.dtype not in WEIGHT_DTYPES.values():
            raise UsageError("--dtype is not a weight type", expected=", ".join(WEIGHT_DTYPES), got=self.dtype.value)
        for name in ("tp_size", "pp_size"):
            size = getattr(self.build_defaults, name)
            if size is not None and size < 1:
                raise UsageError(f"--{name} must be at least 1", got=str(size))
        given = {name: size for name, size in dataclasses.asdict(self.build_defaults).items() if size is not None}
        BuildConfig(**given)  # refuses what no build would take
