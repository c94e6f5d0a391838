"""Plans of a single step, run by a session on the emulated GPU and by the op's reference on the same numbers."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.builder.memory import Value
from ingot.builder.pack import add_constants
from ingot.builder.passes.choose_tiles import choose_tiles
from ingot.builder.passes.size_decode_items import SizeDecodeItems
from ingot.builder.passes.use_prompt_kernels import use_prompt_kernels
from ingot.builder.pipeline import StepPass, input_passes, run_step_passes
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plan import ALIGNMENT, Attr, Buffer, CacheGroup, Plan, Split, Step
from ingot.plan_check import buffer_bytes
from ingot.plugins.cuda.kv_blocks import pack, unpack
from ingot.plugins.cuda.session import CudaSession
from ingot.plugins.cuda.target import CudaTarget
from ingot.plugins.op import Array, KvCache
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from tests.plugins.cpu.one_step import Input, Packed, one_step_plan

ORDERS = (0, 1)  # of an emulated GPU's threads: forwards, backwards


def layout_of(dtype: DType, head_dim: int = 16, kv_heads: int = 1, tokens_per_block: int = 16) -> CacheGroup:
    """Each combination of type, head_dim and tokens_per_block is compiled once: tests share few."""
    return CacheGroup(
        layers=(0, 1), kv_heads=kv_heads, head_dim=head_dim, tokens_per_block=tokens_per_block, dtype=dtype
    )


def open_gpu(plan: Plan, section: npt.NDArray[np.uint8], num_blocks: int) -> CudaSession:
    """A session with machine code added to the plan, and what prepares the step's inputs."""
    target = find_target("cuda/sm90")
    assert isinstance(target, CudaTarget)
    shapes = {weight.name: weight.shape for weight in plan.weights}
    sized = SizeDecodeItems(rules=target.split_rules())
    plan = prepared(plan, (sized, *input_passes(target, shapes.__getitem__)))
    plan, _ = use_prompt_kernels(plan, target.prompt_kernel)
    plan, _ = choose_tiles(plan, target.tiles)
    constants = target.extra_sections(plan, lambda what, done, total: None)
    (plan,) = add_constants([plan], [constants])
    whole = np.zeros(plan.weight_bytes, np.uint8)
    whole[: len(section)] = section[: plan.weight_bytes]
    for weight, constant in zip(plan.weights[-len(constants) :], constants, strict=True):
        (piece,) = weight.pieces
        whole[piece.offset : piece.offset + piece.end] = np.frombuffer(constant.data, np.uint8)
    return target.open_session(plan, whole, SessionOptions(num_blocks=(num_blocks,)))


