"""Hands out the blocks of the paged KV cache, and keeps full ones for requests of the same tokens.

    request A  ┌───┬───┬───┐      pool of one cache group (its layers have the same numbering)
               │ 5 │ 1 │ 6 │      ┌────┬────┬────┬────┬────┬────┬────┬────┐
    request B  ├───┼───┼───┤      │ 0  │ 1  │ 2  │ 3  │ 4  │ 5  │ 6  │ 7  │
               │ 5 │ 1 │ 2 │      └────┴────┴────┴────┴────┴────┴────┴────┘
               └───┴───┴───┘       free  2x   1x  free cached 2x   1x cached

The first 64 tokens of A and B are equal: with 32 tokens per block both hold 5 and 1. A block that is full and computed
is sealed: it gets a key, the SHA-256 of the key before it and its own tokens, and is never written again. So nothing
is copied on a write: requests that part write to blocks of their own, and blocks that are not full have one holder.
A sealed block that nobody holds stays cached until its place is needed, the one released longest ago first.

Each cache group of the plan has a pool and a row of a request's table; keys are the same in all. A group with a window
gives back the blocks that no later token sees. A prefix is found where the groups that keep everything have all its
blocks, and those with a window the ones that the next token sees:

    window of 48 tokens    place   0    1    2    3    4
    keeps everything             │ 5  │ 1  │ 2  │ 7  │ 3  │     blocks for all known tokens, from the start on
    window                       │ -1 │ -1 │ 4  │ 0  │ 6  │     blocks for what the next step computes and sees
    states                       │ -1 │ 2  │ -1 │ -1 │ 5  │     a snapshot, and where the step leaves the state

A group with states is one with a window of two tokens: a token needs what the token before it left. A block is a slot.
The chunk of a prompt needs one at its end alone; those in its middle are snapshots, for prefix hits and for resuming
after preemption: at the last block of a prompt, where it parts from what the cache has, and every `stride` blocks. A
request that decodes leaves a snapshot at every block and keeps the last one. A sealed slot is never written again, so
a state that a prefix hit starts from has the bits that computing the whole prefix gives.
"""

import dataclasses
import hashlib
import random
from collections.abc import Sequence

from ingot.runtime.block_events import BlockEvents
from ingot.runtime.block_pool import NO_BLOCK, BlockPool
from ingot.runtime.block_table import BlockTable
from ingot.step_io import Int32

_ANYWHERE = 1 << 62


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """The head of a text that the cache has. blocks: of each group, as many as the token after it sees. complete: the
    blocks that groups have which keep everything, where the others lack what the token after them sees."""

    count: int
    complete: int = 0
    blocks: tuple[list[int], ...]


