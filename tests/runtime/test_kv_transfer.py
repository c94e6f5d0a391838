"""Blocks that move from one cache to another one: the request that follows finds them, whatever its groups keep."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ingot.configs.runtime import Policy
from ingot.errors import UsageError
from ingot.plan import STATE_WINDOW, Limits
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.block_table import BlockTable
from ingot.runtime.executor import Executor
from ingot.runtime.kv_transfer import BlockRange, BlockTransfer, Bytes
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler
from tests.runtime.fake_session import VOCAB, FakeSession, continued

SIZE, MOST = 4, 128
LIMITS = Limits(max_batch_size=4, max_input_len=MOST, max_seq_len=MOST, max_num_tokens=16, max_logit_rows=16)
WINDOWS = {"all": (0,), "window": (0, 6), "states": (0, STATE_WINDOW), "both": (0, 6, STATE_WINDOW)}


class MovingSession(FakeSession):
    """Its blocks are its tokens; a state, all tokens that it is made of."""

    def block_bytes(self, group: int) -> int:
        return 8 * (MOST if group in self._states else SIZE)

    def read_block(self, group: int, block: int, to: Bytes) -> None:
        numbers = np.full(MOST, -1) if group in self._states else self.pools[group][block]
        if group in self._states:
            state = self._states[group][block]
            numbers[: len(state)] = state
        to[...] = numbers.view(np.uint8)

    def write_block(self, group: int, block: int, data: Bytes) -> None:
        numbers = data.view(np.int64)
        if group in self._states:
            self._states[group][block] = numbers[numbers >= 0].tolist()
        else:
            self.pools[group][block] = numbers


class Side:
    """One server's executor and cache."""

    def __init__(self, windows: Sequence[int], blocks: int) -> None:
        states = [window == STATE_WINDOW for window in windows]
        self.session = MovingSession([blocks] * len(windows), SIZE, LIMITS, windows, states)
        strides = [2 * state for state in states]
        self.blocks = BlockManager(self.session.num_blocks, SIZE, windows=windows, strides=strides)
        self.executor = Executor(self.session, Scheduler(LIMITS, self.blocks, Policy.MAX_UTILIZATION), self.blocks)
        self.transfer = BlockTransfer(self.executor, self.session, self.blocks, "fake")

    def run(self, prompt: Sequence[int], count: int = 5, salt: bytes = b"") -> Request:
        request = Request(np.array(prompt, np.int32), max_new_tokens=count, cache_salt=salt)
        self.executor.complete([request])
        assert request.generated().tolist() == continued(list(prompt), count)
        return request

    def offered(self, prompt: Sequence[int], first: int = 0) -> tuple[BlockRange, Bytes]:
        """What a prefill server has of the whole blocks of a prompt."""
        tokens = np.array(prompt, np.int32)
        blocks = self.transfer.found(BlockTable(), tokens[: len(tokens) // SIZE * SIZE], first)
        data = np.zeros(self.transfer.nbytes(blocks), np.uint8)
        assert self.transfer.read(blocks, data)
        return blocks, data


@pytest.fixture(params=list(WINDOWS.values()), ids=list(WINDOWS))
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    made = Side(request.param, 60), Side(request.param, 60)
    yield made
    for side in made:
        assert side.executor.stats()["blocks_used"] == 0
        side.executor.close()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("length", [5, 8, 9, 37, 64, 101])
def test_a_moved_prompt_is_a_prefix_hit(length: int, sides: tuple[Side, Side]) -> None:
    """The fake session checks every token that a step sees, so wrong bytes would fail the step."""
    prefill, decode = sides
    prompt = tokens_of(length)
    whole = (length - 1) // SIZE
    prefill.run(prompt[: whole * SIZE], 1)
    waiting = Request(np.array(prompt, np.int32), max_new_tokens=5)
    lacking = decode.transfer.lacking(waiting)
    assert lacking is not None
    assert (lacking.first, lacking.count) == (0, whole)
    blocks, data = prefill.offered(prompt[: whole * SIZE])
    assert (blocks.count, blocks.keys, blocks.last_key) == (whole, lacking.keys, lacking.last_key)
    written = decode.transfer.write(blocks, data)
    assert written == decode.executor.stats()["blocks_cached"] >= whole
    assert decode.transfer.write(blocks, data) == 0, "they are there"
    assert decode.run(prompt).num_cached == whole * SIZE


def test_only_what_is_lacking_moves(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prompt = tokens_of(40)
    decode.run(prompt[:20], 1)
    prefill.run(prompt, 1)
    lacking = decode.transfer.lacking(Request(np.array(prompt, np.int32), max_new_tokens=5))
    assert lacking is not None
    assert lacking.first == 5
    blocks, data = prefill.offered(prompt[:36], lacking.first)
    assert (blocks.first, blocks.count) == (5, 9)
    assert len(data) < prefill.transfer.nbytes(BlockRange(first=0, count=9, keys=blocks.keys))
    decode.transfer.write(blocks, data)
    assert decode.run(prompt).num_cached == 36


def test_blocks_of_another_salt_are_not_found(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prompt = tokens_of(30)
    prefill.run(prompt, 1, b"of one user")
    blocks, data = prefill.offered(prompt)
    assert (blocks.count, len(data)) == (0, 0)
    assert decode.transfer.write(blocks, data) == 0


def test_a_block_that_is_evicted_meanwhile_is_told(sides: tuple[Side, Side]) -> None:
    prefill, _ = sides
    prompt = tokens_of(24)
    prefill.run(prompt, 1)
    blocks, data = prefill.offered(prompt)
    for seed in range(1, 6):
        prefill.run(tokens_of(100, seed), 1)
    assert not prefill.transfer.read(blocks, data)


def test_a_cache_without_room_takes_what_fits(sides: tuple[Side, Side]) -> None:
    """All of its blocks are held, so nothing is written, and nothing of a request that runs is lost."""
    prefill, decode = sides
    prompt = tokens_of(60)
    prefill.run(prompt[:56], 1)
    blocks, data = prefill.offered(prompt[:56])
    held = [[pool.allocate() for _ in range(pool.num_available)] for pool in decode.blocks.pools]
    assert decode.transfer.write(blocks, data) == 0
    for pool, own in zip(decode.blocks.pools, held, strict=True):
        for block in own:
            pool.drop(block)
    assert decode.transfer.write(blocks, data) > 0
    assert decode.run(prompt).num_cached == 56


def test_a_session_that_fails_to_write_leaves_a_free_block(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prompt = tokens_of(24)
    prefill.run(prompt, 1)
    blocks, data = prefill.offered(prompt)

    def fail(group: int, block: int, data: Bytes) -> None:
        raise OSError("no")

    decode.session.write_block = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no"):
        decode.transfer.write(blocks, data)
    stats = decode.executor.stats()
    assert (stats["blocks_used"], stats["blocks_cached"]) == (0, 0)
    decode.run(prompt)


def test_prompts_whose_rows_are_wanted_move_nothing(sides: tuple[Side, Side]) -> None:
    lacking = sides[1].transfer.lacking(Request(np.array(tokens_of(40), np.int32), max_new_tokens=2, prompt_logprobs=1))
    assert lacking is not None
    assert lacking.count == 0


def test_what_cannot_move_is_refused() -> None:
    side = Side((0,), 10)
    plain = FakeSession(10, SIZE, LIMITS)
    with pytest.raises(UsageError, match="fake"):
        BlockTransfer(side.executor, plain, side.blocks, "fake")
    side.executor.close()
