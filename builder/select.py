"""Which kernel computes an op: the first of the target's list named `<op>.<dtype>.*`."""

import functools
import re

from ingot.errors import NoKernelError
from ingot.plugins.registry import find_op
from ingot.plugins.target import Target

_SEVERAL = {  # plugins that become more than one step
    "PagedAttention": ("rope_kv_write", "paged_attention"),
    "SharedAttention": ("rope_query", "paged_attention"),
}
ATTENTIONS = tuple(_SEVERAL)


@functools.cache
def plan_ops(plugin: str) -> tuple[str, ...]:
    """The plan ops that a plugin of the graph becomes: RmsNorm → rms_norm."""
    return _SEVERAL.get(plugin, (re.sub(r"(?<!^)(?=[A-Z])", "_", plugin).lower(),))


def plugin_of(op: str) -> str:
    """The plugin of the graph that becomes this plan op alone: rms_norm → RmsNorm."""
    return "".join(word.capitalize() for word in op.split("_"))


def kernel_dtype(dtype: str, activations: str) -> str:
    """The second part of a kernel's name: w8a8 is a product of w8 weights and int8 activations, f8f8 one of FP8 weights
    and FP8 activations."""
    return dtype + {"int8": "a8", "fp8": "f8"}.get(activations, "")


def rounds_nothing(target: Target, op: str, dtype: str) -> bool:
    """Whether the target has a kernel that leaves its inputs in float32."""
    return any(name.startswith(f"{op}.{dtype}.") and target.activations(name) == "f32" for name in target.kernels())


def choose_kernel(target: Target, op: str, dtype: str, activations: str | None = None) -> str:
    """Name of the best kernel, of a product one that rounds its input to `activations` (None: any). Raises
    NoKernelError with what there is instead.
    """
    names = target.kernels()
    if not names:
        raise NoKernelError(
            f"target {target.name} has no kernels in this installation",
            got=target.run_blocker() or "an empty list",
            hint="`ingot doctor` says what can be built here",
        )
    fitting = [name for name in names if name.startswith(f"{op}.{dtype}.")]
    taking = [name for name in fitting if activations in (None, target.activations(name))]
    if taking:
        return taking[0]
    if fitting:
        raise NoKernelError(
            f"target {target.name} has no kernel for op {op} in {dtype} with {activations} activations",
            expected=" or ".join(sorted({target.activations(name) for name in fitting})),
            got=str(activations),
            hint="choose another --activations or --target",
        )
    if activations == "fp8":
        raise NoKernelError(
            f"target {target.name} has no kernel for op {op} with FP8 activations",
            expected="a matmul or experts, on cuda/sm89 or newer, or on ref",
            got="activations fp8",
            hint="give --activations auto, which keeps inputs in more bits",
        )
    others = sorted({name.split(".")[1] for name in names if name.startswith(f"{op}.")})
    hint = NoKernelError.NEXT
    if not others:
        hint = f"choose another --target, or add a kernel of {op} as docs/how-to/add.md says"
    elif find_op(op).uses_kv:
        hint = "choose another --kv_cache_dtype, --precision or --target"
    raise NoKernelError(
        f"target {target.name} has no kernel for op {op} in {dtype}",
        expected=f"{op}.{dtype}.*",
        got=f"{op} in {', '.join(others)}" if others else f"no kernel for {op} at all",
        hint=hint,
    )