class BlockManager:
    """A pool for each cache group, with blocks of tokens_per_block slots.

    windows       of the groups; 0: the group keeps everything
    strides       of the groups, see BlockPool
    prefix_cache  False: every block has one holder and nothing is kept
    shuffle       see BlockPool
    events        hears of keys that the cache gets and loses
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        tokens_per_block: int,
        *,
        windows: Sequence[int] = (0,),
        strides: Sequence[int] | None = None,
        prefix_cache: bool = True,
        shuffle: random.Random | None = None,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.pools = tuple(
            BlockPool(count, tokens_per_block, window, shuffle, stride)
            for count, window, stride in zip(num_blocks, windows, strides or [0] * len(windows), strict=True)
        )
        self._whole = [group for group, window in enumerate(windows) if not window]
        self._windows = [group for group, window in enumerate(windows) if window]
        self._prefix_cache = prefix_cache
        self.events = self.pools[self._whole[0] if self._whole else 0].events = BlockEvents()
        self._promised: dict[bytes, BlockTable] = {}  # key → who computes such a block now

    @property
    def has_prefix_cache(self) -> bool:
        """Whether full blocks are kept for others."""
        return self._prefix_cache

    @property
    def keeps_states(self) -> bool:
        """Whether a step changes what it starts from, so that it cannot be computed again from the same blocks."""
        return any(pool.stride for pool in self.pools)

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools, as the counts below."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def needed(self, num_tokens: int) -> tuple[int, ...]:
        """For each pool, the blocks that a request of this many tokens needs to run."""
        count = self.blocks_for(num_tokens)
        return tuple(pool.claim(count) or count for pool in self.pools)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that `table` lacks to hold `num_tokens` tokens, in a group that keeps everything."""
        return max(0, self.blocks_for(num_tokens) - table.count) if self._whole else 0

    def lookup(self, table: BlockTable, tokens: Int32, limit: int) -> Hits | None:
        """Blocks that hold the head of `tokens`, at most `limit` tokens; changes nothing but keys.

        None: the next block is being computed for somebody else; ask again after the next step.
        """
        if table.awaited in self._promised:
            return None
        table.awaited = None
        if not self._prefix_cache:
            return Hits(count=0, blocks=tuple([] for _ in self.pools))
        wanted = limit // self.tokens_per_block
        self._extend_keys(table, tokens, wanted)
        keys = table.keys[:wanted]
        complete = 0
        while complete < wanted and all(self.pools[group].find(keys[complete]) is not None for group in self._whole):
            complete += 1
        count = self._seen_count(keys, complete)
        for place in (complete, count):
            if place < wanted and keys[place] in self._promised:
                table.awaited = keys[place]
                return None
        blocks = []
        for pool in self.pools:
            found = [pool.find(key) for key in keys[pool.first_seen(count * self.tokens_per_block) : count]]
            blocks.append([block for block in found if block is not None])
        return Hits(count=count, blocks=tuple(blocks), complete=complete)

    def _seen_count(self, keys: Sequence[bytes], count: int) -> int:
        """The most blocks, at most `count`, of which groups with windows have those that the next token sees."""
        before = count + 1
        while count < before:
            before = count
            for group in self._windows:
                pool, place = self.pools[group], count - 1
                while place >= pool.first_seen(count * self.tokens_per_block):
                    if pool.find(keys[place]) is None:
                        count = place
                    place -= 1
        return count

    def has_room(self, hits: Hits, num_tokens: int, most_tokens: int, beside: int) -> bool:
        """Whether a request that begins with `hits` has blocks for `num_tokens` tokens, in groups that keep everything
        with `beside` more blocks for others, and in those with windows whatever it needs to reach `most_tokens`."""
        places, most = self.blocks_for(num_tokens), self.blocks_for(most_tokens)
        for pool, blocks in zip(self.pools, hits.blocks, strict=True):
            if pool.window:
                if max(pool.claim(most), len(blocks)) > pool.spare:
                    return False
            elif places - sum(pool.holders(block) > 0 for block in blocks) + beside > pool.num_available:
                return False
        return True

    def start(self, table: BlockTable, hits: Hits, tokens: Int32, most_tokens: int) -> bool:
        """Give an empty table `hits`, and in groups that keep everything the blocks of all `tokens`; False, and nothing
        changed, if too few blocks are available. Until they are sealed, others with the same tokens wait for them.

        most_tokens  that the request may come to have in the cache
        """
        if not self.has_room(hits, len(tokens), most_tokens, 0):
            return False
        table.empty([hits.count - len(blocks) for blocks in hits.blocks])
        for group, (pool, blocks) in enumerate(zip(self.pools, hits.blocks, strict=True)):
            for block in blocks:
                pool.hold(block)
            table.extend(group, blocks)
            table.claims[group] = pool.claim(self.blocks_for(most_tokens))
            pool.claimed += max(table.claims[group], len(blocks)) if pool.window else 0
        table.sealed = hits.count
        if self._prefix_cache:
            table.kept = frozenset({hits.complete - 1, (len(tokens) - 1) // self.tokens_per_block - 1})
        self._grow(table, self._whole, self.blocks_for(len(tokens)))
        table.widen(self.blocks_for(len(tokens)))
        if self._prefix_cache:
            table.promised = len(tokens) // self.tokens_per_block
            self._extend_keys(table, tokens, table.promised)
            for key in table.keys[table.sealed : table.promised]:
                self._promised.setdefault(key, table)
        return True

    def reach(self, table: BlockTable, hits: Hits | None = None) -> int:
        """Tokens up to which a step may compute, as far as groups with windows can tell. At least the block after those
        that are computed, while no step of the request is under way. hits: of a table that they would start."""
        ends = [_ANYWHERE]
        for group in self._windows:
            pool = self.pools[group]
            if pool.stride:  # a chunk of any length needs a slot at its end alone
                if hits is None and table.num_held(group) >= table.claims[group] and pool.spare <= 0:
                    ends.append(table.ends[group])  # chunks under way have all slots
                continue
            if hits is None:
                own = max(table.claims[group], table.num_held(group))
                ends.append(table.first[group] + own + pool.spare)
            else:
                ends.append(hits.count - len(hits.blocks[group]) + pool.spare)
        return min(ends) * self.tokens_per_block

    def cover(self, table: BlockTable, num_tokens: int) -> None:
        """Blocks for the next step in groups with windows. num_tokens: at most what `reach` says."""
        places = self.blocks_for(num_tokens)
        for group in self._windows:
            if self.pools[group].stride:
                self._carry(table, group, places)
            else:
                self._grow(table, [group], places)

    def _carry(self, table: BlockTable, group: int, places: int) -> None:
        """A slot at the last of so many places, and snapshots before it as far as nobody claims the slots."""
        pool = self.pools[group]
        if places <= table.ends[group]:
            return
        claimed, end = max(table.claims[group], table.num_held(group)), table.ends[group]
        table.extend(group, [NO_BLOCK] * (places - end - 1))
        table.extend(group, [pool.allocate()])
        pool.claimed += max(table.claims[group], table.num_held(group)) - claimed
        for place in range(places - 2, end - 1, -1):
            wanted = place in table.kept or (self._prefix_cache and (place + 1) % pool.stride == 0)
            if wanted and int(table.ids[group, place]) == NO_BLOCK and place >= table.sealed and pool.spare > 0:
                claimed = max(table.claims[group], table.num_held(group))
                table.replace(group, place, pool.allocate())
                table.holes[group] -= 1
                pool.claimed += max(table.claims[group], table.num_held(group)) - claimed

    def reserve(self, wanted: Sequence[tuple[BlockTable, int]]) -> bool:
        """Grow tables so that steps may compute this many tokens of each; False, and nothing changed, if too few blocks
        are available."""
        for table, _ in wanted:
            if not table.ends:
                table.empty([0] * len(self.pools))
        for group, pool in enumerate(self.pools):
            lacking = 0
            for table, num_tokens in wanted:
                held = table.num_held(group)
                after = max(self.blocks_for(num_tokens) - table.first[group] - table.holes[group], held)
                own = max(table.claims[group], held)
                lacking += max(after - own, 0)
            if lacking > (pool.spare if pool.window else pool.num_available):
                return False
        for table, num_tokens in wanted:
            self._grow(table, range(len(self.pools)), self.blocks_for(num_tokens))
        return True

    def advance(self, table: BlockTable, tokens: Int32, num_computed: int) -> None:
        """The first `num_computed` tokens are in the cache: their full blocks may be shared from now on, and those that
        no later token sees are given back.

        Where somebody sealed an equal block before, the table holds that one instead of its own.
        """
        full = num_computed // self.tokens_per_block
        if self._prefix_cache:
            self._extend_keys(table, tokens, full)
            for place in range(table.sealed, full):
                key = table.keys[place]
                self._keep_promise(table, key)
                for group, pool in enumerate(self.pools):
                    own = int(table.ids[group, place])
                    if own == NO_BLOCK:  # a state that was not kept
                        continue
                    if (known := pool.seal(key, own)) != own:
                        table.replace(group, place, known)
        table.sealed = max(table.sealed, full)
        for group in self._windows:
            self._give_back(table, group, self.pools[group].first_seen(num_computed))

    def _give_back(self, table: BlockTable, group: int, first: int) -> None:
        """Hold no block before place `first`."""
        pool, first = self.pools[group], min(first, table.ends[group])
        claimed = max(table.claims[group], table.num_held(group))
        for place in range(table.first[group], first):
            block = int(table.ids[group, place])
            if block == NO_BLOCK:
                table.holes[group] -= 1
                continue
            if pool.stride and place >= table.promised and pool.holders(block) == 1:
                pool.forget(block)  # of the snapshots that decoding leaves, the last one is enough
            pool.drop(block)
            table.replace(group, place, NO_BLOCK)
        table.first[group] = max(first, table.first[group])
        pool.claimed += max(table.claims[group], table.num_held(group)) - claimed

    def release(self, table: BlockTable) -> None:
        """Take back every block of `table`. Those that nobody else holds are cached if sealed, the last ones to go
        first, and free otherwise."""
        if not table.ends:
            return
        for key in table.keys[table.sealed : table.promised]:
            self._keep_promise(table, key)
        for group, pool in enumerate(self.pools):
            held = table.held(group)
            for block in reversed(held):
                pool.drop(block)
            pool.claimed -= max(table.claims[group], len(held)) if pool.window else 0
            pool.scatter()
        table.empty([0] * len(self.pools))

    def forget(self, table: BlockTable) -> None:
        """The contents of `table`'s blocks are not to be trusted: nobody finds them any more."""
        for group in range(len(table.ends)):
            for block in table.held(group):
                self.pools[group].forget(block)

    def num_alone(self, table: BlockTable) -> int:
        """Blocks that only `table` holds, in a group that keeps everything; in the first one where all have windows."""
        group = self._whole[0] if self._whole else 0
        return sum(self.pools[group].holders(block) == 1 for block in table.held(group))

    def _grow(self, table: BlockTable, groups: Sequence[int], places: int) -> None:
        """Hold blocks up to this many places in some groups."""
        for group in groups:
            pool, wanted = self.pools[group], places - table.ends[group]
            if wanted > 0:
                claimed = max(table.claims[group], table.num_held(group))
                table.extend(group, [pool.allocate() for _ in range(wanted)])
                if pool.window:
                    pool.claimed += max(table.claims[group], table.num_held(group)) - claimed

    def _extend_keys(self, table: BlockTable, tokens: Int32, count: int) -> None:
        for place in range(len(table.keys), count):
            before = table.keys[-1] if place else table.root
            own = tokens[place * self.tokens_per_block : (place + 1) * self.tokens_per_block]
            table.keys.append(hashlib.sha256(before + own.tobytes()).digest())

    def _keep_promise(self, table: BlockTable, key: bytes) -> None:
        if self._promised.get(key) is table:
            del self._promised[key]
