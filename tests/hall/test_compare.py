"""Sound engines agree with their source; an error planted in an engine is named at its step."""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.builder.source import open_source
from ingot.compare.compare import CompareOptions, compare
from ingot.compare.ranks import Rank
from ingot.compare.report import Comparison
from ingot.compare.run import Run
from ingot.compare.tokens import read_tokens
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import open_engine
from ingot.errors import EngineError, UsageError
from ingot.fixed_tables import blocks_needed
from ingot.plan import Plan, Weight
from ingot.plugins.op import Array
from ingot.plugins.ref.session import RefSession
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.plugins.weight_rows import WeightRows
from ingot.quickstart import SHIPPED
from ingot.weight_formats import PANEL
from tests.families import covering_families
from tests.hall.planted import Bytes, Edit, floats, panel, replant, swap_panels, with_attr
from tests.hall.wrong_kernel import WrongKernel, spoil_one
from tests.handmade import random_tensors, write_model
from tests.spanning import spanning, values

LLAMA = {**find_family("llama").tiny, "num_key_value_heads": 2, "head_dim": 16}
OPTIONS = CompareOptions(tokens=40, threads=1)
DELTA_RULE = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")  # a state carries on what a rounding changed
KL = {"f3": 1e-9, "bf": 3e-4, "w8": 2e-3, "w4": 0.2}  # mean, by the beginning of the precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A model directory, its Checkpoint, and engines of it, named by target, precision and cache: cpu-bf16-int8."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def engine(self, kind: str) -> Path:
        engine = self.folder / kind
        if not engine.exists():
            target, precision, kv = (*kind.split("-"), "auto")[:3]
            config = BuildConfig(
                target=target, precision=precision, kv_cache_dtype=kv, tokens_per_block=16, max_num_tokens=24
            )
            build(dataclasses.replace(config, compress_weights=False), self.checkpoint, engine)  # errors go into floats
        return engine


def built(folder: Path, config: Mapping[str, object], seed: int = 0) -> Built:
    model = write_model(folder / "model", config, tensors=random_tensors(config, seed=seed))
    convert(ConvertOptions(model_dir=model, output_dir=folder / "checkpoint"))
    return Built(folder=folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((name, "cpu-bf16") for name in covering_families()),
        *((name, "ref-f32") for name in ("llama", "mixtral", "gpt2", "gemma2", "cohere", "lfm2")),
        *itertools.product(DELTA_RULE, ("ref-f32", "cpu-f32")),
        *(("llama", kind) for kind in ("cpu-f32", "ref-bf16", "ref-f32-int8", "cpu-bf16-int8")),
        *(("llama", kind) for kind in ("ref-w8", "ref-w4g32", "ref-w4g128", "cpu-w8", "cpu-w4g64", "cpu-w4g32-int8")),
        *(("gemma2", "cpu-w8"), ("starcoder2", "cpu-w4g32"), ("qwen3", "cpu-w4g128-int8"), ("gpt2", "ref-w4g64")),
        *(("mixtral", kind) for kind in ("ref-w4g64", "cpu-w8")),
        *(("qwen3_moe", kind) for kind in ("ref-w8", "cpu-w4g32-int8")),
    ],
)
def test_a_sound_engine(family: str, kind: str, tmp_path: Path) -> None:
    model = built(tmp_path, find_family(family).tiny)
    comparison = compare(model.engine(kind), model.checkpoint, OPTIONS)
    comparison.raise_if_wrong()
    assert comparison.logits.positions == 40
    bound = KL["w8" if kind.endswith("f32-int8") else kind.split("-")[1][:2]]
    if family in DELTA_RULE and kind == "cpu-bf16":
        reference = compare(model.engine("ref-bf16"), model.checkpoint, OPTIONS)
        bound = 2.5 * (reference.logits.kl_mean or 0)
    assert (comparison.logits.kl_mean or 0) < bound
    assert comparison.logits.perplexity is None, "random tokens are no text"
    assert {step.name for step in comparison.steps if step.model_error is not None} >= {"embed", "lm_head"}


