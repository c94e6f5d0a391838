"""What each step of a Plan must move and compute for a given batch, for comparison with what a machine can."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from ingot.plan import Buffer, CacheGroup, Plan, Rows, Step, Weight

SCREEN_ROWS = 4  # a step of more never takes the plan's screen
EXPERTS = ("moe_gate_up", "moe_down")  # ops that read the experts which some row takes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a step carries. sequences: (tokens in the KV cache before, tokens of this step) of each; rows: whose logits
    are wanted; screened: of them but the best tokens, of a plan with a screen."""

    sequences: Sequence[tuple[int, int]]
    rows: int
    screened: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(count for _, count in self.sequences)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """nbytes: weights, keys, values and activations read and written, each once; a multiply-add is two operations.

    Of experts as many are read as the rows take if each takes its own at random.
    """

    nbytes: int
    operations: int

    def __add__(self, other: "Work") -> "Work":
        return Work(nbytes=self.nbytes + other.nbytes, operations=self.operations + other.operations)


class PlanWork:
    """The steps of one plan, and the draws that follow them."""

    def __init__(self, plan: Plan) -> None:
        self._caches = {layer: group for group in plan.caches for layer in group.layers}
        self._last, self._screen = plan.steps[-1].name, plan.screen
        self._vocab = plan.vocab_size
        self._weights = {weight.name: weight for weight in plan.weights}
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}

    def of(self, step: Step, load: Load, inside: Collection[str] = ()) -> Work:
        """One step; in place of the last one the screen where that is taken, the rows of its candidates left out: how
        many they are is not known beforehand. inside: steps that the calls of others compute (Variant.inside). A
        rope_kv_write among them has its queries turned by attention, which reads them as the product left them."""
        if load.screened and step.name == self._last:
            product, _ = self._screen
            centres = load.rows * self._vocab  # read for the likeliest token, and again for the candidates
            return self.of(product, load) + Work(nbytes=8 * centres, operations=8 * centres)
        read = [self._weights[name] for name in step.inputs if name in self._weights]
        touched = [self._buffers[name] for name in (*step.inputs, *step.outputs) if name in self._buffers]
        nbytes = sum(4 * buffer.cols * _rows(buffer, load) for buffer in touched)
        out = self._buffers[step.outputs[0]] if step.outputs else None
        rows = _rows(out, load) if out else load.tokens
        if rows == 0:  # a chunk in the middle of a prompt needs no logits, and skips what makes them
            return Work(nbytes=0, operations=0)
        if step.op == "matmul":
            n, k = self._weights[step.inputs[1]].shape
            weights, operations = sum(weight.nbytes for weight in read), 2 * rows * n * k
        elif step.op in EXPERTS:
            weight = self._weights[step.inputs[-1]]
            slots = self._buffers[step.inputs[1]].cols
            weights, operations = (
                expert_bytes(weight, slots, rows),
                2 * rows * slots * weight.shape[1] * weight.shape[2],
            )
        elif step.op == "embedding":  # a row of each table per token
            weights, operations = rows * sum(weight.nbytes // weight.shape[0] for weight in read), 2 * rows * _cols(out)
        elif step.op == "paged_attention":
            weights, operations = _attention(self._caches[int(step.attrs["layer"])], step.attrs, load, _cols(out))
        else:
            weights, operations = sum(weight.nbytes for weight in read), 2 * rows * _cols(out)
        if step.op == "rope_kv_write":
            weights += load.tokens * _kv_bytes(self._caches[int(step.attrs["layer"])])
            if step.name in inside:  # queries are neither read nor written
                nbytes -= 2 * 4 * rows * _cols(out)
                operations = operations * int(step.attrs["kv_heads"]) // int(step.attrs["heads"])
        return Work(nbytes=nbytes + weights, operations=operations)

    def draw_work(self, load: Load) -> Work:
        """Greedy draws: every logit is read, and its exponential added up; a screen has drawn already."""
        if load.screened:
            return Work(nbytes=0, operations=0)
        return Work(nbytes=4 * load.rows * self._vocab, operations=2 * load.rows * self._vocab)


def may_screen(plan: Plan, rows: float) -> bool:
    """Whether a step that wants no more than the best tokens of so many rows takes the plan's screen."""
    return bool(plan.screen) and 0 < rows <= SCREEN_ROWS


def expert_bytes(weight: Weight, slots: int, rows: float) -> int:
    """Of the experts that `rows` rows take."""
    untaken: float = (1 - slots / weight.shape[0]) ** rows
    return round(weight.nbytes * (1 - untaken))


def _attention(kv: CacheGroup, attrs: Mapping[str, int | float | str], load: Load, cols: int) -> tuple[int, int]:
    """(bytes of keys and values, operations): every sequence reads what some token of it sees once."""
    tokens, pairs = 0, 0
    for past, count in load.sequences:
        window = int(attrs["window"]) or past + count
        tokens += min(past + count, window - 1 + count)
        full = max(0, min(count, window - past))  # tokens that see everything before them
        pairs += full * past + full * (full + 1) // 2 + (count - full) * window
    return tokens * _kv_bytes(kv), 4 * pairs * cols


def _kv_bytes(kv: CacheGroup) -> int:
    """Of a token in one layer."""
    return (kv.k_block_bytes + kv.v_block_bytes) // kv.tokens_per_block


def _rows(buffer: Buffer, load: Load) -> int:
    return load.tokens if buffer.rows is Rows.TOKENS else load.rows


def _cols(buffer: Buffer | None) -> int:
    return 0 if buffer is None else buffer.cols
