"""What crosses between the runtime and a Session in one step: a ragged batch in, token ids out.

token-major ragged batch, 3 sequences, T = 7          query_starts = [0, 5, 6, 7]
┌─────────────────────┬───┬───┐
│ prefill chunk of A  │ B │ C │   B and C decode one token each
└─────────────────────┴───┴───┘
  past_lengths[s] tokens of sequence s are in the KV cache before the step;
  token i of sequence s has position past_lengths[s] + i.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

NO_LOG_PROB = 1.0  # in place of a log probability, none of which is above 0, that nobody wants


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawRules:
    """What changes the logits of Q draws beforehand, in this order: biases, repetition, frequency, presence; then
    temperature, and min_p ahead of top_k and top_p.

    min_p               float32 [Q]: drop tokens less likely than min_p times the most likely one; 0 keeps all
    repetition_penalty  float32 [Q]: positive logits of tokens in the history are divided by it, others multiplied
    frequency_penalty   float32 [Q]: subtracted once per occurrence among the generated tokens
    presence_penalty    float32 [Q]: subtracted from every token that was generated
    history             int32 [H]: prompts and generated tokens, draw q's from history_starts[q] on
    history_starts      int32 [Q + 1]; a draw without penalties may have an empty history
    num_prompt          int32 [Q]: how many tokens of draw q's history are prompt
    bias_ids, bias      int32 [B], float32 [B]: added to the logits of these tokens; -inf bans one
    bias_starts         int32 [Q + 1]
    """

    min_p: Float32
    repetition_penalty: Float32
    frequency_penalty: Float32
    presence_penalty: Float32
    history_starts: Int32
    history: Int32
    num_prompt: Int32
    bias_starts: Int32
    bias_ids: Int32
    bias: Float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbRows:
    """Which probabilities of Q draws are wanted beside those of the drawn tokens.

    given       int32 [Q]: a token that is known already, whose probability is wanted, or -1 to draw one
    top_starts  int32 [Q + 1]: draw q wants its top_starts[q + 1] - top_starts[q] most likely tokens
    """

    given: Int32
    top_starts: Int32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleRows:
    """How to draw one token for each of Q logit rows. All arrays have length Q.

    row          index into the R logit rows of the step
    temperature  0 is greedy (lowest id wins ties); otherwise logits are divided by it
    top_k        keep the k most likely tokens, 0 keeps all
    top_p        then keep the smallest head of the sorted tokens whose probability reaches top_p; 1 keeps all
    seed         stream of the request
    counter      index of the draw within the stream: the number of tokens the request has generated so far
    rules        None where no draw has any
    probs        None where nobody wants more than the drawn tokens' own
    log_probs    bool [Q]: which of those are wanted; a session may leave the others out (`NO_LOG_PROB`). None: all
    """

    row: Int32
    temperature: Float32
    top_k: Int32
    top_p: Float32
    seed: npt.NDArray[np.uint64]
    counter: npt.NDArray[np.uint64]
    rules: DrawRules | None = None
    probs: ProbRows | None = None
    log_probs: npt.NDArray[np.bool_] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One step.

    ids           int32 [T]
    query_starts  int32 [S + 1], first 0, last T
    past_lengths  int32 [S]
    block_tables  int32 [G, S, W], C-contiguous, a table for each cache group of the plan: block of tokens
                  [w * tokens_per_block, ...); -1 where there is none: not yet, or, in a group with a window, because no
                  token of this step or a later one sees it
    logit_rows    int32 [R]: token indices whose logits are wanted, ascending
    sample        how to draw from them
    want_logits   copy the R rows of logits out
    """

    ids: Int32
    query_starts: Int32
    past_lengths: Int32
    block_tables: Int32
    logit_rows: Int32
    sample: SampleRows
    want_logits: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Probabilities are natural logarithms under softmax(raw logits), before any rule.

    ids            int32 [Q]; -1 where the rules left no token
    log_probs      float32 [Q], of each drawn or given token; NaN where the logits are not numbers; NO_LOG_PROB where
                   nobody wants it and the session has a cheaper way to the token
    logits         float32 [R, vocab] or None
    ranks          int32 [Q], of each drawn or given token: 1 is the most likely; ties: the lower id first
    top_ids        int32 [top_starts[Q]]: the most likely tokens of each draw, best first
    top_log_probs  float32 [top_starts[Q]]

    The last three are None unless the step had `ProbRows`.
    """

    ids: Int32
    log_probs: Float32
    logits: Float32 | None = None
    ranks: Int32 | None = None
    top_ids: Int32 | None = None
    top_log_probs: Float32 | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How the draws of S sequences go on from those of a batch. Draws with a history add to it what they draw.

    num_lasting     int32 [S]: so many of the first biases of draw s stay for all draws; those behind are of one draw
    min_steps       int32 [S]: the first so many steps ban the tokens that end sequence s; a stop word ends it from the
                    last of them on
    tails           int32 [L]: the last generated tokens of sequence s from tail_starts[s] on: as many as its words of
                    n tokens may begin with, n - 1, where so many were generated
    tail_starts     int32 [S + 1], as the starts below
    bad_words       int32 [B]: token sequences that are never generated, of two tokens at least; -1 behind each
    stop_words      int32 [W]: the same of those that end the sequence
    """

    num_lasting: Int32
    min_steps: Int32
    tails: Int32
    tail_starts: Int32
    bad_words: Int32
    bad_word_starts: Int32
    stop_words: Int32
    stop_word_starts: Int32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RepeatProbs:
    """For draws with `ProbRows`; to be filled: see StepResult. top: top_starts[S].

    ranks          int32 [most steps, S]
    top_ids        int32 [most steps, top]
    top_log_probs  float32 [most steps, top]
    """

    ranks: Int32
    top_ids: Int32
    top_log_probs: Float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """How long steps of the same decoding sequences follow each other, each computing what the one before drew, and
    what they drew.

    seconds     no step follows when so much time has gone by
    end_ids     int32 [E]: tokens that end sequence s, from end_starts[s] on. The step that draws one is the last; so is
                one that completes a stop word, or has no token or no number for a sequence
    end_starts  int32 [S + 1]
    course      None where every draw has the biases of the first, and no sequence has stop words
    stop        int32 [1]: any thread may set it to 1; the step that runs is the last
    ids         int32 [most steps, S], to be filled: see StepResult
    log_probs   float32 [most steps, S], to be filled
    probs       None where the draws have no `ProbRows`
    done        int32 [1]: 0 at first; so many steps have ended and others followed, also where one of these failed
    """

    seconds: float
    end_starts: Int32
    end_ids: Int32
    course: Course | None = None
    stop: Int32
    ids: Int32
    log_probs: Float32
    probs: RepeatProbs | None = None
    done: Int32


class Session(Protocol):
    """An Engine loaded on a device. Not thread-safe: one step at a time."""

    num_blocks: tuple[int, ...]  # of each cache group

    def run(self, batch: StepBatch) -> StepResult:
        """Execute the plan once. Block 0 .. num_blocks[g] - 1 may appear in the tables of cache group g."""
        ...

    def draw(self, logits: Float32, rows: SampleRows) -> StepResult:
        """Draw from given logits, float32 [R, vocab], as at the end of a step."""
        ...

    def close(self) -> None:
        """Release memory; the session cannot run afterwards."""
        ...


@runtime_checkable
class RepeatSession(Session, Protocol):
    """A session that needs nobody between the steps of decoding sequences."""

    def decode(self, batch: StepBatch, repeat: Repeat) -> int:
        """The same as `run` again and again; how many times, at least once. Every sequence has one token, one row of
        logits and one draw, no token is given, and the block tables have room for all steps.
        """
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

    def copy_block(self, source: int, target: int) -> None:
        """Give a KV block of every cache group the contents of another one, in all layers."""
        ...
