"""What a target is: the kernels it can be built for, what this machine lacks, and how to load a plan on it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ingot.plan import HEAD_DIM_MULTIPLE, MOST_HEAD_DIM, MOST_HEADS, Plan
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.split_rules import SplitRules
from ingot.step_io import Float32, Session
from ingot.weights_memory import NumaPlacement

Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is, of how much in all; 0: nobody knows)"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """num_blocks: of the pool of each cache group; threads: None takes every core of the process; directory: of the
    engine, for targets whose engines have files beside the rank file; rank_timeout: seconds that the processes of other
    ranks may be late; shared_memory: all ranks meet there, else by MPI; local: of the ranks of this machine, which this
    one is, and how many there are."""

    num_blocks: tuple[int, ...]
    threads: int | None = None
    directory: Path | None = None
    rank_timeout: float = 30.0
    shared_memory: bool = True
    local: tuple[int, int] = (0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnginePart:
    """What one target of an engine has there.

    plan       reads it: only a target that must know what the engine needs calls this
    directory  of the engine; None: what it needs lies in the plan alone
    """

    plan: Callable[[], Plan]
    directory: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Bytes that a target stores in the engine beside the weights, e.g. machine code."""

    name: str
    layout: str
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file that a target stores in the engine beside the rank file, e.g. a network that another compiler made.

    suffix  of its name, which `file_name` makes
    """

    suffix: str
    data: bytes


def file_name(suffix: str, target: str = "") -> str:
    """target: where another target of the engine has files already."""
    word = f".{target.replace('/', '-')}" if target else ""
    return f"rank0{word}{suffix}"


NO_LIMIT = (1 << 62) - 1  # a limit that nothing reaches


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelLimits:
    """What a target's kernels can take at most, beside the types that their names say. A build refuses everything else.
    The defaults for heads are what a plan can hold.

    head_dim           elements of an attention head
    head_dim_multiple  what every head_dim must be a multiple of
    heads              of a layer: those of queries, and those of keys
    group              query heads that share a key head
    one_group          that number must be the same in all layers, and so must the key heads and their elements
    layers             with attention
    extent             rows or columns of a weight or a buffer, tokens of a sliding window
    experts            of a layer
    taken_experts      that the rows of a step take in all
    sinks, slopes      whether attention takes them; slopes of ALiBi
    growth             whether queries may grow with their position
    made_values        values that are normed, made of keys, or another layer's
    latent_dim, rank   numbers of a row of a cache of latents; of these, those that are its value
    key_dim            numbers of a key of linear attention
    activations        names of activation functions; empty: all
    """

    head_dim: int = MOST_HEAD_DIM
    head_dim_multiple: int = HEAD_DIM_MULTIPLE
    heads: int = MOST_HEADS
    group: int = NO_LIMIT
    one_group: bool = False
    layers: int = NO_LIMIT
    extent: int = NO_LIMIT
    experts: int = NO_LIMIT
    taken_experts: int = NO_LIMIT
    sinks: bool = True
    slopes: bool = True
    growth: bool = True
    made_values: bool = True
    latent_dim: int = NO_LIMIT
    rank: int = NO_LIMIT
    key_dim: int = NO_LIMIT
    activations: frozenset[str] = frozenset()


class Target(Protocol):
    """One row of the target list in the docs, e.g. "cpu/avx2". Found by `plugins.registry.find_target`.

    packs_products: floats of matrix products lie in panels (`layouts.py`), else row by row; codes lie in panels always.
    adds_in_products: products add the residual stream, else the norms behind them do.
    frees_windows: sessions take several cache groups, and reuse blocks that a window has passed; else one group keeps
    the blocks of all tokens.
    on_gpu: a machine that runs several targets of an engine takes these first.
    """

    name: str
    packs_products: bool
    adds_in_products: bool
    frees_windows: bool
    on_gpu: bool

    def kernels(self) -> tuple[str, ...]:
        """Kernels that an engine for this target may use, best first per op and dtype, whatever this machine is.

        The dtype of a product whose inputs are rounded to int8 is the weight's and "a8": w8a8, w4a8; of one that
        rounds them to FP8 beside FP8 weights "f8f8".
        """
        ...

    def limits(self) -> KernelLimits:
        """What these kernels can take."""
        ...

    def activations(self, kernel: str) -> str:
        """What a product's kernel rounds its input to: "f32" (it does not), "bf16", "f16", "int8" or "fp8"; to bf16
        also with "bf16_inputs", where it leaves a quantised weight as it is."""
        ...

    def build_blocker(self) -> str | None:
        """Why this machine cannot build engines for the target, or None if it can."""
        ...

    def extra_sections(self, plan: Plan, progress: Progress) -> tuple[Constant, ...]:
        """What else the weights section must hold for this plan. Raises BuildError."""
        ...

    def toolchain(self) -> dict[str, str]:
        """Name → exact version of whatever on this machine makes a part of an engine; the manifest keeps it."""
        ...

    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        """Why this machine (capped to `isa`) cannot run the target, or None if it can. part: of an engine that is to
        run, which may need more of the machine than another one does. Raises EngineError where it cannot be read."""
        ...

    def kv_memory(self, plan: Plan) -> int | None:
        """Bytes of the device that are left for the KV cache of `plan`; None: it lies in the host's memory. Raises
        CapacityError where the device has no room for the rest of the plan."""
        ...

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> Session:
        """Load a plan; `weights` (the whole section) must stay valid. Raises CapacityError, TargetError."""
        ...


@runtime_checkable
class RunsRanks(Target, Protocol):
    """A target whose session can compute all ranks of an engine."""

    def open_ranks(
        self, plans: Sequence[Plan], weights: Sequence[npt.NDArray[np.uint8]], options: SessionOptions
    ) -> Session:
        """Load the plan and the weights of every rank, in order. Raises as `open_session`."""
        ...


class RankLink(Protocol):
    """How the processes of an engine's ranks speak with each other while they open it."""

    rank: int  # of this process
    count: int

    def exchange(self, said: Any) -> list[Any]:
        """What every rank says, in their order. All must call it as often. Raises RankError where one has ended."""
        ...

    def mpi_calls(self, stages: int) -> tuple[int, ...] | None:
        """For sessions in C++, where MPI has started the ranks: addresses of MPI_Iallgather, MPI_Ibcast, MPI_Isend,
        MPI_Irecv and MPI_Test, and handles of a communicator of all ranks, of another one of this pipeline stage's,
        and of MPI_BYTE. All ranks must call it."""
        ...

    def leave(self) -> None:
        """All ranks have done their work: none has to end with another one any more."""
        ...


