"""What crosses between the runtime and a Session: sequences that start and end, ragged batches in, token ids out.

token-major ragged batch, 3 sequences, T = 7          query_starts = [0, 5, 6, 7]
┌─────────────────────┬───┬───┐
│ prefill chunk of A  │ B │ C │   B and C decode one token each
└─────────────────────┴───┴───┘
  past_lengths[s] tokens of sequence s are in the KV cache before the step;
  token i of sequence s has position past_lengths[s] + i.

A session holds what bears on the draws of a sequence in a slot, from `start` to `end`: its rules and its tokens so far.
Every draw adds a token to it. So several steps of decoding sequences can follow each other in one crossing.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt32 = npt.NDArray[np.uint32]

NO_LOG_PROB = 1.0  # in place of a log probability, none of which is above 0, that nobody wants
LAST_DRAWN = -1  # in place of a token id: the token that the sequence drew last
NOT_DRAWN = -2  # in place of a drawn token: a draft before it was wrong, or the sequence ended there


class Grammar(Protocol):
    """Which tokens may follow in one sequence, for one thread at a time. Its owner keeps it until the sequence
    has ended.

    native  for sessions in C++: address of the state; addresses of C functions over it that reset, consume a token,
            fill a mask, tell whether it is stopped, and take tokens back (llguidance.h names them); words of a mask
    """

    native: tuple[int, int, int, int, int, int, int]

    def reset(self) -> bool:
        """Begin again, before the first token. False: it has failed."""
        ...

    def allowed(self) -> UInt32:
        """A bit per token, the lowest first; none where the grammar fails. Tokens beyond are not allowed."""
        ...

    def consume(self, token: int) -> bool:
        """Take the next token. Whether no other may follow."""
        ...

    def rollback(self, count: int) -> bool:
        """Forget the last tokens, all of which were allowed. False: it has failed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRules:
    """How the tokens of a sequence are drawn, and when it ends. A draw changes its logits in this order: the grammar's
    mask, biases and bans, repetition, frequency, presence; then temperature, and min_p ahead of top_k and top_p.

    temperature         0 is greedy (lowest id wins ties); otherwise logits are divided by it
    top_k               keep the k most likely tokens, 0 keeps all
    top_p               then keep the smallest head of the sorted tokens whose probability reaches top_p; 1 keeps all
    min_p               drop tokens less likely than min_p times the most likely one; 0 keeps all
    seed                of the stream of random numbers: draw n of a sequence takes the n-th, n generated tokens so far
    repetition_penalty  positive logits of the sequence's tokens are divided by it, others multiplied
    frequency_penalty   subtracted once per occurrence among the generated tokens
    presence_penalty    subtracted from every token that was generated
    logit_bias          (token, what is added to its logit); -inf bans it
    bad_words           token sequences that are never generated: the last token of one is banned after the others
    stop_words          token sequences that end it
    end_ids             tokens that end it
    min_tokens          generated tokens before which nothing but the length ends it: its end tokens are banned
    max_tokens          generated tokens that end it
    log_prob            whether the log probability of a drawn token is wanted; else it may be NO_LOG_PROB
    top                 how many of the most likely tokens are wanted beside it, and its rank; None: neither
    reasoning_end       tokens that end the reasoning with which the sequence begins; (): it does not reason
    reasoning_begin     the sequence reasons if this is its first generated token; None: it does without
    reasoning_budget    generated tokens after which these are forced; None: never
    grammar             of what is generated behind the reasoning, in which no end token is drawn then. It ends
                        the sequence where it allows no further token, also before min_tokens
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 2**31 - 1
    log_prob: bool = True
    top: int | None = None
    reasoning_end: tuple[int, ...] = ()
    reasoning_begin: int | None = None
    reasoning_budget: int | None = None
    grammar: Grammar | None = None

    @property
    def guided(self) -> bool:
        """Whether some draws may be limited to some tokens."""
        return self.grammar is not None or bool(self.reasoning_end)

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far matter to the logits."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def follows_tokens(self) -> bool:
        """Whether tokens decide what may come next: those of a grammar, of the reasoning, or of long bad words."""
        return self.guided or any(len(word) > 1 for word in self.bad_words)


class Ending(enum.IntEnum):
    """How a sequence stands after a step.

    STOP    an end token or a stop word
    LENGTH  as many tokens as it may have
    FAILED  no token: the rules left none, or the logits are not numbers. Nothing was added to it
    """

    NONE = 0
    STOP = 1
    LENGTH = 2
    FAILED = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KnownTokens:
    """Tokens whose probabilities are wanted at K rows of logits; nothing is drawn there.

    row    int32 [K]: index into the R logit rows of the step
    token  int32 [K]
    top    int32 [K]: how many of the most likely tokens are wanted too
    """

    row: Int32
    token: Int32
    top: Int32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One step.

    ids           int32 [T]; LAST_DRAWN may stand for the first of a sequence's tokens
    query_starts  int32 [S + 1], first 0, last T
    past_lengths  int32 [S]
    block_tables  int32 [G, S, W], C-contiguous, a table for each cache group of the plan: block of tokens
                  [w * tokens_per_block, ...); -1 where there is none: not yet, or, in a group with a window, because no
                  token of this step or a later one sees it
    logit_rows    int32 [R]: token indices whose logits are wanted, ascending
    slots         int32 [S]: where the session holds the sequences; -1: nowhere, it draws nothing
    draws         int32 [Q]: the logit rows from which their sequences draw. A sequence may draw from several, which are
                  then those of its last tokens, in order. The tokens of all but the first of these rows are drafts:
                  guesses of what the draw before gives, which it may or may not give. Sequences with a reasoning part
                  draw from one row
    known         None where no probabilities of known tokens are wanted
    want_logits   copy the R rows of logits out
    """

    ids: Int32
    query_starts: Int32
    past_lengths: Int32
    block_tables: Int32
    logit_rows: Int32
    slots: Int32
    draws: Int32
    known: KnownTokens | None = None
    want_logits: bool = False


