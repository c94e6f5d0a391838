"""What must hold between the fields of a Plan, whatever its target: names, places, the order of writing and reading.

Each single field has been read by its type already. What an op wants of its inputs is checked by the target's session
when it opens (`plugins/cpu/execution/binder.h`, `plugins/ref/check.py`, ...).
"""

import itertools
from collections import Counter
from collections.abc import Iterable

from ingot.dtypes import KV_CODES, DType
from ingot.errors import REBUILD, EngineError
from ingot.plan import (
    ALIGNMENT,
    HEAD_DIM_MULTIPLE,
    MOST_HEAD_DIM,
    MOST_HEADS,
    STATE_WINDOW,
    Attr,
    Buffer,
    CacheGroup,
    Input,
    Limits,
    Plan,
    Rows,
    Step,
    Variant,
    Weight,
)

_BUFFER_DTYPES = (DType.F32, DType.BF16, DType.F16, DType.F8, DType.I32)
_KV_DTYPES = (DType.F32, DType.F16, DType.BF16, *KV_CODES)
_MOST_DIMENSIONS = 3
_MOST_STATE = 1 << 40  # numbers of a slot
_TABLES, _OF_WRITERS, _OF_READERS = "block_tables", "token_sequences", "past_lengths"


def check_plan(plan: Plan, where: str = "plan") -> None:
    """Raise EngineError for a plan that no build makes."""
    for what, found in _problems(plan):
        raise EngineError("the engine's plan is invalid", where=f"{where}:{what}", got=found, hint=REBUILD)


def buffer_bytes(plan: Plan, buffer: Buffer) -> int:
    """Bytes of a buffer in the largest step, without what fills its last cache line."""
    rows = plan.limits.max_num_tokens if buffer.rows is Rows.TOKENS else plan.limits.max_logit_rows
    return rows * buffer.cols * buffer.dtype.itemsize


def _problems(plan: Plan) -> Iterable[tuple[str, str]]:
    """(where, what is wrong) of everything that is, the first things first."""
    yield from _limits(plan)
    yield from _caches(plan)
    yield from _names(plan)
    yield from _arena(plan)
    yield from _weights(plan)
    yield from _steps(plan)
    yield from _variants(plan)
    yield from _splits(plan)
    yield from _decode_sizes(plan)
    yield from _tilings(plan)


def _limits(plan: Plan) -> Iterable[tuple[str, str]]:
    limits = plan.limits
    if limits.max_seq_len > plan.max_positions + 1:
        yield "limits.max_seq_len", f"{limits.max_seq_len} tokens for {plan.max_positions} positions"
    if limits.max_input_len > min(limits.max_seq_len, plan.max_positions):
        yield "limits.max_input_len", f"{limits.max_input_len}, beyond what a sequence may have"
    if limits.max_logit_rows > limits.max_num_tokens:
        yield "limits.max_logit_rows", f"{limits.max_logit_rows} rows of {limits.max_num_tokens} tokens"


def _caches(plan: Plan) -> Iterable[tuple[str, str]]:
    """Layers are numbered from 0, each is in one group; no step looks back further than its group keeps tokens."""
    layers = sorted(layer for group in plan.caches for layer in group.layers)
    if not plan.caches or layers != list(range(len(layers))):
        yield "caches", f"they hold the layers {layers[:20]}, expected each from 0 on once"
        return
    for index, group in enumerate(plan.caches):
        if not group.layers:
            yield f"caches.{index}.layers", "none"
        yield from _group(f"caches.{index}", group)
        if group.tokens_per_block != plan.tokens_per_block:
            yield f"caches.{index}.tokens_per_block", f"{group.tokens_per_block} after {plan.tokens_per_block}"
        if group.dtype not in _KV_DTYPES:
            expected = ", ".join(each.value for each in _KV_DTYPES)
            yield f"caches.{index}.dtype", f"{group.dtype.value}, expected {expected}"
    states = {layer for group in plan.caches if group.state for layer in group.layers}
    windows, written = {layer: group.window for group in plan.caches for layer in group.layers}, set[int]()
    for step in plan.steps:
        layer = _whole(step.attrs.get("layer"))
        reads = layer not in states and _reads(step)
        if _writes(step):
            written.add(layer)
        elif reads and layer in windows and layer not in written:
            yield f"steps.{step.name}.layer", f"{layer}, whose keys and values no earlier kernel call has written"
        kept, window = windows.get(layer), _whole(step.attrs.get("window"))
        if kept and reads and not 0 < window <= kept:
            yield f"steps.{step.name}.window", f"{window}, its cache keeps {kept} tokens"


