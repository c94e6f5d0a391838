"""What each step of a Plan must move and compute for a given batch, for comparison with what a machine can."""

from collections.abc import Collection

from ingot.plan import Buffer, Plan, Rows, Step
from ingot.plugins.registry import find_op
from ingot.plugins.work import OpUse
from ingot.step_work import Load, Work


class PlanWork:
    """The steps of one plan, and the draws that follow them."""

    def __init__(self, plan: Plan) -> None:
        self._caches = {layer: group for group in plan.caches for layer in group.layers}
        self._vocab = plan.vocab_size
        self._weights = {weight.name: weight for weight in plan.weights}
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}

    def of(self, step: Step, load: Load, inside: Collection[str] = ()) -> Work:
        """One step. inside: steps that the calls of others compute (Variant.inside)."""
        inputs = [self._buffers.get(name) for name in step.inputs]
        outputs = [self._buffers.get(name) for name in step.outputs]
        out = outputs[0] if outputs else None
        rows = _rows(out, load) if out else load.tokens
        if rows == 0:  # a chunk in the middle of a prompt needs no logits, and skips what makes them
            return Work(nbytes=0, operations=0)
        op = find_op(step.op)
        return op.work(
            OpUse(
                attrs=step.attrs,
                cache=self._caches[int(step.attrs["layer"])] if op.uses_kv else None,
                load=load,
                rows=rows,
                weights=[self._weights.get(name) for name in step.inputs],
                cols=[each.cols if each else None for each in inputs],
                out_cols=out.cols if out else 0,
                activation_bytes=sum(_row_bytes(each) * _rows(each, load) for each in (*inputs, *outputs) if each),
                inside=step.name in inside,
            )
        )

    def draw_work(self, load: Load) -> Work:
        """Greedy draws: every logit is read, and its exponential added up."""
        return Work(nbytes=4 * load.logit_rows * self._vocab, operations=2 * load.logit_rows * self._vocab)


def _rows(buffer: Buffer, load: Load) -> int:
    return load.tokens if buffer.rows is Rows.TOKENS else load.logit_rows


def _row_bytes(buffer: Buffer) -> int:
    return buffer.dtype.itemsize * buffer.cols
