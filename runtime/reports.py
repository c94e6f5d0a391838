"""What the loop tells about itself: counts, the time of a step, and whether steps end."""

import dataclasses
from typing import TypedDict


class GroupBlocks(TypedDict):
    """Blocks of one cache group. window: tokens that it keeps of a sequence, 0 for all."""

    window: int
    total: int
    used: int
    cached: int


class Stats(TypedDict):
    """blocks_used + blocks_cached + free ones = blocks_total. All below requests_waiting count from the beginning.

    blocks_cached         held by nobody, kept for their contents
    blocks_by_group       the same three counts of each cache group, in the order of the plan's `caches`
    prefix_hit_tokens     prompt tokens that were not computed, for their blocks were there
    preemptions           the sum of the two reasons:
    preempted_for_others  a request before it needed a block
    preempted_for_itself  it needed a block, and nobody came after it
    preempted_tokens      their cost: tokens computed again because of preemptions
    """

    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_by_group: list[GroupBlocks]
    requests_running: int
    requests_waiting: int
    preemptions: int
    preempted_for_others: int
    preempted_for_itself: int
    preempted_tokens: int
    prefix_hit_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step, or several of the same kind that ran in one crossing.

    steps  how many; everything else is of each of them. Seconds by phase: choosing and laying out the tokens, the
           session, handing out the results
    idle_stages  pipeline stages that had no step at that time: there were too few requests that no step had
    drafted, right_drafts  drafts of tokens in the step; those that were what was drawn
    """

    steps: int = 1
    prefill_tokens: int
    decode_rows: int
    schedule_seconds: float
    session_seconds: float
    finish_seconds: float
    idle_stages: int = 0
    drafted: int = 0
    right_drafts: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """So far: steps, and the time they were in the session. The rest of a busy executor's time is the host's work.

    overlapped   steps that pipeline stages began while another step was under way
    idle_stages, drafted, right_drafts  those of all steps: see `StepReport`
    """

    steps: int = 0
    session_seconds: float = 0.0
    overlapped: int = 0
    idle_stages: int = 0
    drafted: int = 0
    right_drafts: int = 0

    def after(self, report: StepReport, *, overlapped: int) -> "Work":
        """With these steps."""
        return Work(
            steps=self.steps + report.steps,
            session_seconds=self.session_seconds + report.steps * report.session_seconds,
            overlapped=overlapped,
            idle_stages=self.idle_stages + report.steps * report.idle_stages,
            drafted=self.drafted + report.drafted,
            right_drafts=self.right_drafts + report.right_drafts,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """How things stood between two steps.

    at     when, time.monotonic(): the last step had ended, or the first was about to begin
    busy   whether another step follows
    """

    at: float
    busy: bool
    stats: Stats