def _writes(step: Step) -> bool:
    """Whether it writes keys and values: it must know where each token lies. Its inputs are those of its op's spec."""
    return {_TABLES, _OF_WRITERS} <= set(step.inputs)


def _reads(step: Step) -> bool:
    """Whether it reads keys and values, or a state: it must know how many tokens of a sequence come before."""
    return {_TABLES, _OF_READERS} <= set(step.inputs)


def _group(where: str, group: CacheGroup) -> Iterable[tuple[str, str]]:
    """A group has heads or states; the first one of a plan has heads, of which ranks may have a part."""
    if (group.state or group.latent) and (group.heads_before or group.heads_behind):
        yield where, "heads of other ranks, which share neither states nor latents"
    if group.state:
        given = group.window, group.kv_heads, group.head_dim, group.dtype, len(group.state)
        wanted = STATE_WINDOW, 0, 0, DType.F32, len(group.layers)
        if given != wanted:
            yield where, f"states with {given}, expected {wanted}: window, kv_heads, head_dim, dtype, sizes of states"
        if where == "caches.0":
            yield where, "states, expected keys and values in the first group"
        if sum(group.state) > _MOST_STATE:
            yield where, f"{sum(group.state)} numbers of states, expected at most {_MOST_STATE}"
        return
    if group.kv_heads < 1:
        yield f"{where}.kv_heads", f"{group.kv_heads}, expected from 1 to {MOST_HEADS}"
    if group.latent:
        if group.kv_heads != 1 or group.window or group.has_codes or group.latent > group.head_dim:
            found = f"{group.kv_heads} heads, a window of {group.window}, {group.dtype.value}, {group.latent} values"
            yield where, f"{found}, expected one head, no window, no codes, values within keys of {group.head_dim}"
    elif not HEAD_DIM_MULTIPLE <= group.head_dim <= MOST_HEAD_DIM:
        yield f"{where}.head_dim", f"{group.head_dim}, expected from {HEAD_DIM_MULTIPLE} to {MOST_HEAD_DIM}"


def _whole(value: Attr | None) -> int:
    return value if isinstance(value, int) else -1


def _names(plan: Plan) -> Iterable[tuple[str, str]]:
    named: Iterable[Input | Buffer | Weight] = (*plan.inputs, *plan.buffers, *plan.weights)
    places = Counter(each.name for each in named)
    yield from (("inputs, buffers, weights", f"two are called {name}") for name, count in places.items() if count > 1)
    steps = Counter(step.name for step in plan.steps)
    yield from (("steps", f"two are called {name}") for name, count in steps.items() if count > 1)
    yield from (("tactics", f"there is no kernel call {name}") for name in plan.tactics if name not in steps)
    if plan.sum_parts & (plan.sum_parts - 1):
        yield "sum_parts", f"{plan.sum_parts}, expected a power of two"