@pytest.mark.slow
def test_the_shipped_model_and_its_text(tmp_path: Path) -> None:
    """Against the Hugging Face directory, in as many whole sequences as the tokens fill."""
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=tmp_path / "checkpoint"))
    build(BuildConfig(max_seq_len=33), tmp_path / "checkpoint", tmp_path / "engine")
    comparison = compare(tmp_path / "engine", SHIPPED, CompareOptions(tokens=80))
    comparison.raise_if_wrong()
    figures = comparison.logits
    assert figures.positions == 64
    assert 0 < (figures.kl_mean or 0) < KL["bf"]
    assert (figures.top1_agreement or 0) > 0.97
    assert figures.perplexity == pytest.approx(figures.source_perplexity or 0, rel=2e-3)


def one_weight(plan: Plan, section: Bytes) -> None:
    """The smallest step that bf16 knows, in one of 40,000 values."""
    panel(plan, section, "layers.1/attention_out.weight", 20).view(np.uint16)[77] ^= 1


def swapped_query_heads(plan: Plan, section: Bytes) -> None:
    swap_panels(plan, section, "layers.0/qkv.weight", 0, 16)


def swapped_kv_heads(plan: Plan, section: Bytes) -> None:
    swap_panels(plan, section, "layers.1/qkv.weight", 64, 80)


def norm_weight(plan: Plan, section: Bytes) -> None:
    floats(plan, section, "layers.1/mlp_norm.weight")[5] *= 1.001


def rope_table(plan: Plan, section: Bytes) -> None:
    floats(plan, section, "rope_table.inv_freq")[:] *= 0.5


def transposed_gate(plan: Plan, section: Bytes) -> None:
    """Gate and up exchanged in the first pair of panels."""
    one, other = (next(w for w in plan.weights if w.name == "layers.0/gate_up.weight").pieces[0].offset, 0)
    size = 48 // 32 * 32 + 32
    pair = section[one + other : one + 2 * size * 32].reshape(2, -1)
    pair[:] = pair[::-1].copy()


def token(plan: Plan, section: Bytes) -> None:
    """A token that is not in the text: its row is compared all the same."""
    weight = next(weight for weight in plan.weights if weight.name == "embed.table")
    section[weight.pieces[0].offset :][: weight.nbytes].view(np.uint16).reshape(weight.shape)[7] = 0


def nan(plan: Plan, section: Bytes) -> None:
    panel(plan, section, "lm_head.weight", 0).view(np.uint16)[0] = 0x7FC0


PLANTED: list[tuple[Edit, str, str]] = [
    (one_weight, "layers.1/attention_out", r"column \d+ \(head \d\)"),
    (swapped_query_heads, "layers.0/qkv", r"\(query head [01]\)"),
    (swapped_kv_heads, "layers.1/qkv", r"\(key head [01]\)"),
    (norm_weight, "layers.1/mlp_norm", "element 5"),
    (rope_table, "rope_table", r"rope_table.inv_freq"),
    (transposed_gate, "layers.0/gate_up", "(gate|up) row"),
    (token, "embed", "token 7"),
    (nan, "lm_head", "lm_head.weight, token"),
]


@pytest.mark.daily(3)
@pytest.mark.parametrize(("planted", "target"), spanning(itertools.product(PLANTED, ("cpu", "ref")), *values(2)))
def test_an_error_in_the_packed_bytes_is_named(
    planted: tuple[Edit, str, str], target: str, llama: Built, tmp_path: Path
) -> None:
    edit, step, where = planted
    engine = replant(llama.engine(f"{target}-bf16"), tmp_path / "engine", edit)
    with pytest.raises(EngineError, match=rf"first kernel call beyond its tolerance is {step}\n(.|\n)*{where}"):
        compare(engine, llama.checkpoint, OPTIONS).raise_if_wrong()


def scale(plan: Plan, section: Bytes) -> None:
    """One of 128, by one part in eight."""
    panel(plan, section, "layers.0/qkv.weight", 21)[:64].view(np.float32)[21 % 16] *= 1.125


