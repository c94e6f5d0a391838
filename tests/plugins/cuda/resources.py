"""What the kernels take of a GPU: `python -m tests.plugins.cuda.resources` writes resources.json, a test holds it.

ptxas says it for each kernel: registers of a thread, bytes of stack and of spills, static shared memory.
"""

import dataclasses
import json
from pathlib import Path

from ingot.dtypes import KV_CODES, DType
from ingot.plugins.cuda.compiler import Specialisation, compile_kernels, find_compiler
from ingot.weight_formats import FORMATS

FILE = Path(__file__).with_name("resources.json")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
USUAL = Specialisation(weight=DType.BF16, kv=DType.BF16, head_dim=128, tokens_per_block=32)
LARGE = dataclasses.replace(USUAL, head_dim=256)
CODES = tuple(DType(each) for each in sorted(FORMATS))
ALL = dataclasses.replace(USUAL, codes=CODES, experts=True, states=True)
CODES_OF_KV = tuple(dataclasses.replace(USUAL, kv_codes=each, alone=True) for each in KV_CODES)
WIDE = dataclasses.replace(USUAL, head_dim=512, alone=True)
OF_WARPGROUPS = dataclasses.replace(  # whose other kernels are in ALL
    USUAL, codes=CODES, experts=True, wide=True, fp8=True
)
OF_FP8 = dataclasses.replace(USUAL, codes=(DType.F8,), experts=True, fp8=True)  # by warps
FP8_ARCHITECTURES = ("sm_89", "sm_100", "sm_120")
PROMPTS = tuple(dataclasses.replace(USUAL, head_dim=dim, alone=True, warpgroups=True) for dim in (64, 128))
LATENT = dataclasses.replace(USUAL, head_dim=576, latent=512)

Report = dict[str, dict[str, int]]


def label(specialisation: Specialisation, architecture: str) -> str:
    more = " with codes, experts and states" if specialisation.states else ""
    more = f", {specialisation.latent} of them values" if specialisation.latent else more
    more = ", attention alone" if specialisation.alone else more
    more += f" over {specialisation.kv_codes.value}" if specialisation.kv_codes else ""
    more += ", matmuls of warpgroups" if specialisation.wide else ""
    more += " by warpgroups" if specialisation.warpgroups else ""
    more += ", inputs in FP8" if specialisation.fp8 and not specialisation.wide else ""
    return f"{architecture} {specialisation.weight.value} head_dim {specialisation.head_dim}{more}"


def measure(specialisation: Specialisation, architecture: str) -> Report:
    """Kernel → what it takes."""
    kernels = compile_kernels(specialisation, architecture).kernels
    found = {name: dataclasses.asdict(each) for name, each in sorted(kernels.items())}
    if not (specialisation.wide or specialisation.fp8):
        return found
    kind = "wide" if specialisation.wide else "f8f8"
    return {name: each for name, each in found.items() if kind in name or name in ("product_sum", "round_to_fp8")}


def recorded() -> dict[str, Report]:
    """What resources.json says."""
    found: dict[str, Report] = json.loads(FILE.read_text())["kernels"]
    return found


def main() -> None:
    """Compile everything and write the file."""
    compiler = find_compiler()
    assert compiler is not None, "this needs nvcc"
    kernels = {
        label(each, sm): measure(each, sm) for sm in ARCHITECTURES for each in (USUAL, LARGE, WIDE, *CODES_OF_KV)
    }
    prompts = [(each, "sm_90a") for each in PROMPTS]
    fp8 = [(OF_FP8, sm) for sm in FP8_ARCHITECTURES]
    for each, sm in ((ALL, "sm_90a"), (OF_WARPGROUPS, "sm_90a"), (LATENT, "sm_80"), (LATENT, "sm_90a"), *prompts, *fp8):
        kernels[label(each, sm)] = measure(each, sm)
    FILE.write_text(json.dumps({"nvcc": compiler.version, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
