"""A session around another one, whose steps run singly."""

from ingot.step_io import Ahead, Float32, Int32, SequenceRules, Session, StepBatch, StepResult


class WrappedSession:
    """To be derived from."""

    most_steps = 1

    def __init__(self, inner: Session) -> None:
        self._inner, self.num_blocks, self.takes_drafts = inner, inner.num_blocks, inner.takes_drafts

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        self._inner.start(slot, rules, tokens, num_prompt)

    def end(self, slot: int) -> None:
        self._inner.end(slot)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        return self._inner.run(batch, ahead)

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        return self._inner.draw(slots, logits, raw)

    def close(self) -> None:
        self._inner.close()