def prepared(plan: Plan, passes: Sequence[StepPass]) -> Plan:
    """The plan after passes that add steps. What these write lies behind all other buffers."""
    place = {buffer.name: index for index, buffer in enumerate(plan.buffers)}
    drafts = [
        Draft(
            name=step.name,
            op=step.op,
            kernel=step.kernel,
            inputs=tuple(place.get(name, name or None) for name in step.inputs),
            outputs=tuple(place.get(name) for name in step.outputs),
            attrs=step.attrs,
        )
        for step in plan.steps
    ]
    values = tuple(Value(rows=each.rows, cols=each.cols, dtype=each.dtype) for each in plan.buffers)
    made = run_step_passes(Program(steps=tuple(drafts), values=values, logits=place[plan.logits]), passes)
    buffers, end = list(plan.buffers), plan.arena_bytes
    for number, value in enumerate(made.values[len(values) :]):
        name = f"made{number}"
        buffers.append(Buffer(name=name, rows=value.rows, cols=value.cols, offset=end, dtype=value.dtype))
        end += -(-buffer_bytes(plan, buffers[-1]) // ALIGNMENT) * ALIGNMENT
    names = [buffer.name for buffer in buffers]
    steps = tuple(
        Step(
            name=each.name,
            op=each.op,
            kernel=each.kernel,
            inputs=tuple(names[ref] if isinstance(ref, int) else ref or "" for ref in each.inputs),
            outputs=tuple("" if index is None else names[index] for index in each.outputs),
            attrs=each.attrs,
        )
        for each in made.steps
    )
    plan = dataclasses.replace(plan, buffers=tuple(buffers), steps=steps, arena_bytes=end)
    return dataclasses.replace(plan, decode_tokens=made.decode_tokens)


def run_step(
    driver: ctypes.CDLL,
    kernel: str,
    inputs: Sequence[Input],
    attrs: Mapping[str, Attr],
    batch: StepBatch,
    cache: KvCache | None = None,
    kv: CacheGroup | None = None,
    pieces: int = 1,
    parts: int = 1,
) -> list[Array]:
    """The outputs; threads run in both orders, which must give the same bits. pieces: of a packed weight in the file;
    parts: of the context of each decode item. A written cache replaces `cache`'s."""
    layout = cache.group if cache else kv or layout_of(DType(kernel.split(".")[1]))
    plan, section = one_step_plan(kernel, inputs, attrs, batch, layout, pieces=pieces)
    splits = (Split(most_items=plan.limits.max_batch_size, parts=parts, least_tokens=1),)
    plan = dataclasses.replace(plan, splits=splits if parts > 1 else ())
    num_blocks = cache.keys.shape[1] if cache else max(1, int(batch.block_tables.max()) + 1)
    found: list[list[Array]] = []
    with contextlib.closing(open_gpu(plan, section, num_blocks)) as session:
        for backwards in ORDERS:
            driver.emulated_run_backwards(backwards)
            for index, value in enumerate(inputs):
                if value is not None and not isinstance(value, Packed):
                    _write(session, plan, f"in{index}", value)
            if cache:
                write_cache(session, cache)
            _, outputs = session.run_tapped(batch, ["step"])
            found.append([outputs["step"][name] for name in sorted(outputs["step"])])
        if cache:
            read_cache(session, cache)
    for one, other in zip(found[0], found[-1], strict=True):
        np.testing.assert_array_equal(one, other)
    return found[0]


def _write(session: CudaSession, plan: Plan, name: str, values: Array) -> None:
    buffer = next(buffer for buffer in plan.buffers if buffer.name == name)
    session.device.upload(session.addresses.arena + buffer.offset, np.ascontiguousarray(values, np.float32))


def write_cache(session: CudaSession, cache: KvCache) -> None:
    """Every slot of every layer; the spare block and the padding dims of values hold NaN."""
    layout = cache.group
    for layer in layout.layers:
        for values, scales, place, width in _pools(session, layout, layer, cache):
            padding = [(0, 1), (0, 0), (0, 0), (0, width - layout.head_dim)]
            whole = np.pad(values, padding, constant_values=np.nan)
            if layout.dtype is DType.I8:  # no code of it is NaN
                whole = np.where(np.isnan(whole), np.float32(85), whole)
            session.device.upload(place, pack(whole, np.pad(scales, padding[:3], constant_values=np.nan), layout))


def read_cache(session: CudaSession, cache: KvCache) -> None:
    """Into the arrays of `cache`."""
    layout = cache.group
    for layer in layout.layers:
        for values, scales, place, width in _pools(session, layout, layer, cache):
            nbytes = layout.kv_heads * layout.tokens_per_block * (width * layout.dtype.itemsize + layout.scale_bytes)
            stored = np.empty((len(values), nbytes), np.uint8)
            session.device.fetch(stored, place)
            session.device.wait()
            found, scales[...] = unpack(stored, layout, width)
            values[...] = found[..., : layout.head_dim]


def _pools(session: CudaSession, layout: CacheGroup, layer: int, cache: KvCache) -> list[tuple[Array, Array, int, int]]:
    """(values of the reference [blocks, kv_heads, tokens_per_block, head_dim], their scales, address, dims stored) of K
    and V."""
    blocks = session.num_blocks[0] + 1
    keys = session.addresses.kv[0] + layer * blocks * (layout.k_block_bytes + layout.v_block_bytes)
    if layout.latent:
        return [(cache.keys[layer], cache.key_scales[layer], keys, layout.head_dim)]
    values = keys + blocks * layout.k_block_bytes
    return [
        (cache.keys[layer], cache.key_scales[layer], keys, layout.head_dim),
        (cache.values[layer], cache.value_scales[layer], values, layout.padded_dim),
    ]
