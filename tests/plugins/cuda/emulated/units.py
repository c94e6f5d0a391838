"""The files of kernels, each of which tests compile by itself: when the first of its kernels is asked for, and once for
all engines that agree in the macros that the file sees. An engine for a GPU has all of them in one piece, kernels.cu.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

UNITS = {  # file → how the names of its kernels begin
    "draw.cu": ("draw_tokens",),
    "experts.cu": ("moe_route", "group_by_expert", "sum_experts"),
    "products.cu": ("product_", "experts_", "heads_"),
    "ranks.cu": ("add_ranks", "join_ranks"),
    "states.cu": (
        *("gated_norm", "causal_conv", "leave_inputs", "linear_attention_"),
        *("delta_prompts_", "kda_prompts_", "mamba_prompts_"),
    ),
    "streams.cu": (
        *("take_columns", "gather_columns", "join_columns"),
        *("mix_streams", "add_to_streams", "match_magnitude", "cut_below"),
    ),
    "latent.cu": ("write_latent", "latent_"),
    "paged_attention.cu": ("attention_",),
    "rope_kv_write.cu": ("rotate_and_",),
    "rows.cu": (
        *("embed", "rope_table", "residual_norm", "epilogue", "gather_rows"),
        *("soft_cap", "scale_rows", "add_gated", "gate_rows", "round_to_fp8"),
    ),
}


def unit_of(kernel: str) -> str:
    """The file that has the kernel. Raises KeyError where none has."""
    for unit, beginnings in UNITS.items():
        if kernel.startswith(beginnings):
            return unit
    raise KeyError(kernel)


def units_of(macros: Sequence[str]) -> Iterator[str]:
    """Those of an engine, as kernels.cu includes them. macros: as on the compiler's command line."""
    latent = any(each.startswith("-DINGOT_LATENT=") for each in macros)
    attention = {"latent.cu"} if latent else {"paged_attention.cu", "rope_kv_write.cu"}
    others = UNITS.keys() - {"latent.cu", "paged_attention.cu", "rope_kv_write.cu"}
    return (unit for unit in UNITS if unit in attention or (unit in others and "-DINGOT_ATTENTION_ALONE" not in macros))


def seen_by(unit: str, sources: Path, macros: Sequence[str]) -> tuple[list[str], list[bytes]]:
    """(the macros that are named in the file or in what it includes, the texts of all these files)."""
    texts: dict[str, bytes] = {}
    left = [unit]
    while left:
        if (name := left.pop()) not in texts and (sources / name).is_file():
            texts[name] = (sources / name).read_bytes()
            left += re.findall(r'#include "([^"]+)"', texts[name].decode())
    named = set(re.findall(rb"\bINGOT_\w+", b"\n".join(texts.values())))
    seen = [each for each in macros if each[2:].partition("=")[0].encode() in named]
    return seen, [texts[name] for name in sorted(texts)]
