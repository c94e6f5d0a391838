"""What a plan asks of a GPU session: for what its kernels are compiled, how heads are grouped, how much scratch memory
its largest step needs, where its weights and its machine code lie."""

import dataclasses

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import CacheGroup, Plan, Rows, Step, Weight
from ingot.plugins.cuda.compiler import Specialisation
from ingot.plugins.cuda.exchanges import exchanged_bytes
from ingot.plugins.cuda.shapes import (
    MAX_DECODE_GROUP,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_LATENT_DIM,
    MAX_RANK,
    MAX_SPLITS,
    Tiles,
    latent_tokens,
    prefill_tokens,
)
from ingot.plugins.cuda.work import ScratchBytes
from ingot.plugins.ops import moe_down
from ingot.plugins.registry import find_op

CUBLASLT = "cuBLASLt"
LIBRARY = ".cublaslt"  # ends the names of kernels that leave products of more than a few rows to cuBLASLt
WIDE = "sm90a"  # in the names of kernels that compute products of more than a few rows, or prompts, by warpgroups
WIDE_CODE = "sm_90a"  # the machine code that has them
FP8_UNITS = "sm89"  # in the names of kernels that multiply FP8 by the instructions of warps
CODE_LAYOUT = "cubin12."  # of machine code among the weights; the number counts changes of names and parameters
_WEIGHT_ALIGNMENT = 256  # bytes


def _typed_input(step: Step) -> int | None:
    """The input whose type kernels are compiled for: a packed weight, or the first table."""
    op = find_op(step.op)
    return op.packed if op.packed is not None else next(iter(op.tables), None)


def specialisation(plan: Plan) -> Specialisation:
    """What the plan's kernels are compiled for. Raises EngineError for what they cannot do."""
    typed = {step.inputs[at] for step in plan.steps if (at := _typed_input(step)) is not None}
    stored = {weight.dtype for weight in plan.weights if weight.name in typed}
    codes = tuple(sorted((each for each in stored if each.is_quantised), key=lambda each: each.value))
    types = {DType.BF16 if each.is_quantised else each for each in stored}
    if len(types) > 1:
        raise EngineError(
            "a cuda target needs one float type for all matmuls and the token table",
            where="the types of weights",
            expected="one of f32, bf16 and f16",
            got=", ".join(sorted(each.value for each in stored)),
            hint="convert the model with --dtype bf16"
            if codes
            else "build with one --precision, or make the types in the recipe of --config equal",
        )
    _check_heads(plan)
    kv = heads_of(plan)
    if (parts := max((each.parts for each in plan.splits), default=1)) > MAX_SPLITS:
        raise EngineError(
            "the plan cuts contexts into more parts than a cuda target combines",
            where="splits",
            expected=f"at most {MAX_SPLITS} parts",
            got=str(parts),
            hint="build the engine again",
        )
    weight = types.pop() if types else DType.BF16 if kv.has_codes else kv.dtype
    exact = DType.F32 if weight is DType.F32 else DType.BF16  # which holds every code
    return Specialisation(
        weight=weight,
        kv=exact if kv.has_codes else kv.dtype,
        kv_codes=kv.dtype if kv.has_codes else None,
        head_dim=kv.head_dim,
        tokens_per_block=plan.tokens_per_block,
        codes=codes,
        experts=any(op.routes or op.experts or op.lists for op in (find_op(step.op) for step in plan.steps)),
        states=any(each.state for each in plan.caches),
        latent=kv.latent,
        wide=any(takes_wide(step) for step in plan.steps if find_op(step.op).packed is not None),
        fp8=any(map(takes_fp8, plan.steps)),
    )


