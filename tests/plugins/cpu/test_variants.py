"""Variants of a plan: whatever the calls say, a session refuses them, or gives the bits of the steps one by one."""

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import open_engine
from ingot.errors import EngineError
from ingot.plan import Call, Plan
from ingot.plan_check import check_plan
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from tests.builder.test_schedule import covered
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.cpu.one_step import batch_of

pytestmark = [pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")]

FEW, MANY = 3, 24  # tokens; rows of 1,024 numbers are few up to 16
THREADS = 3
Change = Callable[[list[Call]], list[Call]]


@dataclasses.dataclass(frozen=True)
class Built:
    plan: Plan
    weights: npt.NDArray[np.uint8]

    def open(self, plan: Plan) -> CpuSession:
        return open_native(plan, self.weights, SessionOptions(num_blocks=(4,), threads=THREADS), "avx2")

    def run(self, plan: Plan, tokens: int) -> tuple[bytes, str]:
        """Logits, and the variant that gave them."""
        session = self.open(plan)
        result, times = session.run_timed(_batch(tokens))
        session.close()
        assert result.logits is not None
        return result.logits.tobytes(), times.variant

    def changed(self, name: str, change: Change) -> Plan:
        """The plan with other calls in a variant."""
        variants = tuple(
            dataclasses.replace(each, calls=tuple(change(list(each.calls)))) if each.name == name else each
            for each in self.plan.variants
        )
        return dataclasses.replace(self.plan, variants=variants)


def _batch(tokens: int) -> StepBatch:
    ids = (np.arange(tokens, dtype=np.int32) * 7 + 1) % 61
    return batch_of([(0, tokens)], [range(2)], range(tokens), ids=ids, want_logits=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """A llama of two layers whose products take int8 rows."""
    folder = tmp_path_factory.mktemp("variants")
    config = {**TINY_LLAMA, "hidden_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 64}
    convert(ConvertOptions(model_dir=write_model(folder / "m", config), output_dir=folder / "c"))
    options = BuildConfig(
        precision="w8", activations="int8", target="cpu/avx2", autotune=False, tokens_per_block=16, max_num_tokens=32
    )
    build(options, folder / "c", folder / "e")
    with open_engine(folder / "e") as engine:
        yield Built(engine.plan, engine.weights)


def test_all_ways_give_the_same_bits(built: Built) -> None:
    plain = dataclasses.replace(built.plan, variants=())
    assert [each.name for each in built.plan.variants] == ["few", "many"]
    for tokens, name in ((FEW, "few"), (16, "few"), (17, "many"), (MANY, "many")):
        logits, variant = built.run(built.plan, tokens)
        assert (logits, variant) == (built.run(plain, tokens)[0], name)
        assert built.run(plain, tokens)[1] == ""


def test_every_step_is_there_once(built: Built) -> None:
    for variant in built.plan.variants:
        covered(built.plan, variant)


def test_steps_that_somebody_looks_at_run_one_by_one(built: Built) -> None:
    session = built.open(built.plan)
    names = [step.name for step in built.plan.steps]
    _, outputs = session.run_tapped(_batch(MANY), names)
    assert list(outputs) == names
    assert session.native.variant == ""
    session.run(_batch(MANY))
    assert session.native.variant == "many"
    session.close()


@pytest.mark.parametrize(("name", "tokens"), [("few", FEW), ("many", MANY)])
def test_no_barrier_can_be_left_out_and_any_added(built: Built, name: str, tokens: int) -> None:
    calls = built.plan.variant(name).calls
    expected = built.run(built.plan, tokens)
    for call in calls:
        plan = built.changed(name, _at(call.step, waits=not call.waits))
        if call.waits:
            with pytest.raises(EngineError, match=r"no barrier (lies between|ends it)"):
                built.open(plan).close()
        else:
            assert built.run(plan, tokens) == expected


def _at(step: str, /, **changes: object) -> Change:
    """Another call of a step."""
    return lambda calls: [
        dataclasses.replace(call, **changes) if call.step == step else call  # type: ignore[arg-type]
        for call in calls
    ]


NORM, WRITE, ATTENTION = "layers.0/attention_norm", "layers.0/rope_kv_write", "layers.0/attention"
QKV, DOWN = "layers.0/qkv", "layers.0/down"
HOSTILE: dict[str, tuple[str, Change, str, str]] = {
    "no calls": ("many", lambda calls: [], "embed is not computed once", "embed: it is not computed once"),
    "a step less": ("many", lambda calls: calls[1:], "embed is not computed once", "embed: it is not computed once"),
    "a step twice": ("few", lambda calls: [calls[0], *calls], "embed is called too late", "called too late, or twice"),
    "another order": ("few", lambda calls: [calls[1], calls[0], *calls[2:]], "called too late", "called too late"),
    "a step of nobody": ("few", _at("embed", step="tables"), "tables is called too late", "no kernel call tables"),
    "a norm of nobody": ("many", _at(QKV, inside=("norm",)), "computes norm, which", "no kernel call norm"),
    "a norm that no call computes": ("many", _at(QKV, inside=()), "attention_norm is not comp", "not computed once"),
    "a norm for two": ("many", _at("layers.1/qkv", inside=(NORM,)), "there already", "there already"),
    "a norm twice": ("few", _at(QKV, inside=(NORM,)), "attention_norm is not comp", "not computed once"),
    "queries of nobody": (
        "few",
        _at(WRITE, kv_only=True),
        "rope_kv_write writes keys and values alone, and no call",
        "rope_kv_write: it writes keys and values alone, and no call",
    ),
    "queries twice": (
        "many",
        _at(WRITE, kv_only=False),
        "rope_kv_write computes its queries, and so does",
        "rope_kv_write: it computes its queries, and so does",
    ),
    "keys of a product": ("few", _at(QKV, kv_only=True), "qkv writes keys and values", "qkv: it writes keys and val"),
    "several inside": ("many", _at(DOWN, inside=("embed", "rope_table")), "embed is not comp", "several others"),
    "itself inside": ("many", _at(DOWN, inside=(DOWN,)), "comes later", "comes later"),
    "a step behind inside": ("few", _at(DOWN, inside=("layers.1/qkv",)), "comes later", "comes later"),
    "no end": ("few", _at("lm_head", waits=False), "last call is not waited for", "no barrier ends it"),
}


@pytest.mark.parametrize("odd", HOSTILE)
def test_odd_calls_are_refused(odd: str, built: Built) -> None:
    """By Python, which reads them in a file, and by C++, which runs them."""
    name, change, words, native_words = HOSTILE[odd]
    plan = built.changed(name, change)
    with pytest.raises(EngineError, match=words) as refused:
        check_plan(plan)
    assert refused.value.hint
    with pytest.raises(EngineError, match=f"variant {name}.*({native_words})"):
        built.open(plan).close()


MISUSED: dict[str, tuple[str, Change, str]] = {
    "a product that each thread computes": ("few", _at(QKV, private=True), "by each thread for itself"),
    "an embedding that each thread computes": ("few", _at("embed", private=True), "by each thread for itself"),
    "rows that are in memory": ("many", _at(DOWN, reads_private=True), "no thread has the rows"),
    "rows that are not in memory": ("few", _at(QKV, reads_private=False), "which no call has written to memory"),
    "rows of a norm inside": ("many", _at(QKV, reads_private=True), "it makes its rows, and each thread has them"),
    "attention to rows of each thread": ("few", _at(ATTENTION, reads_private=True), "no thread has the rows"),
    "many rows of each thread": ("many", _at("final_norm", private=True), "does not hold its rows"),
    "a step that the next one cannot compute": (
        "few",
        lambda calls: _at(NORM, inside=("embed",), private=False)(calls[1:]),
        "cannot compute embed",
    ),
    "a norm that another product computes": (
        "many",
        lambda calls: _at(DOWN, inside=(NORM,))(_at(QKV, inside=())(calls)),
        "which no call has written|does not read what it computes",
    ),
    "a norm of what its product writes over": (
        "few",
        lambda calls: [
            call
            for call in _at("lm_head", inside=("final_norm",), reads_private=False)(calls)
            if call.step != "final_norm"
        ],
        "is written over",
    ),
    "queries of another layer": (
        "many",
        lambda calls: _at("layers.1/attention", inside=(WRITE,))(_at(ATTENTION, inside=())(calls)),
        "which no call has written|is written over",
    ),
}


@pytest.mark.parametrize("odd", MISUSED)
def test_calls_that_kernels_cannot_follow_are_refused(odd: str, built: Built) -> None:
    name, change, words = MISUSED[odd]
    with pytest.raises(EngineError, match=words):
        built.open(built.changed(name, change)).close()


def test_queries_may_be_rotated_before(built: Built) -> None:
    plan = built.changed("many", lambda calls: _at(WRITE, kv_only=False)(_at(ATTENTION, inside=())(calls)))
    assert built.run(plan, MANY) == built.run(built.plan, MANY)


def test_variants_are_for_more_and_more_tokens(built: Built) -> None:
    few, many = built.plan.variants
    short = dataclasses.replace(many, most_tokens=few.most_tokens)
    for variants, words in (
        ((many, few), "behind one for 32"),
        ((few, short), "behind one for 16"),
        ((few,), "the last one is for 16 tokens, a step may have 32"),
        ((few, dataclasses.replace(many, name="few")), "two are called few"),
    ):
        plan = dataclasses.replace(built.plan, variants=variants)
        with pytest.raises(EngineError, match=words):
            check_plan(plan)
        if "the last one" not in words:
            with pytest.raises(EngineError, match=r"those before it take its tokens|two are called few"):
                built.open(plan).close()
    alone = dataclasses.replace(built.plan, variants=(few,))
    assert built.run(alone, MANY) == (built.run(built.plan, MANY)[0], ""), "what no variant is for runs one by one"


def _random_changes(calls: list[Call], steps: list[str], draw: random.Random) -> list[Call]:
    """One or two calls changed, moved, left out or repeated."""
    for _ in range(draw.randrange(1, 3)):
        at = draw.randrange(len(calls))
        call = calls[at]
        change = draw.randrange(11)
        if change == 0:
            calls[at] = dataclasses.replace(call, waits=not call.waits)
        elif change > 8:
            calls[at] = dataclasses.replace(call, waits=True, private=False, reads_private=False)
        elif change == 1:
            calls[at] = dataclasses.replace(call, private=not call.private)
        elif change == 5:
            calls[at] = dataclasses.replace(call, kv_only=not call.kv_only)
        elif change == 6:
            calls[at] = dataclasses.replace(call, reads_private=not call.reads_private)
        elif change == 2:
            calls[at] = dataclasses.replace(call, inside=() if call.inside else (draw.choice(steps),))
        elif change == 3:
            inside = steps[max(steps.index(call.step) - 1, 0)]
            calls = [each for each in calls if each.step != inside]
            calls = [dataclasses.replace(each, inside=(inside,)) if each is call else each for each in calls]
        elif change == 4:
            del calls[at]
        elif change == 7:
            calls.insert(draw.randrange(len(calls)), call)
        else:
            calls[at] = dataclasses.replace(call, step=draw.choice(steps))
    return calls


def test_any_variant_is_refused_or_harmless(built: Built) -> None:
    steps, draw = [step.name for step in built.plan.steps], random.Random(2)
    expected = {tokens: built.run(built.plan, tokens)[0] for tokens in (FEW, MANY)}
    outcomes = {"refused": 0, "harmless": 0}
    for _ in range(300):
        name, tokens = draw.choice([("few", FEW), ("many", MANY)])
        plan = built.changed(name, lambda calls: _random_changes(calls, steps, draw))
        try:
            logits, _ = built.run(plan, tokens)
        except EngineError:
            outcomes["refused"] += 1
        else:
            outcomes["harmless"] += 1
            assert logits == expected[tokens], plan.variant(name)
    assert min(outcomes.values()) > 20, outcomes
