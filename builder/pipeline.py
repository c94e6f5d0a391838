"""The passes in their order: the table of contents of the builder.

    graph     structure_passes, keep_codes (only for quantised checkpoints: `plan_targets.py`), target_passes
    program   program_passes (cut_stages comes from `plan_targets.py`, which knows of the other stages)
    plan      plan_passes, then those that make its variants (`schedule.py`)

Standard ONNX in, plugins of the domain `ingot` out; whatever is left over is an error, never a guess.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ingot.builder.graph import DOMAIN, Graph, describe, is_weight
from ingot.builder.lower import Lowering
from ingot.builder.passes import (
    eliminate_dead,
    fold_constants,
    fuse_activation,
    fuse_gate_up,
    fuse_residual,
    fuse_residual_norm,
    insert_add_gated,
    insert_embedding,
    insert_latent_attention,
    insert_linear_attention,
    insert_matmul,
    insert_moe,
    insert_paged_attention,
    insert_scale,
    insert_streams,
    merge_qkv,
    recognise_activations,
    recognise_norms,
    select_logit_rows,
)
from ingot.builder.passes.add_in_products import add_in_products
from ingot.builder.passes.base import Pass, PassReport
from ingot.builder.passes.cast_inputs import CastInputs
from ingot.builder.passes.choose_draw_kernel import ChooseDrawKernel
from ingot.builder.passes.choose_kernels import ChooseKernels
from ingot.builder.passes.choose_tiles import choose_tiles
from ingot.builder.passes.compress_weights import CompressWeights
from ingot.builder.passes.round_to_fp8 import OPS as FP8_OPS
from ingot.builder.passes.round_to_fp8 import RoundToFp8
from ingot.builder.passes.screen_lm_head import ScreenLmHead
from ingot.builder.passes.set_precision import SetPrecision
from ingot.builder.passes.size_decode_items import SizeDecodeItems
from ingot.builder.passes.size_decode_steps import size_decode_steps
from ingot.builder.passes.sort_by_expert import SortByExpert
from ingot.builder.passes.split_contexts import split_contexts
from ingot.builder.passes.split_ranks import SplitRanks
from ingot.builder.passes.split_sums import SplitSums
from ingot.builder.passes.store_narrow import StoreNarrow
from ingot.builder.passes.use_library import UseLibrary
from ingot.builder.passes.use_many_rows import UseManyRows
from ingot.builder.passes.use_prompt_kernels import use_prompt_kernels
from ingot.builder.precision import ProductChoice
from ingot.builder.program import Program
from ingot.builder.select import choose_kernel
from ingot.configs.build import BuildConfig
from ingot.dtypes import DType
from ingot.errors import PassError
from ingot.plan import Plan
from ingot.plugins.ops.cast import OP as CAST
from ingot.plugins.ops.sort_by_expert import OP as SORT
from ingot.plugins.target import CapturesDecode, HasManyRows, SplitsContexts, StoresNarrow, Target, WithLibrary
from ingot.plugins.tiles import ChoosesTiles, HasPromptKernels


def structure_passes() -> tuple[Pass, ...]:
    """What the model is, whatever it will run on."""
    return (
        eliminate_dead.PASS,
        fold_constants.PASS,
        recognise_norms.PASS,
        insert_matmul.PASS,  # MatMul + bias
        insert_linear_attention.PASS,  # before the activations: those of its gates are its own
        insert_streams.PASS,  # likewise: a cut of gates ends in one
        recognise_activations.PASS,
        insert_embedding.PASS,
        insert_moe.PASS,  # before fuse_activation, which would take the experts' products apart
        insert_add_gated.PASS,  # before fuse_activation, which takes every product of activations for equally wide
        fuse_gate_up.PASS,  # before fuse_activation, which would take the gate's activation
        insert_latent_attention.PASS,  # before fuse_activation, which would take queries that grow for a gating
        fuse_activation.PASS,
        merge_qkv.PASS,
        insert_paged_attention.PASS,  # RoPE + KV write + attention
        insert_scale.PASS,  # after embeddings and rotations, which have factors of their own
        select_logit_rows.PASS,  # before the residuals: the gather goes below the last layer's sums
        fuse_residual_norm.PASS,  # before the epilogues: an all-reduce may stand between product and residual
        fuse_residual.PASS,
    )


def target_passes(
    target: Target, *, products: Mapping[str, ProductChoice], tables: DType, kv: DType
) -> tuple[Pass, ...]:
    """How the model is computed. Attention stays in float32 where the inputs of all products do."""
    exact = all(each.activations == "f32" for each in products.values())
    return (
        SetPrecision(products=products, tables=tables, kv=kv, target=target),
        ChooseKernels(target=target, exact=exact),
    )


StepPass = Callable[[Program], tuple[Program, PassReport]]


def program_passes(
    target: Target,
    config: BuildConfig,
    lowering: Lowering,
    *,
    sums: Sequence[SplitSums],
    ranks: Sequence[SplitRanks],
    cut: StepPass,
    compress: CompressWeights | None,
) -> tuple[StepPass, ...]:
    """What is decided of one rank's steps, when weights and kernels are known and memory is not planned yet. sums,
    ranks: `split_sums` and `split_ranks`, where there are parts and ranks; cut: `cut_stages`; compress: None where
    bf16 weights stay as they are."""
    # A library chooses its algorithms by the shape of a matmul, which depends on the number of ranks. So do parts of K.
    wanted = config.gemm_library and config.parts == 1
    return (
        ChooseDrawKernel(target=target),
        *((SizeDecodeItems(rules=target.split_rules()),) if isinstance(target, SplitsContexts) else ()),
        *sums,
        *ranks,  # behind the sums, whose parts they divide
        *step_passes(target),
        *many_row_passes(target, wanted=wanted),
        *library_passes(target, wanted=wanted),
        *((ScreenLmHead(lowering=lowering, target=target),) if config.screen_lm_head else ()),
        *((cut,) if config.pp_size > 1 else ()),  # so late: a stage's steps are those of an engine without stages
        *((compress,) if compress is not None else ()),  # a rank's own weights
        *input_passes(target, lambda name: lowering.use(name).shape),  # behind the cut: stages hand float32 on
    )


def step_passes(target: Target) -> tuple[StepPass, ...]:
    """Those of `program_passes` that the model in float32 has too, with which an engine is compared."""
    return (
        *((add_in_products,) if target.adds_in_products else ()),
        *((StoreNarrow(ops=target.storing_narrow()),) if isinstance(target, StoresNarrow) else ()),
    )


def input_passes(target: Target, shape_of: Callable[[str], Sequence[int]]) -> tuple[StepPass, ...]:
    """Where products take what kernel calls before them have prepared. shape_of: a weight's name → its shape."""
    if not isinstance(target, StoresNarrow):
        return ()
    return (
        CastInputs(kernel=choose_kernel(target, CAST.name, "f32")),
        *fp8_passes(target),
        SortByExpert(kernel=choose_kernel(target, SORT.name, "f32"), experts=lambda name: shape_of(name)[0]),
    )


