"""Kernels and sessions of the CPU targets (C++, plugins/cpu/module.cpp); used through ingot.plugins.cpu.target."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

class ThreadStartError(Exception):
    """The system starts no more threads."""

class RankError(Exception):
    """A rank is gone, late or of another engine."""

class RankGroup:
    """Ranks that compute a model together."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def fail(self, words: str) -> None: ...
    def require_all(self) -> None: ...
    def beat(self) -> None: ...
    def beats(self) -> list[int]: ...
    def announce(self, batch: NDArray[np.int32]) -> None: ...
    def begin_step(self) -> None: ...
    def next_step(self) -> NDArray[np.int32] | None: ...
    def close(self) -> None: ...

class MpiGroup(RankGroup):
    """Ranks of several machines. calls: addresses and handles, see mpi_group.h."""

    def __init__(
        self,
        calls: tuple[int, ...],
        rank: int,
        count: int,
        slot_bytes: int,
        timeout: float,
        stages: int,
        message_bytes: int,
    ) -> None: ...

class Window(RankGroup):
    """Ranks of one machine, which share the memory of a file."""

    def __init__(
        self,
        path: str,
        rank: int,
        count: int,
        slot_bytes: int,
        batch_words: int,
        timeout: float,
        stages: int,
        message_bytes: int,
    ) -> None: ...
    @staticmethod
    def bytes(count: int, slot_bytes: int, batch_words: int, stages: int, message_bytes: int) -> int: ...

def isa_levels() -> list[tuple[str, str, bool]]: ...
def cores() -> list[tuple[int, int]]: ...
def kernel_names() -> list[str]: ...
def registration_problem(name: str, like: str) -> str: ...
def set_quick_multiply_32(quick: bool) -> bool: ...
def set_permutes_bytes(there: bool) -> bool: ...
def call_rules() -> tuple[list[str], list[str], int]: ...
def crc32(data: NDArray[np.uint8], crc: int = 0) -> int: ...
def read_bandwidth(bytes: int, threads: int, passes: int = 3) -> float: ...
def barrier_seconds(threads: int) -> float: ...
def peak_flops(name: str, threads: int, seconds: float) -> float: ...
def time_matmul(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    group: int,
    gated: bool,
    panel_bytes: int,
    tactic: int,
    threads: int,
    seconds: float,
) -> float: ...
def time_experts(
    kernel: str,
    rows: int,
    experts: int,
    slots: int,
    n: int,
    k: int,
    group: int,
    gated: bool,
    panel_bytes: int,
    tactic: int,
    threads: int,
    seconds: float,
) -> float: ...

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]
Rules: TypeAlias = tuple[
    float,
    int,
    float,
    float,
    int,
    float,
    float,
    float,
    Sequence[tuple[int, float]],
    Sequence[Sequence[int]],
    Sequence[Sequence[int]],
    Sequence[int],
    int,
    int,
    bool,
    int,
    Sequence[int],
    int,
    int,
    tuple[int, int, int, int, int, int, int] | None,
]
Drawn: TypeAlias = tuple[Ints, Floats, Ints, Floats | None, Ints | None, Ints | None, Floats | None]

class Session:
    """Tuples hold the fields of ingot.plan's classes in their order; see `open_native` in target.py."""

    def __init__(
        self,
        weights: NDArray[np.uint8],
        inputs: Sequence[tuple[str, str, str]],
        buffers: Sequence[tuple[str, str, int, int, str]],
        weight_specs: Sequence[tuple[str, str, Sequence[int], str, int, Sequence[tuple[int, int, int]]]],
        steps: Sequence[tuple[str, str, str, Sequence[str], Sequence[str], Mapping[str, int | float | str]]],
        variants: Sequence[tuple[str, int, Sequence[tuple[str, Sequence[str], bool, bool, bool, bool]]]],
        limits: tuple[int, int, int, int, int],
        caches: Sequence[tuple[int, Sequence[int], int, int, int, str, int, Sequence[int], int]],
        arena_bytes: int,
        logits: str,
        draw_kernel: str,
        threads: int,
        isa: str,
        group: RankGroup | None = None,
    ) -> None: ...
    def start(self, slot: int, rules: Rules, tokens: Ints, num_prompt: int) -> None: ...
    def end(self, slot: int) -> None: ...
    def announce(
        self, ids: Ints, query_starts: Ints, past_lengths: Ints, block_tables: Ints, logit_rows: Ints, slots: Ints
    ) -> None: ...
    def settle(self) -> None: ...
    def run(
        self,
        ids: Ints,
        query_starts: Ints,
        past_lengths: Ints,
        block_tables: Ints,
        logit_rows: Ints,
        slots: Ints,
        draws: Ints,
        known: tuple[Ints, Ints, Ints] | None,
        want_logits: bool,
        ahead: tuple[int, float, Ints] | None,
    ) -> Drawn: ...
    def draw(self, slots: Ints, logits: Floats, raw: Floats) -> Drawn: ...
    def follow(self, most_steps: int = ...) -> None: ...
    def close(self) -> None: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def barriers(self) -> int: ...
    @property
    def variant(self) -> str: ...
    def set_step_delay(self, seconds: float) -> None: ...
    def time_steps(self, on: bool) -> None: ...
    def step_seconds(self) -> list[float]: ...
    def tap(self, steps: Sequence[str]) -> None: ...
    def drain_tapped(self) -> list[tuple[str, str, NDArray[np.float32]]]: ...
    def items_taken(self) -> list[int]: ...
    def read_buffer(self, name: str, rows: int) -> NDArray[np.float32]: ...
    def write_buffer(self, name: str, values: NDArray[np.float32]) -> None: ...
    def fill_kv(self, value: float) -> None: ...
    def read_kv(self, layer: int, block: int, values: bool) -> bytes: ...
    def write_kv(self, layer: int, block: int, values: bool, data: bytes) -> None: ...
    def block_bytes(self, group: int) -> int: ...
    def read_block(self, group: int, block: int, to: NDArray[np.uint8]) -> None: ...
    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None: ...
    def read_ranks_block(self, group: int, block: int, parts: Sequence[NDArray[np.uint8]]) -> None: ...
    def write_ranks_block(self, group: int, block: int, parts: Sequence[NDArray[np.uint8]]) -> None: ...
