"""FP8 (E4M3) with a float scale for blocks of rows and columns, for rows, or for the whole weight.

    weight F8_E4M3 [N, K], weight_scale_inv [N/a, K/b]     DeepSeek, Qwen, MiniMax, GLM: a factor in spite of its name
    weight F8_E4M3 [N, K], weight_scale [N, 1] or []       fbgemm_fp8, and fp8 without blocks

The size of blocks is the configuration's to say: the last ones of a weight may be smaller.
"""

from ingot.configs.read import Section
from ingot.convert.quantised.form import Code, Quantised
from ingot.convert.quantised.module import FLOATS, Format, Module, unsupported

_SCALES = (*FLOATS, "F8_E8M0")
_IDLE = ("input_scale", "activation_scale", "input_scale_ub", "output_scale", "k_scale", "v_scale", "kv_scale")


def read(module: Module) -> Quantised:
    settings = module.settings
    if settings.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unsupported("FP8 with this fmt is not supported", settings, "fmt", "e4m3")
    block = None
    part = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
    module.part(part, _SCALES)
    if module.parts[part].shape not in ((), (1,)) and settings.has("weight_block_size"):
        block = read_block(settings, "weight_block_size")
    return read_fp8(module, part, block)


def read_block(settings: Section, key: str) -> tuple[int, int]:
    """[rows, columns] of a block."""
    sizes = settings.numbers(key)
    if len(sizes) != 2 or any(size != int(size) or size < 1 for size in sizes):
        raise unsupported("FP8 with blocks of this shape is not supported", settings, key, "[rows, columns]")
    return int(sizes[0]), int(sizes[1])


def read_fp8(module: Module, part: str, block: tuple[int, int] | None) -> Quantised:
    """The weight whose scales are in `part`."""
    tensor = module.part("weight", ("F8_E4M3",), 2)
    n, k = tensor.shape
    scale, group = module.blocks_piece(part, n, k, block)
    return module.made((n, k), Code.F8, group, module.stored_codes("weight"), {"scale": scale}, codes="weight")


def _skipped(settings: Section) -> tuple[str, ...]:
    for key in ("modules_to_not_convert", "ignored_layers"):
        if settings.has(key):
            return settings.words(key)
    return ()


FORMAT = Format(
    names=("fp8", "fbgemm_fp8"),
    marks=("weight_scale_inv", "weight_scale"),
    parts=("weight", "weight_scale_inv", "weight_scale", *_IDLE),
    read=read,
    skipped=_skipped,
    idle=_IDLE,
)