def tiny_scale(plan: Plan, section: Bytes) -> None:
    panel(plan, section, "layers.1/down.weight", 3)[:64].view(np.float32)[3] *= 0.01


def code(plan: Plan, section: Bytes) -> None:
    """The integer of row 18, column 5, by one."""
    panel(plan, section, "layers.1/attention_out.weight", 18)[128:].reshape(-1, 16, 4)[5 // 4, 18 % 16, 5 % 4] += 1


def multiplier(plan: Plan, section: Bytes) -> None:
    values = panel(plan, section, "layers.1/attention_out.weight", 18)[128 : 128 + 32].view(np.int8).reshape(2, 16)
    values[1, 2] += np.int8(1 if values[1, 2] < 8 else -1)


def table_scale(plan: Plan, section: Bytes) -> None:
    weight = next(weight for weight in plan.weights if weight.name == "embed.table")
    rows = section[weight.pieces[0].offset :][: weight.nbytes].reshape(weight.shape[0], -1)
    rows[7, :4].view(np.float32)[0] *= 1.02


QUANTISED: list[tuple[str, Edit, str, str]] = [
    ("w8", scale, "layers.0/qkv", r"row 21 \(query head 1\)"),
    ("w8", tiny_scale, "layers.1/down", "row 3,"),
    ("w8", code, "layers.1/attention_out", r"row 18, column 5 "),
    ("w8", table_scale, "embed", "token 7,"),
    ("w8", swapped_kv_heads, "layers.1/qkv", r"\(key head [01]\)"),
    ("w4g32", scale, "layers.0/qkv", r"row 21 \(query head 1\)"),
    ("w4g32", multiplier, "layers.1/attention_out", r"row 18, column (3[2-9]|4\d|5\d|6[0-3]) "),
    ("w4g32", swapped_query_heads, "layers.0/qkv", r"\(query head [01]\)"),
    ("w4g128", tiny_scale, "layers.1/down", "row 3,"),
]


@pytest.mark.daily(2)
@pytest.mark.parametrize(("planted", "target"), spanning(itertools.product(QUANTISED, ("ref", "cpu")), *values(2)))
def test_an_error_in_quantised_bytes_is_named(
    planted: tuple[str, Edit, str, str], target: str, llama: Built, tmp_path: Path
) -> None:
    precision, edit, step, where = planted
    engine = replant(llama.engine(f"{target}-{precision}"), tmp_path / "engine", edit)
    with pytest.raises(EngineError, match=rf"first kernel call beyond its tolerance is {step}\n(.|\n)*{where}"):
        compare(engine, llama.checkpoint, OPTIONS).raise_if_wrong()


def expert_scale(plan: Plan, section: Bytes) -> None:
    panel(plan, section, "layers.1/moe_down.weight", 18, expert=2)[:64].view(np.float32)[18 % 16] *= 1.125


@pytest.mark.parametrize("kind", ["cpu-w8", pytest.param("ref-w4g32", marks=pytest.mark.slow)])
def test_an_error_in_one_expert_is_named(kind: str, tmp_path: Path) -> None:
    model = built(tmp_path, find_family("mixtral").tiny)
    engine = replant(model.engine(kind), tmp_path / "engine", expert_scale)
    with pytest.raises(EngineError, match=r"beyond its tolerance is layers.1/moe_down\n(.|\n)*expert 2, row 18,"):
        compare(engine, model.checkpoint, OPTIONS).raise_if_wrong()


@pytest.mark.parametrize(
    ("step", "attrs", "field"),
    [
        ("layers.1/mlp_norm", {"eps": 1e-3}, "eps 9.99[0-9]+e-07(.|\n)*eps 0.001"),
        ("layers.0/attention", {"scale": 0.26}, "scale 0.25(.|\n)*scale 0.26"),
        ("layers.1/gate_up", {"activation": "gelu"}, "activation silu(.|\n)*activation gelu"),
        ("layers.1/rope_kv_write", {"interleaved": 1}, "interleaved 0(.|\n)*interleaved 1"),
    ],
)
def test_an_error_in_the_plan_is_named(
    step: str, attrs: dict[str, float | str], field: str, llama: Built, tmp_path: Path
) -> None:
    engine = replant(llama.engine("cpu-f32"), tmp_path / "engine", lambda plan, section: with_attr(plan, step, **attrs))
    with pytest.raises(EngineError, match=rf"not built from this source(.|\n)*kernel call {step}: attrs(.|\n)*{field}"):
        compare(engine, llama.checkpoint, OPTIONS)


def run_on(session: RefSession, engine: Path, checkpoint: Path) -> Comparison:
    """As `compare`, with this session."""
    with open_engine(engine) as opened:
        plan = opened.plan
        tokens = read_tokens(engine, plan.vocab_size, 40, None, 40)
        count, length = tokens.sequences.shape
        assert min(session.num_blocks) >= max(blocks_needed(plan, sequences=count, length=length))
        with open_source(checkpoint, plan, find_target("ref")) as source:
            ranks = [Rank(opened, 0, source)]
            run = Run(ranks=ranks, session=session, tokens=tokens, progress=lambda *_: None, threads=2)
            run.compare_group(tokens.sequences)
            return run.result(engine, checkpoint)


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    "step", ["embed", "layers.0/qkv", "layers.0/rope_kv_write", "layers.1/attention", "layers.1/down", "final_norm"]
)
def test_a_kernel_that_is_wrong_in_one_value_is_named(step: str, llama: Built) -> None:
    engine = llama.engine("ref-f32")
    with open_engine(engine) as opened:
        session = WrongKernel(opened.plan, opened.weights, SessionOptions(num_blocks=opened.plan.in_each(8)))
        session.wrong, session.spoil = step, spoil_one
        comparison = run_on(session, engine, llama.checkpoint)
    assert comparison.findings[0].step == step
    assert "output of kernel" in comparison.findings[0].what
    assert re.search(r"token (23|38|39), column 3", comparison.findings[0].what), "the last of each chunk"