@runtime_checkable
class RankSession(Session, Protocol):
    """A session of one of several ranks. The first one is asked for steps, as any session; the others follow it."""

    def follow(self) -> None:
        """Compute what the first rank is asked for, until its session closes. Raises RankError."""
        ...

    def follow_tapped(self, steps: Sequence[str]) -> Mapping[str, Mapping[str, Float32]]:
        """Compute one step that the first rank is asked for, and give what each of the named plan steps wrote here:
        step → buffer → [rows, cols]. Raises RankError."""
        ...

    def require_ranks(self) -> None:
        """Raises RankError where a rank has ended or failed. From any thread; waits for nothing."""
        ...


@runtime_checkable
class JoinsRanks(Target, Protocol):
    """A target whose session computes one rank, and meets those of other processes."""

    def rank_memory(self, plan: Plan, local: tuple[int, int]) -> int | None:
        """`kv_memory` of one rank. local: as of SessionOptions."""
        ...

    def open_rank(
        self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, link: RankLink
    ) -> RankSession:
        """Load the plan and the weights of one rank. Raises as `open_session`, and RankError."""
        ...


@runtime_checkable
class CompilesGraph(Target, Protocol):
    """A target that compiles the graph itself: its engines hold files beside the rank file, and no step of a plan runs.

    The plan says what every target's sessions need: weights and their places, KV cache, limits, vocabulary.
    """

    def compile(self, graph: OpGraph, plan: Plan, progress: Progress) -> tuple[File, ...]:
        """The files. Raises BuildError."""
        ...