def fp8_passes(target: Target) -> tuple[StepPass, ...]:
    """Where the target multiplies inputs in FP8."""
    # in reverse: of several kernels of an op, the first one stays
    kernels = {op: name for name in reversed(target.kernels()) if (op := name.partition(".")[0]) in FP8_OPS}
    return (RoundToFp8(kernels=kernels),) if kernels else ()


def many_row_passes(target: Target, *, wanted: bool) -> tuple[StepPass, ...]:
    """Where the target has faster kernels for many rows. wanted: whether the bits of a row may depend on the batch."""
    if not isinstance(target, HasManyRows) or not target.many_row_kernels(gated=True):
        return ()
    kernels, gated = (target.many_row_kernels(gated=each) for each in (False, True))
    return (UseManyRows(kernels=kernels, gated=gated, wanted=wanted),)


def library_passes(target: Target, *, wanted: bool) -> tuple[StepPass, ...]:
    """Where the target's sessions can call a library. wanted: as of a BuildConfig."""
    return (UseLibrary(kernels=target.library_kernels(), wanted=wanted),) if isinstance(target, WithLibrary) else ()


PlanPass = Callable[[Plan], tuple[Plan, PassReport]]


def plan_passes(target: Target) -> tuple[PlanPass, ...]:
    """What is decided when memory is planned; the variants come next, see `schedule.py`."""
    passes: list[PlanPass] = []
    if isinstance(target, SplitsContexts):
        passes.append(functools.partial(split_contexts, rules=target.split_rules()))
    if isinstance(target, CapturesDecode):
        passes.append(size_decode_steps)
    if isinstance(target, HasPromptKernels):
        passes.append(functools.partial(use_prompt_kernels, faster=target.prompt_kernel))
    if isinstance(target, ChoosesTiles):
        passes.append(functools.partial(choose_tiles, tiles=target.tiles))
    return tuple(passes)


def run_step_passes(
    program: Program,
    passes: Sequence[StepPass],
    said: Callable[[PassReport, Program], None] = lambda report, made: None,
) -> Program:
    """Run passes in order. said: gets each pass's report, and what it has made."""
    for each in passes:
        program, report = each(program)
        said(report, program)
    return program


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    *,
    dump: Path | None = None,
    first: int = 1,
    say: Callable[[PassReport], None] | None = None,
) -> list[PassReport]:
    """Run passes in order. dump: write the graph after each there, numbered from `first`."""
    reports = []
    for number, each in enumerate(passes, first):
        reports.append(each.run(graph))
        if say is not None:
            say(reports[-1])
        if dump is not None:
            graph.save(dump / f"{number:02}_{each.name}.onnx")
    return reports


def require_plugins(graph: Graph, reports: Sequence[PassReport]) -> None:
    """Raise PassError if a node that depends on the input is not one of our plugins."""
    left = [node for node in graph.nodes if node.domain != DOMAIN and not is_weight(node.outputs[0])]
    if not left:
        return
    refusals = [f"{report.name}: {reason}" for report in reports for reason in report.refused]
    raise PassError(
        f"{len(left)} nodes of the graph were not replaced by any pass",
        where=", ".join(describe(node) for node in left[:5]),
        expected="a graph of the ops that docs/checkpoint_format.md lists",
        got="; ".join([f"ops {', '.join(sorted({node.op for node in left}))}", *refusals]),
        hint="look at the graph with --dump_passes DIR, or add a pass: a file in builder/passes and a line in "
        "builder/pipeline.py, as docs/how-to/add.md says",
    )