def _arena(plan: Plan) -> Iterable[tuple[str, str]]:
    for buffer in plan.buffers:
        if buffer.dtype not in _BUFFER_DTYPES:
            expected = ", ".join(each.value for each in _BUFFER_DTYPES)
            yield f"buffers.{buffer.name}.dtype", f"{buffer.dtype.value}, expected {expected}"
    end = max((each.offset + buffer_bytes(plan, each) for each in plan.buffers), default=0)
    end = -(-end // ALIGNMENT) * ALIGNMENT
    if plan.arena_bytes != end:
        yield "arena_bytes", f"{plan.arena_bytes}, its buffers end at {end}"
    logits = next((each for each in plan.buffers if each.name == plan.logits), None)
    if bool(plan.logits) != bool(plan.draw_kernel):
        yield "draw_kernel", f"{plan.draw_kernel or 'none'} for {plan.logits or 'no logits'}"
    if not plan.logits:  # of a pipeline stage that is not the last
        return
    if logits is None or (logits.rows, logits.cols, logits.dtype) != (Rows.LOGITS, plan.vocab_size, DType.F32):
        yield "logits", f"{plan.logits} is not a buffer of logit rows with {plan.vocab_size} columns of f32"


def _weights(plan: Plan) -> Iterable[tuple[str, str]]:
    places = []
    for weight in plan.weights:
        if not 1 <= len(weight.shape) <= _MOST_DIMENSIONS:
            yield f"weights.{weight.name}.shape", f"{len(weight.shape)} dimensions"
        position = 0
        for piece in weight.pieces:
            if piece.begin != position or piece.end <= piece.begin:
                yield f"weights.{weight.name}.pieces", f"{piece.begin} to {piece.end} after {position}"
            position = piece.end
        if position == 0 or weight.nbytes == 0 or weight.nbytes % position:
            yield f"weights.{weight.name}", f"{weight.nbytes} bytes in {position} equal parts"
            continue
        places += _places(weight, weight.nbytes // position)
    places.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(places):
        if begin < end:
            yield "weights", f"{name} and {other} lie in the same place"
    if places and (last := max(end for _, end, _ in places)) > plan.weight_bytes:
        yield "weights", f"they end at {last} of {plan.weight_bytes} bytes"


def _places(weight: Weight, unit_bytes: int) -> list[tuple[int, int, str]]:
    """(first byte, byte after the last, name) of each piece."""
    return [(each.offset, each.offset + (each.end - each.begin) * unit_bytes, weight.name) for each in weight.pieces]


def _steps(plan: Plan) -> Iterable[tuple[str, str]]:
    """Steps read weights, all inputs, and buffers whose bytes a step before has written and none has written over."""
    if not plan.steps or (plan.logits not in plan.steps[-1].outputs if plan.logits else plan.steps[-1].op != "send"):
        yield (
            "steps",
            f"the last one of {len(plan.steps)} does not write {plan.logits or 'logits, nor send its rows on'}",
        )
    yield from _stages(plan)
    constant = {each.name for each in plan.inputs} | {each.name for each in plan.weights}
    meeting, written = overlaps(plan), set[str]()
    for step in plan.steps:
        for name in filter(None, step.inputs):
            if name in meeting and name not in written:
                yield f"steps.{step.name}", f"reads {name}, which no earlier kernel call has written"
            elif name not in meeting and name not in constant:
                yield f"steps.{step.name}", f"there is no buffer, weight or input {name}"
        for name in filter(None, step.outputs):
            if name not in meeting:
                yield f"steps.{step.name}", f"there is no buffer {name}"
            written -= meeting.get(name, set())
            written.add(name)
    read = {name for step in plan.steps for name in step.inputs}
    yield from ((f"inputs.{each.name}", "no kernel call reads it") for each in plan.inputs if each.name not in read)


def _stages(plan: Plan) -> Iterable[tuple[str, str]]:
    """A stage gets its rows from the one before it and passes rows on to the next one; messages are numbered."""
    stage, stages = plan.stage
    for op, expected in (("recv", stage > 0), ("send", stage + 1 < stages)):
        found = [step for step in plan.steps if step.op == op]
        if bool(found) != expected:
            yield "steps", f"{len(found)} kernel calls of {op} in stage {stage} of {stages}"
        for number, step in enumerate(found):
            given = step.attrs.get("stage"), step.attrs.get("stages"), step.attrs.get("message")
            if given != (stage, stages, number):
                yield f"steps.{step.name}", f"{given}, expected {(stage, stages, number)}: stage, stages, message"
    if bool(plan.logits) != (stage + 1 == stages):
        yield "logits", f"{plan.logits or 'none'} in stage {stage} of {stages}"


def overlaps(plan: Plan) -> dict[str, set[str]]:
    """Buffer → the others that share bytes with it."""
    ends = {each.name: each.offset + buffer_bytes(plan, each) for each in plan.buffers}
    return {
        one.name: {
            other.name
            for other in plan.buffers
            if other is not one and other.offset < ends[one.name] and one.offset < ends[other.name]
        }
        for one in plan.buffers
    }


def _variants(plan: Plan) -> Iterable[tuple[str, str]]:
    """They are for more and more tokens, up to the limit. What kernels want of them is checked by the session."""
    names, most = Counter(each.name for each in plan.variants), 0
    yield from (("variants", f"two are called {name}") for name, count in names.items() if count > 1)
    for variant in plan.variants:
        where = f"variants.{variant.name}"
        if variant.most_tokens <= most:
            yield where, f"for {variant.most_tokens} tokens, behind one for {most}"
        most = variant.most_tokens
        yield from ((where, found) for found in _calls(plan, variant))
    if plan.variants and most != plan.limits.max_num_tokens:
        yield "variants", f"the last one is for {most} tokens, a step may have {plan.limits.max_num_tokens}"


def _splits(plan: Plan) -> Iterable[tuple[str, str]]:
    """They are for more and more items, up to the largest batch: kernels write the results of parts where these fit."""
    counts = [each.most_items for each in plan.splits]
    if counts and (counts != sorted(set(counts)) or counts[-1] != plan.limits.max_batch_size):
        yield "splits", f"for {counts[:20]} items, expected more and more up to {plan.limits.max_batch_size}"


def _decode_sizes(plan: Plan) -> Iterable[tuple[str, str]]:
    """They grow, and every one of these steps keeps the limits."""
    sizes, most = plan.decode_sizes, most_decoding(plan.limits)
    if sizes and (list(sizes) != sorted(set(sizes)) or sizes[-1] > most):
        yield "decode_sizes", f"{sizes[:20]}, expected larger and larger ones up to {most}"


def _tilings(plan: Plan) -> Iterable[tuple[str, str]]:
    """A step has tiles once, for more and more rows up to those that it may have."""
    steps = {step.name: step for step in plan.steps}
    rows = {buffer.name: buffer.rows for buffer in plan.buffers}
    for name, count in Counter(name for each in plan.tilings for name in each.steps).items():
        if name not in steps:
            yield "tilings", f"there is no kernel call {name}"
            continue
        if count > 1:
            yield "tilings", f"{name} has tiles twice"
        tokens = any(rows.get(output) is Rows.TOKENS for output in steps[name].outputs)
        most = plan.limits.max_num_tokens if tokens else plan.limits.max_logit_rows
        found = [tile.most_rows for tile in plan.tiles_of(name)]
        if found != sorted(set(found)) or found[-1:] != [most]:
            yield "tilings", f"{name} has tiles for {found[:20]} rows, expected more and more up to {most}"


def most_decoding(limits: Limits) -> int:
    """Sequences of the largest step that has one token and one row of logits of each."""
    return min(limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows)


def _calls(plan: Plan, variant: Variant) -> Iterable[str]:
    """Every step is called or computed by a later call, once, in the order of the steps; all threads end together."""
    order, begin, inside = {step.name: i for i, step in enumerate(plan.steps)}, 0, set[str]()
    for call in variant.calls:
        at = order.get(call.step, -1)
        if at < begin:
            yield f"{call.step} is called too late, twice, or there is no such kernel call"
        begin = at + 1
        for name in call.inside:
            if name in inside or order.get(name, at) >= at:
                yield f"{call.step} computes {name}, which is there already, comes later, or is not a kernel call"
            inside.add(name)
    calls = {call.step: call for call in variant.calls}
    for step in plan.steps:
        own, splits = calls.get(step.name), _writes(step)
        if own is None or (step.name in inside and not splits):
            if own is not None or splits or step.name not in inside:
                yield f"kernel call {step.name} is not computed once"
        elif own.kv_only and step.name not in inside:
            yield f"{step.name} writes keys and values alone, and no call computes its queries"
        elif not own.kv_only and step.name in inside:
            yield f"{step.name} computes its queries, and so does another call"
    if not variant.calls or not variant.calls[-1].waits:
        yield "its last call is not waited for"