@pytest.mark.slow
def test_experts_are_read_in_blocks_and_their_kernels_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read takes a whole expert, let alone all of them."""
    model = built(tmp_path, find_family("mixtral").tiny)
    engine = model.engine("ref-w8")
    read: list[int] = []

    def count(section: Bytes, weight: Weight) -> Array | WeightRows:
        read.append(weight.shape[0] if len(weight.shape) > 1 else 0)
        return read_weight(section, weight)

    monkeypatch.setattr("ingot.compare.packed.read_weight", count)
    monkeypatch.setattr("ingot.compare.packed.BLOCK_BYTES", 1)
    with open_engine(engine) as opened:
        session = WrongKernel(opened.plan, opened.weights, SessionOptions(num_blocks=opened.plan.in_each(8)))
        for step in ("nothing", "layers.0/moe_gate_up", "layers.1/moe_down"):
            session.wrong, session.spoil = step, spoil_one
            findings = run_on(session, engine, model.checkpoint).findings
            assert [finding.step for finding in findings[:1]] == [step][step == "nothing" :]
    assert max(read) <= 2 * PANEL


def test_keys_that_are_written_wrong_are_named_where_they_are_written(llama: Built) -> None:
    class WrongCache(RefSession):
        def read_kv(self, layer: int, block: int) -> tuple[Array, Array]:
            keys, values = super().read_kv(layer, block)
            return np.roll(keys, layer, axis=0), values  # heads exchanged from the second layer on

    engine = llama.engine("ref-bf16")
    with open_engine(engine) as opened:
        session = WrongCache(opened.plan, opened.weights, SessionOptions(num_blocks=opened.plan.in_each(8)))
        first = run_on(session, engine, llama.checkpoint).findings[0]
    assert first.step == "layers.1/rope_kv_write"
    assert first.what.startswith("keys of kernel")


def test_what_is_right_by_itself_but_not_in_the_model_is_named(llama: Built) -> None:
    """As if a pass had taken one tensor of the graph for another."""
    engine = llama.engine("ref-f32")
    with open_engine(engine) as opened:
        plan = opened.plan
        tokens = read_tokens(engine, plan.vocab_size, 40, None, 40)
        session = RefSession(plan, opened.weights, SessionOptions(num_blocks=(8,)))
        with open_source(llama.checkpoint, plan, find_target("ref")) as source:
            names = dict(source.tensors)
            names["layers.0/attention_out"], names["layers.0/down"] = (
                names["layers.0/down"],
                names["layers.0/attention_out"],
            )
            source = dataclasses.replace(source, tensors=names)
            ranks = [Rank(opened, 0, source)]
            run = Run(ranks=ranks, session=session, tokens=tokens, progress=lambda *_: None, threads=2)
            run.compare_group(tokens.sequences)
            first = run.result(engine, llama.checkpoint).findings[0]
    assert (first.step, first.what.split()[0]) == ("layers.0/attention_out", "output")
    assert "the source's graph" in first.what


def test_another_model_of_the_same_shape(llama: Built, tmp_path: Path) -> None:
    other = built(tmp_path, LLAMA, seed=1)
    comparison = compare(llama.engine("cpu-bf16"), other.checkpoint, OPTIONS)
    with pytest.raises(
        EngineError, match=r"is embed\n(.|\n)*later kernel calls(.|\n)*model.safetensors differ in SHA-256"
    ):
        comparison.raise_if_wrong()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 67}, r"vocab_size(.|\n)*expected: 67(.|\n)*got: 61"),
        ({"num_hidden_layers": 3}, r"num_layers(.|\n)*expected: 3(.|\n)*got: 2"),
        ({"intermediate_size": 100}, r"kernel call layers.0/gate_up: inputs(.|\n)*\(200, 48\)(.|\n)*\(168, 48\)"),
        ({"rms_norm_eps": 1e-4}, r"kernel call layers.0/attention_norm: attrs(.|\n)*eps 9.99\d+e-05|eps 0.0001"),
        ({"model_type": "mistral", "sliding_window": 16}, r"kernel call layers.0/attention: attrs(.|\n)*window 16"),
    ],
)
def test_a_model_of_another_shape(change: dict[str, object], words: str, llama: Built, tmp_path: Path) -> None:
    other = built(tmp_path, {**LLAMA, **change})
    with pytest.raises(EngineError, match=rf"not built from this source(.|\n)*({words})"):
        compare(llama.engine("cpu-bf16"), other.checkpoint, OPTIONS)


def test_what_is_no_source(llama: Built, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", llama.engine("cpu-f32") / "config.json"):
        with pytest.raises(UsageError, match="neither a Checkpoint nor a Hugging Face directory"):
            compare(llama.engine("cpu-f32"), path, OPTIONS)


@pytest.mark.slow
def test_pieces_and_groups_change_nothing(llama: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one output, one panel and one sequence of 8 tokens at a time."""
    engine = llama.engine("cpu-bf16")
    options = CompareOptions(tokens=24)
    monkeypatch.setattr("ingot.compare.compare.GROUP_BYTES", 8 * 8 * 61)
    whole = compare(engine, llama.checkpoint, options)
    monkeypatch.setattr("ingot.compare.taps.TAP_BYTES", 1)
    monkeypatch.setattr("ingot.compare.packed.BLOCK_BYTES", 1)
    pieces = compare(engine, llama.checkpoint, options)
    pieces.raise_if_wrong()
    assert pieces.logits == whole.logits
    assert pieces.logits.positions == 24
    assert [step.kernel_error for step in pieces.steps] == [step.kernel_error for step in whole.steps]


def test_an_engine_that_takes_a_single_token(llama: Built, tmp_path: Path) -> None:
    """Sequences of one token: no chunk before the last one, nothing to foretell."""
    build(BuildConfig(precision="f32", max_seq_len=2, max_num_tokens=1), llama.checkpoint, tmp_path / "engine")
    comparison = compare(tmp_path / "engine", llama.checkpoint, CompareOptions(tokens=5))
    comparison.raise_if_wrong()
    assert comparison.logits.positions == 5