@runtime_checkable
class SelfTuning(CompilesGraph, Protocol):
    """A target whose compiler times kernels by itself."""

    def compile_timed(
        self, graph: OpGraph, plan: Plan, progress: Progress, *, cache: Path | None, timed: bool
    ) -> tuple[File, ...]:
        """cache: the user's file of times; the target keeps its own beside it. timed: False times nothing."""
        ...


@runtime_checkable
class NumaAware(Target, Protocol):
    """A target whose kernels read the weights where they are given to them, in the host's memory."""

    def placement(self, plan: Plan, threads: int | None) -> NumaPlacement | None:
        """Where a copy of the weights is read faster than the mapped file is; None: nowhere."""
        ...


@runtime_checkable
class WithMemory(Target, Protocol):
    """A target whose weights lie in a memory of its own, which is not the host's."""

    def devices(self) -> int:
        """How many of this machine can run it."""
        ...

    def read_bandwidth(self, nbytes: int) -> float:
        """Bytes per second that it moves in a buffer of this many. Raises CapacityError, TargetError."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallRules:
    """What the kernels of a target can do, beside running one after another with all threads waiting in between.

    norming           kernels of products that prepare their rows, and can norm each one as they do
    by_rows           ops whose kernels take nothing from the team of threads but their share of the rows
    private_elements  of rows that a thread computes for itself, at most
    """

    norming: frozenset[str]
    by_rows: frozenset[str]
    private_elements: int


@runtime_checkable
class WithVariants(Target, Protocol):
    """A target whose sessions run the variants of a plan."""

    def call_rules(self) -> CallRules:
        """What its kernels can do."""
        ...


@runtime_checkable
class StoresNarrow(Target, Protocol):
    """A target that stores what only products read in the 16-bit type to which these round it."""

    def storing_narrow(self) -> frozenset[str]:
        """Ops whose kernels write their first output so, where the plan's buffer says it. It has kernels of `cast` and
        `sort_by_expert` too."""
        ...


@runtime_checkable
class SplitsContexts(Target, Protocol):
    """A target whose attention can cut contexts into parts."""

    def split_rules(self) -> SplitRules:
        """When it does."""
        ...


@runtime_checkable
class CapturesDecode(Target, Protocol):
    """A target whose sessions capture decode steps of the sizes that a plan lists.

    captures_decode: True
    """

    captures_decode: bool


@runtime_checkable
class HasManyRows(Target, Protocol):
    """A target that may have faster kernels for matmuls of many rows, whose bits depend on the number of rows."""

    def many_row_kernels(self, *, gated: bool) -> Mapping[str, str]:
        """A matmul's kernel → the faster one; empty where there are none. gated: of matmuls with a gate."""
        ...


@runtime_checkable
class WithLibrary(Target, Protocol):
    """A target whose sessions can leave matmuls to a library of the machine.

    library: its name
    """

    library: str

    def library_kernels(self) -> Mapping[str, str]:
        """A matmul's kernel → the kernel that leaves the library all but a few rows."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """The shape of a matrix product, n counting gate and up together. panel_bytes: of 16 packed columns.

    For experts: the shape of one, how many there are, and how many of them a row takes (slots); else 0.
    """

    kernel: str
    n: int
    k: int
    group: int
    gated: bool
    panel_bytes: int
    experts: int = 0
    slots: int = 0

    def __str__(self) -> str:
        words = f"{self.kernel} {self.n} x {self.k}"
        words += (f" g{self.group}" if self.group else "") + (" gated" if self.gated else "")
        return words + (f", {self.slots} of {self.experts} experts" if self.experts else "")


@runtime_checkable
class Tunable(Target, Protocol):
    """A target whose products can be computed in several ways of the same bits, and timed."""

    def machine(self) -> str:
        """What times depend on: processor, threads, version of the kernels."""
        ...

    def tactics(self, product: Product, rows: int) -> tuple[str, ...]:
        """Ways to compute this many rows, all of the same bits; the first is taken unless a build has timed them."""
        ...

    def time_product(self, product: Product, rows: int, tactic: int) -> float:
        """Seconds that the product takes on this machine, with made-up numbers."""
        ...
