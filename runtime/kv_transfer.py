"""KV blocks on their way from one server to another one of the same engine: which they are, their bytes, and back.

    prefill server   keys of the prompt ──▶ blocks in its cache ──read──▶ bytes
    decode server    bytes ──write──▶ free blocks, sealed under the same keys: the request that follows finds them there

The bytes are those of blocks [first, count) of a prompt: of each cache group, in order, the blocks that the token after
them sees. They lie there as in an engine of one rank, however many ranks either server has: its session collects the
parts of its ranks, and gives each its own. Both servers know the keys, which are made of the tokens. Blocks that were
written are cached like those of any request that has ended: nobody holds them, so nothing has to be given back, and one
that is evicted before its request begins is computed anew.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import UsageError
from ingot.plugins.cpu.native import crc32, detect_isa
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.block_table import BlockTable
from ingot.runtime.executor import Executor
from ingot.runtime.request import Request
from ingot.step_io import BlockSession, Int32, Session

Bytes = npt.NDArray[np.uint8]

_Part = tuple[int, int, Bytes]  # cache group, place in the text, bytes of the block there
_PIECE = 16 << 20  # bytes that are copied between two steps


def checksum(data: Bytes) -> int:
    """CRC-32, at memory speed where the compiled module runs."""
    return zlib.crc32(data.data) if detect_isa() == "none" else crc32(data)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockRange:
    """Blocks [first, count) of a text, and the keys of all up to there."""

    first: int
    count: int
    keys: tuple[bytes, ...]

    @property
    def last_key(self) -> str:
        """It stands for all tokens up to there."""
        return self.keys[self.count - 1].hex() if self.count else ""


class BlockTransfer:
    """Thread-safe: what touches blocks happens between two steps. Raises UsageError for sessions that cannot do it."""

    def __init__(self, executor: Executor, session: Session, blocks: BlockManager, target: str) -> None:
        if not isinstance(session, BlockSession):
            raise UsageError(
                "--role: the KV blocks of this engine cannot move to another server",
                expected="an engine for a CPU target or ref",
                got=target,
                hint="leave --role out: the server then computes prompts itself",
            )
        self._executor, self._session, self._blocks = executor, session, blocks

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block."""
        return self._blocks.tokens_per_block

    def lacking(self, request: Request) -> BlockRange | None:
        """Blocks that the request could begin with and that are not here. None: somebody computes them now."""
        limit = request.first_logit_position()

        def look() -> BlockRange | None:
            hits = self._blocks.lookup(request.blocks, request.tokens[: request.num_tokens], limit)
            if hits is None:
                return None
            count = limit // self.tokens_per_block
            return BlockRange(first=hits.count, count=count, keys=tuple(request.blocks.keys[:count]))

        return self._executor.between_steps(look)

    def found(self, table: BlockTable, tokens: Int32, first: int) -> BlockRange:
        """The blocks of these tokens from `first` on, as far as they are here. table: with the tokens' salt."""

        def look() -> BlockRange:
            hits = self._blocks.lookup(table, tokens, len(tokens))
            count = 0 if hits is None else hits.count
            return BlockRange(first=min(first, count), count=count, keys=tuple(table.keys[:count]))

        return self._executor.between_steps(look)

    def nbytes(self, blocks: BlockRange) -> int:
        """Bytes of these blocks in all cache groups."""
        return sum(self._session.block_bytes(group) for group, _ in self._places(blocks))

    def read(self, blocks: BlockRange, to: Bytes) -> bool:
        """Copy them. False: one of them was evicted meanwhile. to: uint8 [nbytes]."""

        def copy(piece: Sequence[_Part]) -> bool:
            for group, place, own in piece:
                if (block := self._blocks.pools[group].find(blocks.keys[place])) is None:
                    return False
                self._session.read_block(group, block, own)
            return True

        return all(self._in_pieces(blocks, to, copy))

    def write(self, blocks: BlockRange, data: Bytes) -> int:
        """Have them cached; how many were not here. Those that find no room are left out. data: uint8 [nbytes]."""

        def copy(piece: Sequence[_Part]) -> int:
            return sum(self._keep(group, blocks.keys[place], own) for group, place, own in piece)

        return sum(self._in_pieces(blocks, data, copy))

    def _keep(self, group: int, key: bytes, data: Bytes) -> bool:
        pool = self._blocks.pools[group]
        if pool.find(key) is not None or not pool.num_available:
            return False
        block = pool.allocate()
        try:
            self._session.write_block(group, block, data)
            pool.seal(key, block)
        finally:
            pool.drop(block)
        return True

    def _in_pieces(self, blocks: BlockRange, data: Bytes, copy: Callable[[Sequence[_Part]], int]) -> Iterator[int]:
        """What `copy` gives for some blocks at a time, each time between two steps: who decodes goes on meanwhile."""
        sizes = [self._session.block_bytes(group) for group in range(len(self._blocks.pools))]
        ends = itertools.accumulate(sizes[group] for group, _ in self._places(blocks))
        parts = [
            (group, place, data[end - sizes[group] : end])
            for (group, place), end in zip(self._places(blocks), ends, strict=True)
        ]
        count = max(1, _PIECE // max(sizes))
        for begin in range(0, len(parts), count):
            yield self._executor.while_still(functools.partial(copy, parts[begin : begin + count]))

    def _places(self, blocks: BlockRange) -> list[tuple[int, int]]:
        """Cache group and place of each block, in the order of the bytes."""
        found = []
        for group, pool in enumerate(self._blocks.pools):
            seen = pool.first_seen(blocks.count * self.tokens_per_block)
            first = seen if pool.window else max(blocks.first, seen)
            found += [(group, place) for place in range(first, blocks.count)]
        return found if blocks.count > blocks.first else []