def _check_heads(plan: Plan) -> None:
    """Raises EngineError for attention that has no kernels."""
    kinds, kv = _kinds(plan), heads_of(plan)
    attended = [each for each in plan.caches if not each.state]
    if kv.latent > MAX_RANK or kv.head_dim > MAX_LATENT_DIM:
        raise EngineError(
            "latent attention with rows of this size is not supported on cuda targets",
            expected=f"at most {MAX_LATENT_DIM} numbers, of which at most {MAX_RANK} are the value",
            got=f"{kv.head_dim}, {kv.latent}",
        )
    several = len({(each.head_dim, each.latent) for each in attended}) > 1 and any(each.latent for each in attended)
    largest = max((each.head_dim for each in attended if not each.latent), default=0)
    group = max((group for group, of in kinds if not of.latent), default=1)
    if several or largest > MAX_HEAD_DIM or group > MAX_GROUP:
        raise EngineError(
            "attention with heads of these sizes is not supported on cuda targets",
            expected=f"heads of at most {MAX_HEAD_DIM} dims with at most {MAX_GROUP} query heads per KV head, "
            "or latents alone",
            got=f"KV heads and their dims {sorted({(each.kv_heads, each.head_dim) for each in attended})}, "
            f"groups of {sorted({group for group, _ in kinds})}",
        )
    if plan.decode_tokens > (most := 1 if kv.latent else MAX_DECODE_GROUP // group):
        raise EngineError(
            "attention in decode would have more rows than a tile",
            where="the plan: decode_tokens",
            expected=f"at most {most}, with {group} query heads per KV head",
            got=str(plan.decode_tokens),
            hint="build the engine again",
        )
    if len({each.dtype for each in attended}) > 1:
        raise EngineError(
            "a cuda target needs one type for the KV cache of all layers",
            where="the plan: caches",
            got=", ".join(sorted({each.dtype.value for each in attended})),
            hint="build the engine again",
        )


def all_specialisations(plan: Plan) -> tuple[Specialisation, ...]:
    """The plan's own, then one for each further size of heads. Raises EngineError as `specialisation`."""
    first = specialisation(plan)
    further = dict.fromkeys(each.head_dim for each in plan.caches if not each.state and each.head_dim != first.head_dim)
    alone = dataclasses.replace(first, codes=(), experts=False, states=False, wide=False, fp8=False, alone=True)
    every = first, *(dataclasses.replace(alone, head_dim=each) for each in further)
    prompts = {
        plan.caches[plan.group_of(int(step.attrs["layer"]))].head_dim
        for step in plan.steps
        if find_op(step.op).reads_kv and takes_wide(step)
    }
    return tuple(dataclasses.replace(each, warpgroups=each.head_dim in prompts) for each in every)


def _kinds(plan: Plan) -> list[tuple[int, CacheGroup]]:
    """Query heads of one KV head, and the cache group that is read: of each attention."""
    return [
        (int(each.attrs["heads"]) // int(each.attrs["kv_heads"]), plan.caches[plan.group_of(int(each.attrs["layer"]))])
        for each in plan.steps
        if find_op(each.op).reads_kv
    ]


def heads_of(plan: Plan) -> CacheGroup:
    """The first cache group with heads, for whose attention all kernels are compiled; of a plan without attention one
    that nothing uses."""
    unused = CacheGroup(
        layers=(), kv_heads=1, head_dim=16, tokens_per_block=plan.tokens_per_block, dtype=plan.caches[0].dtype
    )
    return next((each for each in plan.caches if not each.state), unused)


def has_ranks(plan: Plan) -> bool:
    """Whether the plan is that of one of several ranks, which exchange data."""
    return plan.stage[1] > 1 or any(find_op(step.op).collective is not None for step in plan.steps)


def needs_library(plan: Plan) -> bool:
    """Whether cuBLASLt computes products of the plan."""
    return any(takes_library(step) for step in plan.steps)


def takes_library(step: Step) -> bool:
    """Whether cuBLASLt computes a step's product where there are more than a few rows."""
    return step.kernel.endswith(LIBRARY)


def takes_wide(step: Step) -> bool:
    """Whether warpgroups compute a step's product of more than a few rows, or its attention of prompts."""
    return step.kernel.split(".")[2:3] == [WIDE]


def takes_fp8(step: Step) -> bool:
    """Whether a step multiplies codes of FP8 on both sides."""
    return step.kernel.split(".")[1:2] == ["f8f8"]


def tiles_of(plan: Plan) -> Tiles:
    """How its attention cuts sequences into items, which are the same for all layers."""
    prefill = (
        latent_tokens(group) if kv.latent else prefill_tokens(group, kv.head_dim)
        for group, kv in _kinds(plan) or [(1, heads_of(plan))]
    )
    return Tiles(decode=plan.decode_tokens, prefill=max(prefill))


def scratch_bytes(plan: Plan) -> ScratchBytes:
    """For the largest step within the limits."""
    rows = {Rows.TOKENS: plan.limits.max_num_tokens, Rows.LOGITS: plan.limits.max_logit_rows}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    weights = {weight.name: weight for weight in plan.weights}
    sums = [0]
    for step in plan.steps:
        op = find_op(step.op)
        if op.packed is None:
            continue
        x, weight = buffers[step.inputs[0]], weights[step.inputs[op.packed]]
        count, taken = rows[x.rows], 1
        if op.experts:
            taken = buffers[step.inputs[1]].cols
        adds = find_op(op.plain(step).op) is moe_down.OP
        if takes_library(step) or adds:  # all other products write their results where they belong
            sums.append(4 * count * taken * weight.shape[-2])
        cut = (each for each in plan.tiles_of(step.name) if each.parts > 1)
        sums.extend(4 * each.parts * min(each.most_rows, count) * weight.shape[-2] for each in cut)
    return ScratchBytes(sums=max(sums), exchanged=exchanged_bytes(plan))


def weight_places(plan: Plan) -> tuple[dict[str, int], int]:
    """(where each weight begins on the device, bytes of all): as in the file, but pieces of one weight lie together."""
    if all(len(weight.pieces) == 1 for weight in plan.weights):
        return {weight.name: weight.pieces[0].offset for weight in plan.weights}, plan.weight_bytes
    places, end = {}, 0
    for weight in plan.weights:
        places[weight.name] = end
        end += -(-weight.nbytes // _WEIGHT_ALIGNMENT) * _WEIGHT_ALIGNMENT
    return places, end


def code_weight(plan: Plan) -> Weight:
    """The piece of the weights section that holds the machine code. Raises EngineError where there is none."""
    return next(iter(code_weights(plan).values()))


def code_weights(plan: Plan) -> dict[int, Weight]:
    """Size of heads → the machine code for them; that of the first size has all other kernels too. Raises EngineError
    where some is missing."""
    sizes = [each.head_dim for each in all_specialisations(plan)]
    found = [weight for weight in plan.weights if weight.layout.startswith(CODE_LAYOUT)]
    if len(found) != len(sizes):
        raise EngineError(
            "the engine holds no machine code that this version of ingot runs",
            where="the weights of the plan",
            expected=f"code for heads of {' and of '.join(map(str, sizes))} dims",
            got=f"{len(found)} piece{'' if len(found) == 1 else 's'} of code",
            hint="rebuild the engine",
        )
    return dict(zip(sizes, found, strict=True))