def goes_on(batch: StepBatch, before: StepBatch | None) -> bool:
    """Whether a batch is of the same decoding sequences as the one before it: then it has the same arrays, which nobody
    changes, but for past lengths and block tables. Each sequence has one token and one row, from which it draws."""
    return (
        before is not None
        and batch.ids is before.ids
        and batch.query_starts is before.query_starts
        and batch.logit_rows is before.logit_rows
        and batch.slots is before.slots
        and batch.draws is before.draws
        and batch.known is None
        and len(batch.ids) == len(batch.slots) == len(batch.draws)
        and int(batch.ids[0]) == LAST_DRAWN
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """How far a run of decoding sequences may go on by itself. Each step computes what the one before it drew; the
    last one is that after which a sequence has ended, or one of these limits is reached.

    most_steps  at most this many
    seconds     none begins when so much time has gone by
    stop        int32 [1]: any thread may set it to 1; the step that runs is the last
    """

    most_steps: int
    seconds: float
    stop: Int32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What n steps brought. Probabilities are natural logarithms under softmax(raw logits), before any rule.

    ids            int32 [n, Q + K]: drawn tokens, -1 where the rules left none; behind them the known ones. NOT_DRAWN
                   behind a draw that was not the draft in the row after it, or that ended its sequence: what the
                   session draws there counts for nothing. So tokens are those that draws in steps of their own give
    log_probs      float32 [n, Q + K], of these; NaN where the logits are not numbers; NO_LOG_PROB where nobody wants
                   it and the session has a cheaper way to the token, and beside NOT_DRAWN
    ends           int32 [Q]: the Ending of the sequence of each draw, after the last step, as far as up to this draw;
                   NONE beside NOT_DRAWN
    logits         float32 [R, vocab] of a single step, or None
    token_ranks    int32 [n, Q + K], of each drawn or known token: 1 is the most likely; ties: the lower id first.
                   0 where it is not wanted
    top_ids        int32 [n, top]: the most likely tokens, best first: as many as each draw, then each known token wants
    top_log_probs  float32 [n, top]

    The last three are None where no draw wants them and no token is known.
    """

    ids: Int32
    log_probs: Float32
    ends: Int32
    logits: Float32 | None = None
    token_ranks: Int32 | None = None
    top_ids: Int32 | None = None
    top_log_probs: Float32 | None = None


class Session(Protocol):
    """An Engine loaded on a device. Not thread-safe: one call at a time.

    num_blocks    0 .. num_blocks-1 may appear in block tables
    most_steps    that one run may make
    takes_drafts  whether a sequence may draw from several rows of a step
    """

    num_blocks: tuple[int, ...]  # of each cache group
    most_steps: int
    takes_drafts: bool

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Hold a sequence in a slot, 0 to max_batch_size - 1, in place of any that is there. tokens: all that are
        known, `num_prompt` of which were not generated. One that was preempted starts again with more of them.
        """
        ...

    def end(self, slot: int) -> None:
        """Forget the sequence in a slot, if there is one."""
        ...

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """Execute the plan once; with `ahead` several times, up to most_steps, where every sequence has one token, one
        row of logits and one draw, and the block tables have room. What raises leaves the sequences that draw to be
        started again.
        """
        ...

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw for the sequences in Q slots from given logits, as at the end of a step. Probabilities and ranks are
        those of `raw`. Both float32 [Q, vocab].
        """
        ...

    def close(self) -> None:
        """Release memory; the session cannot run afterwards."""
        ...


@runtime_checkable
class SubmittingSession(Session, Protocol):
    """A session whose device computes while its host goes on. Two steps may be under way: the second computes the
    tokens that the first draws. Every other call but `end` and `close` needs all steps to be waited for.
    """

    def submit(self, batch: StepBatch) -> None:
        """Begin a step, as `run` does. A sequence of the step under way may draw again where its draw depends on no
        token but by penalties (`SequenceRules.follows_tokens`), and within max_tokens.
        """
        ...

    def wait(self) -> StepResult:
        """The result of the older step. A sequence that ended in the step before keeps its Ending; what was drawn for
        it then counts for nothing. What raises leaves the sequences of all steps under way to be started again, after
        `drop`.
        """
        ...

    def drop(self) -> None:
        """Forget the steps under way."""
        ...


@runtime_checkable
class PipelineSession(Session, Protocol):
    """A session whose pipeline stages work at different steps at once.

    stages  how many steps may be under way; 1: none but the one that runs. A sequence may be in several of them, with
            neighbouring chunks of its tokens, if none but the last one draws for it
    """

    @property
    def stages(self) -> int: ...

    def announce(self, batch: StepBatch) -> None:
        """Have earlier stages begin a step before its `run`, which must come in the order of announcements. What `run`
        draws then may be less than the batch says."""
        ...

    def settle(self) -> None:
        """End the steps that were announced and have not run: what they would draw is lost."""
        ...


@runtime_checkable
class BlockSession(Session, Protocol):
    """A session whose KV blocks can move to a session in another process, of the same engine or of one that divides the
    same model among other ranks. A block is that of the whole model, as a session of one rank has it; it moves while
    nothing runs, not even what was announced."""

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of a cache group, with all its layers."""
        ...

    def read_block(self, group: int, block: int, to: npt.NDArray[np.uint8]) -> None:
        """Copy a block. to: uint8 [block_bytes]."""
        ...

    def write_block(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Set a block. data: uint8 [block_bytes]."""
        ...


@runtime_checkable
class TapSession(Session, Protocol):
    """A session whose inside can be looked at, for verification. Running without taps costs what it always did."""

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        ...

    def read_kv(self, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values that a block holds, each [kv_heads, tokens_per_block, head_dim]."""
        ...


@runtime_checkable
class RanksTapSession(Session, Protocol):
    """The same for all ranks of an engine, by their numbers."""

    def run_ranks_tapped(
        self, batch: StepBatch, steps: Sequence[Sequence[str]]
    ) -> Sequence[Mapping[str, Mapping[str, Float32]]]:
        """`run`, and for each rank what the plan steps that are named for it wrote: step → buffer → [rows, cols]."""
        ...

    def read_rank_kv(self, rank: int, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values that a block of a rank holds, as `read_kv`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """parts: float64, seconds of every plan step, 0 of those without a call of their own, and then of the draws;
    variant: of the plan, that ran, "" for the steps one by one; barriers: how often threads waited for each other."""

    parts: npt.NDArray[np.float64]
    variant: str
    barriers: int


@runtime_checkable
class TimedSession(Session, Protocol):
    """A session that says where the time of a step goes. Running untimed costs what it always did."""

    def run_timed(self, batch: StepBatch) -> tuple[StepResult, StepTimes]:
        """`run`, and where its time went."""
        ...

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Give a block of a cache group the contents of another one, in all its layers."""
        ...
