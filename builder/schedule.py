"""How the steps of a plan are called: the variants of targets whose sessions run them (`Variant` of ingot.plan).

    few tokens   norm        qkv | rope_kv_write | attention | out | norm   gate_up | down |     | = threads wait
    more                norm+qkv | rope_kv_write | attention | out | norm+gate_up   | down |

Every pass below changes one variant, which begins as the steps one by one, and reports what it did and why not more.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.builder.passes.base import PassReport
from ingot.plan import Attr, Call, Plan, Variant
from ingot.plan_check import overlaps
from ingot.plugins.registry import find_op
from ingot.plugins.target import CallRules, Target, WithVariants

_Said = Callable[[PassReport, Plan], None]


def schedule(plan: Plan, target: Target, said: _Said = lambda report, plan: None) -> Plan:
    """The plan with the variants that the target's sessions run. said: gets each pass's report, and the plan then."""
    if not isinstance(target, WithVariants):
        return plan
    return schedule_calls(plan, target.call_rules(), said)


def schedule_calls(plan: Plan, rules: CallRules, said: _Said = lambda report, plan: None) -> Plan:
    """The same by the rules themselves."""
    plan = dataclasses.replace(plan, variants=())
    view = PlanView(plan)
    most, rest = _private_tokens(view, rules), plan.limits.max_num_tokens
    kinds: list[tuple[str, int, Sequence[Pass]]] = []
    if most > 0:
        kinds.append(("few", min(most, rest), (private_rows, place_barriers)))
    if most < rest:
        kinds.append(("many", rest, (fold_norms, fold_rotation, place_barriers)))
    for name, tokens, passes in kinds:
        variant = dataclasses.replace(plan.one_by_one, name=name, most_tokens=tokens)
        for each in passes:
            variant, report = each(view, rules, variant)
            said(report, dataclasses.replace(plan, variants=(*plan.variants, variant)))
        plan = dataclasses.replace(plan, variants=(*plan.variants, variant))
    return plan


class Dump:
    """Collects the reports of the passes, and writes the plan after each to a folder, if there is one."""

    def __init__(self, folder: Path | None, first: int) -> None:
        self.reports: list[PassReport] = []
        self._folder, self._number = folder, first

    def __call__(self, report: PassReport, plan: Plan) -> None:
        self.reports.append(report)
        if self._folder is not None:
            (self._folder / f"{self._number:02}_{report.name}.json").write_text(plan.to_json() + "\n")
        self._number += 1


class PlanView:
    """The steps of a plan, and the buffers that they touch."""

    def __init__(self, plan: Plan) -> None:
        near = overlaps(plan)
        self.plan, self.steps = plan, plan.steps
        self.index = {step.name: i for i, step in enumerate(plan.steps)}
        self.reads = [tuple(name for name in step.inputs if name in near) for step in plan.steps]
        self.writes = [tuple(name for name in step.outputs if name in near) for step in plan.steps]
        self._near = {name: {name, *others} for name, others in near.items()}

    def meet(self, some: Sequence[str], others: Sequence[str]) -> bool:
        """Whether any of these buffers shares bytes with any of those, or is the same."""
        return any(not self._near[name].isdisjoint(some) for name in others)

    def products(self, i: int) -> list[int] | str:
        """The products that read norm `i` and are all that do, before another norm, or why it is not so."""
        if self.steps[i].outputs[1]:
            return "its sum is wanted as well"
        y, found, another = self.writes[i][0], [], False
        for j in range(i + 1, len(self.steps)):
            reads = self.reads[j]
            if self.meet(reads, (y,)):
                if another:
                    return "another norm comes before one of its readers"
                if find_op(self.steps[j].op).packed is None or reads[0] != y or self.meet(reads[1:], (y,)):
                    return "not only products read it"
                found.append(j)
            if self.meet(self.writes[j], (y,)):
                return found or "no kernel call reads it"
            another = another or find_op(self.steps[j].op).norms
        return "it writes the logits" if y == self.plan.logits else found or "no kernel call reads it"

    def norms(self) -> list[int]:
        """Steps that norm rows."""
        return [i for i, step in enumerate(self.steps) if find_op(step.op).norms]


Pass = Callable[[PlanView, CallRules, Variant], tuple[Variant, PassReport]]


def fold_norms(view: PlanView, rules: CallRules, variant: Variant) -> tuple[Variant, PassReport]:
    """A norm that one product reads is computed there, row by row: what is normed goes to no memory."""
    inside: dict[str, str] = {}
    refused = Counter[str]()
    for i in view.norms():
        products = view.products(i)
        if isinstance(products, str):
            refused[products] += 1
        elif (reason := _not_folded(view, rules, i, products)) is not None:
            refused[reason] += 1
        else:
            inside[view.steps[products[0]].name] = view.steps[i].name
    calls = [
        dataclasses.replace(call, inside=(inside[call.step],)) if call.step in inside else call
        for call in variant.calls
        if call.step not in inside.values()
    ]
    return _changed("fold_norms", variant, calls, len(inside), refused)


def _not_folded(view: PlanView, rules: CallRules, i: int, products: Sequence[int]) -> str | None:
    """Why the products of norm `i` do not compute it."""
    norm, j = view.steps[i], products[0]
    added = find_op(norm.op).residual
    if len(products) > 1:
        return "several products read it"
    if view.steps[j].kernel not in rules.norming:
        return "the product's kernel prepares no rows"
    if added is not None and norm.inputs[added]:
        return "it adds a residual"
    if any(view.meet(view.writes[k], view.reads[i][:1]) for k in range(i + 1, j + 1)):
        return "what it norms is written over before the product ends"
    return None


def fold_rotation(view: PlanView, rules: CallRules, variant: Variant) -> tuple[Variant, PassReport]:
    """Attention norms and rotates the queries that it loads; rope_kv_write writes keys and values alone."""
    inside: dict[str, str] = {}
    refused = Counter[str]()
    for i, step in enumerate(view.steps):
        if not find_op(step.op).keeps_inputs:
            continue
        reason = _not_rotated(view, i)
        if reason is None:
            inside[view.steps[i + 1].name] = step.name
        else:
            refused[reason] += 1
    calls = [
        dataclasses.replace(
            call,
            inside=(inside[call.step],) if call.step in inside else call.inside,
            kv_only=call.step in inside.values(),
        )
        for call in variant.calls
    ]
    return _changed("fold_rotation", variant, calls, len(inside), refused)


def _not_rotated(view: PlanView, i: int) -> str | None:
    """Why the step behind rope_kv_write step `i` does not rotate the queries."""
    step, q = view.steps[i], view.writes[i][0]
    if i + 1 == len(view.steps) or not find_op(view.steps[i + 1].op).reads_kv or view.reads[i + 1][0] != q:
        return "the next kernel call is not its attention"
    norm = next((weight for weight in view.plan.weights if weight.name == step.inputs[2]), None)
    if norm is not None and norm.shape[0] != step.attrs["head_dim"]:
        return "a norm takes several heads together"
    if view.meet(view.writes[i + 1], view.reads[i]):
        return "attention writes over what the queries are made of"
    for j in range(i + 2, len(view.steps)):
        if view.meet(view.reads[j], (q,)):
            return "another kernel call reads the queries too"
        if view.meet(view.writes[j], (q,)):
            break
    return None


def private_rows(view: PlanView, rules: CallRules, variant: Variant) -> tuple[Variant, PassReport]:
    """Every thread computes the few rows of a norm that only products read, so that these need not wait for it."""
    refused = Counter[str]()
    private, readers = set[str](), set[str]()
    for i in view.norms():
        products = view.products(i)
        if isinstance(products, str):
            refused[products] += 1
        else:
            private.add(view.steps[i].name)
            readers.update(view.steps[j].name for j in products)
    calls = [
        dataclasses.replace(call, private=call.step in private, reads_private=call.step in readers)
        for call in variant.calls
    ]
    return _changed("private_rows", variant, calls, len(private), refused)


def _private_tokens(view: PlanView, rules: CallRules) -> int:
    """Most tokens of a step whose norms fit into what a thread computes for itself."""
    cols = {buffer.name: buffer.cols for buffer in view.plan.buffers}
    widths = [cols[view.writes[i][0]] for i in view.norms() if not isinstance(view.products(i), str)]
    return rules.private_elements // max(widths, default=1)


def place_barriers(view: PlanView, rules: CallRules, variant: Variant) -> tuple[Variant, PassReport]:
    """Threads wait between two calls if one writes what the other uses, or if both use what a team shares."""
    refused = Counter[str]()
    calls: list[Call] = []
    open_uses: list[_Use] = []  # of the calls since the last barrier
    for call, use in zip(variant.calls, _uses(view, rules, variant), strict=True):
        reason = next(filter(None, (each.conflict(use, view) for each in open_uses)), None)
        if calls:
            calls[-1] = dataclasses.replace(calls[-1], waits=reason is not None)
        if reason is not None:
            refused[reason] += 1
            open_uses = []
        open_uses.append(use)
        calls.append(call)
    return _changed("place_barriers", variant, calls, sum(not call.waits for call in calls), refused)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Use:
    """What a call touches of the arena and of the KV cache (layers), and whether it uses the scratch and the numbers
    that a team shares."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    layer: Attr | None
    writes_kv: bool
    teams_up: bool

    def conflict(self, later: "_Use", view: PlanView) -> str | None:
        """Why a later call must wait for this one."""
        if view.meet(self.writes, later.reads):
            return "one reads what another wrote"
        if view.meet(self.reads, later.writes) or view.meet(self.writes, later.writes):
            return "one writes over what another used"
        if self.layer is not None and self.layer == later.layer and (self.writes_kv or later.writes_kv):
            return "one uses the keys and values that another writes"
        return "both share the team's scratch and numbers" if self.teams_up and later.teams_up else None


def _uses(view: PlanView, rules: CallRules, variant: Variant) -> list[_Use]:
    """What each call of a variant touches."""
    uses = []
    for call in variant.calls:
        i = view.index[call.step]
        made = bool(call.inside) or call.reads_private
        reads = [name for name in view.reads[i] if not made or name != view.reads[i][0]]
        for name in call.inside:
            j = view.index[name]
            reads += view.reads[j][:1] if find_op(view.steps[j].op).norms else view.reads[j]
        writes = () if call.private or call.kv_only else view.writes[i]
        step, op = view.steps[i], find_op(view.steps[i].op)
        uses.append(
            _Use(
                reads=tuple(reads),
                writes=writes,
                layer=step.attrs.get("layer") if op.uses_kv else None,
                writes_kv=op.writes_kv,
                teams_up=step.op not in rules.by_rows,
            )
        )
    return uses


def _changed(
    name: str, variant: Variant, calls: Sequence[Call], fired: int, refused: Counter[str]
) -> tuple[Variant, PassReport]:
    report = PassReport(name=f"{variant.name}.{name}", fired=fired, refused=dict(refused))
    return dataclasses.replace(variant, calls=tuple(calls)), report
