"""Whole engines on the emulated GPU: the tokens of `ref` on the same plan, for every family, alone and in batches."""

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.configs.sampling import SamplingParams
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import Engine, open_engine
from ingot.errors import EngineError, RequestError, TargetError
from ingot.plan import Plan
from ingot.plugins.cuda.gpu import Device, find_gpus
from ingot.plugins.cuda.session import CudaSession
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import LoadedEngine, load_engine
from ingot.step_io import LAST_DRAWN, SequenceRules, Session, StepBatch
from tests.families import covering_families
from tests.handmade import write_model
from tests.plugins.cpu.one_step import batch_of

TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "f16": 3e-3}  # of the range of the logits
PROMPTS = [[5, 9, 3, 7, 11], [1, 7], list(range(3, 40))]

Generate = Callable[..., dict[str, Any]]
_later = functools.partial(pytest.param, marks=pytest.mark.slow)


def _engine(
    folder: Path,
    family: str,
    dtype: DType | None = None,
    changes: Mapping[str, object] = MappingProxyType({}),
    **options: Any,
) -> Path:
    """Heads of 16 dims: each size is compiled. dtype: of the Checkpoint; changes: of config.json."""
    config = {**find_family(family).tiny, **changes}
    heads = config.get("num_attention_heads")
    config |= {"head_dim": 16} if "head_dim" in config else {"hidden_size": 16 * int(str(heads))} if heads else {}
    if not (folder / "c").is_dir():
        write_model(folder / "m", config)
        convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c", dtype=dtype))
    engine = folder / "-".join(["e", *map(str, options.values())])
    options = {"target": "cuda/sm90", "tokens_per_block": 16, "max_batch_size": 6, "max_num_tokens": 48, **options}
    build(BuildConfig(**options), folder / "c", engine)
    return engine


def _runner(engine: Path, make: Callable[[Engine], Session]) -> ModelRunner:
    opened = open_engine(engine)
    loaded = LoadedEngine(engine=opened, session=make(opened), limits=opened.plan.limits)
    return ModelRunner(loaded, RuntimeConfig(enable_prefix_cache=False))


def _ref(engine: Engine, num_blocks: int = 24) -> Session:
    return RefSession(engine.plan, engine.weights, SessionOptions(num_blocks=engine.plan.in_each(num_blocks)))


def _gpu(engine: Engine, num_blocks: int = 24) -> Session:
    return find_target("cuda/sm90").open_session(
        engine.plan, engine.weights, SessionOptions(num_blocks=engine.plan.in_each(num_blocks))
    )


def _generate(
    engine: Path, make: Callable[[Engine], Session], prompts: Sequence[list[int]], count: int
) -> dict[str, Any]:
    with _runner(engine, make) as runner:
        out = runner.generate(
            list(prompts),
            max_new_tokens=count,
            end_id=-1,
            return_dict=True,
            output_log_probs=True,
            output_context_logits=True,
        )
    return dict(out)


def _compare(engine: Path, precision: str, count: int = 12) -> None:
    """Every generated token is the likeliest, but for rounding, after those before it; so says `ref` of the texts."""
    found = _generate(engine, _gpu, PROMPTS, count)
    texts = [row[0][: len(prompt) + count].tolist() for row, prompt in zip(found["output_ids"], PROMPTS, strict=True)]
    expected = _generate(engine, _ref, [text[:-1] for text in texts], 1)["context_logits"]
    for prompt, text, logits, context in zip(PROMPTS, texts, expected, found["context_logits"], strict=True):
        tolerance = TOLERANCE[precision] * np.ptp(logits)
        assert np.abs(context - logits[: len(prompt)]).max() < tolerance
        chosen = logits[np.arange(len(prompt) - 1, len(text) - 1), text[len(prompt) :]]
        assert (chosen > logits[len(prompt) - 1 :].max(axis=-1) - 2 * tolerance).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", covering_families())
def test_every_family(gpu: ctypes.CDLL, family: str, tmp_path: Path) -> None:
    _compare(_engine(tmp_path, family, precision="f32"), "f32")


@pytest.mark.parametrize(("family", "precision"), [("qwen3", "w4g32"), _later("llama", "w8"), _later("gpt2", "w4g64")])
def test_engines_of_codes(gpu: ctypes.CDLL, family: str, precision: str, tmp_path: Path) -> None:
    """w4 has an lm_head of w8, both have tables of w8."""
    _compare(_engine(tmp_path, family, precision=precision), "bf16")


@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen3", "f16"), ("gpt2", "bf16"), *(_later("llama", precision) for precision in ("bf16", "f16"))],
)
def test_sixteen_bit_engines(gpu: ctypes.CDLL, family: str, precision: str, tmp_path: Path) -> None:
    _compare(_engine(tmp_path, family, precision=precision), precision)


EXPERTS = (
    *(("qwen2_moe", "bf16"), ("mixtral", "w8"), ("gpt_oss", "f32"), ("glm4_moe", "w4g32"), ("minimax_m2", "bf16")),
    *(("granitemoe", "f16"), ("hy_v3", "bf16"), ("olmoe", "bf16"), ("qwen3_moe", "w4g64"), ("ernie4_5_moe", "bf16")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [each if each in EXPERTS[:2] else _later(*each) for each in EXPERTS])
def test_mixtures_of_experts(gpu: ctypes.CDLL, family: str, precision: str, tmp_path: Path) -> None:
    """Routers stay floats in engines of codes: as they are stored, so that a Checkpoint must have them in bf16."""
    codes = precision.startswith("w")
    engine = _engine(tmp_path, family, DType.BF16 if codes else None, precision=precision)
    _compare(engine, "bf16" if codes else precision)
    plan = open_engine(engine).plan
    kernels = {step.op: step.kernel.split(".")[2] for step in plan.steps}
    assert kernels["moe_route"] == "sm80"
    assert kernels["moe_gate_up"] == kernels["moe_down"] == ("sm80" if precision == "f32" else "sm90a")


HYBRIDS = (("qwen3_next", "bf16"), ("lfm2", "f16"), ("granitemoehybrid", "w8"), ("nemotron_h", "bf16"))
LATENTS = (("deepseek_v3", "bf16"), ("gemma3n_text", "bf16"), ("kimi_linear", "f16"), ("minicpm3", "w8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision"), [HYBRIDS[0], LATENTS[0], *(_later(*each) for each in (*HYBRIDS[1:], *LATENTS[1:]))]
)
def test_states_and_latents(gpu: ctypes.CDLL, family: str, precision: str, tmp_path: Path) -> None:
    codes = precision.startswith("w")
    engine = _engine(tmp_path, family, DType.BF16 if codes else None, precision=precision)
    _compare(engine, "bf16" if codes else precision)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "gemma4_text"])
def test_a_prefix_that_was_computed_gives_the_same_tokens(
    gpu: ctypes.CDLL, tmp_path: Path, replayed: list[object], family: str
) -> None:
    """States go on from snapshots at the ends of blocks; decode steps with idle rows are replayed."""
    engine, prompts = _engine(tmp_path, family, precision="f32"), [list(range(3, 40)), list(range(3, 38)), [5, 6]]
    opened = open_engine(engine)
    loaded = LoadedEngine(engine=opened, session=_gpu(opened), limits=opened.plan.limits)
    with ModelRunner(loaded, RuntimeConfig()) as runner:
        rounds = [
            runner.generate(prompts, max_new_tokens=9, end_id=-1, return_dict=True, output_log_probs=True)
            for _ in range(2)
        ]
        stats = runner.executor.stats()
    np.testing.assert_array_equal(rounds[0]["output_ids"], rounds[1]["output_ids"])
    np.testing.assert_allclose(rounds[0]["log_probs"], rounds[1]["log_probs"], rtol=0, atol=1e-5)
    assert stats["prefix_hit_tokens"] >= 32
    assert len(replayed) >= 8


def test_routers_of_another_type_are_refused(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"one float type for all(.|\n)*f32, w8(.|\n)*--dtype bf16"):
        _engine(tmp_path, "mixtral", DType.F32, precision="w8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture
def engine(gpu: ctypes.CDLL, folder: Path) -> Path:
    """A bf16 llama; built once."""
    found = folder / "e-bf16"
    return found if found.is_dir() else _engine(folder, "llama", precision="bf16")


def test_decode_runs_as_graphs(engine: Path, replayed: list[object]) -> None:
    """The second step of a bucket is captured, the later ones are replayed; three sequences fill four places."""
    found = _generate(engine, _gpu, PROMPTS, 16)
    assert len(replayed) >= 12
    assert len(set(map(id, replayed))) < 4
    assert found["output_ids"].tolist() == _generate(engine, _ref, PROMPTS, 16)["output_ids"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
def test_crowded_and_preempted_requests(gpu: ctypes.CDLL, engine: Path, family: str, tmp_path: Path) -> None:
    """More requests than blocks: each gives what it gives alone under `ref`."""
    engine = engine if family == "llama" else _engine(tmp_path, family, precision="f32")
    prompts = [[int(i), 5, 3 + int(i)] * (1 + int(i)) for i in range(1, 9)]
    alone = [_generate(engine, _ref, [prompt], 8)["output_ids"][0][0].tolist() for prompt in prompts]

    with _runner(engine, functools.partial(_gpu, num_blocks=5)) as runner:
        together = runner.generate(prompts, max_new_tokens=8, end_id=-1)
    for prompt, row, expected in zip(prompts, together.tolist(), alone, strict=True):
        assert row[0][: len(prompt) + 8] == expected


@pytest.mark.slow
def test_sampled_tokens_are_those_of_the_specification(gpu: ctypes.CDLL, folder: Path) -> None:
    """So few blocks that requests are preempted: their tokens come to the GPU again."""
    engine = _engine(folder, "llama", precision="f32")
    rules = SamplingParams(
        temperature=1.2,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={5: 1.0, 9: -np.inf},
        min_tokens=4,
        max_tokens=40,
        seed=7,
    )
    prompts, outs, preemptions = [PROMPTS[0], PROMPTS[1], [8, 8, 2]], [], []
    for make, blocks in ((_gpu, 5), (_ref, 24)):
        with _runner(engine, functools.partial(make, num_blocks=blocks)) as runner:
            outs.append(runner.generate(prompts, sampling_config=rules, bad_words_list=[[[3], [4, 6]]] * 3, end_id=-1))
            preemptions.append(runner.executor.stats()["preemptions"])
    assert outs[0].tolist() == outs[1].tolist()
    assert preemptions[0] > preemptions[1] == 0


@pytest.mark.slow
def test_a_step_is_submitted_while_another_computes(gpu: ctypes.CDLL, folder: Path) -> None:
    """Requests end within the device's lead, come later, and take the slots of others; penalties follow every token."""
    engine = _engine(folder, "llama", precision="f32")
    prompts, stop_words = [[n, 7] for n in range(9)], [[[n + 20], [n]] for n in range(9)]
    outs, ahead = [], 0
    for make in (_gpu, _ref):
        with _runner(engine, make) as runner:
            session = runner.executor._loop._session
            if isinstance(session, CudaSession):
                submit = session.submit

                def counted(batch: StepBatch, session: CudaSession = session, submit: Any = submit) -> None:
                    nonlocal ahead
                    ahead += len(session._submitted)
                    submit(batch)

                session.submit = counted  # type: ignore[method-assign]
            plain = runner.generate(prompts, max_new_tokens=30, end_id=11, stop_words_list=stop_words)
            rules = SamplingParams(temperature=1.5, seed=3, max_tokens=30, frequency_penalty=0.7, logprobs=3)
            ruled = runner.generate(prompts, sampling_config=rules, end_id=11, return_dict=True)
            outs.append([plain.tolist(), ruled["output_ids"].tolist()])
    assert outs[0] == outs[1]
    assert ahead > 30


def test_a_fault_while_two_steps_are_under_way(
    gpu: ctypes.CDLL, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are forgotten; the requests of the first are tried alone, with the tokens and penalties that they had."""
    engine, calls, wait_for = _engine(folder, "llama", precision="f32"), 0, Device.wait_for
    rules = SamplingParams(temperature=1.5, seed=3, max_tokens=20, frequency_penalty=0.7)
    with _runner(engine, _ref) as runner:
        expected = runner.generate(PROMPTS, sampling_config=rules, end_id=-1)

    def failing(device: Device, event: object) -> None:
        nonlocal calls
        calls += 1
        if calls in (4, 11, 18):
            raise TargetError("the CUDA driver reports an error", got="for once")
        wait_for(device, event)

    with _runner(engine, _gpu) as runner:
        monkeypatch.setattr(Device, "wait_for", failing)
        found = runner.generate(PROMPTS, sampling_config=rules, end_id=-1)
    assert found.tolist() == expected.tolist()
    assert ["failed, it is repeated" in record.message for record in caplog.records] == [True] * 3


def test_a_session_says_what_it_cannot_begin(gpu: ctypes.CDLL, engine: Path) -> None:
    opened = open_engine(engine)
    session = _gpu(opened)
    assert isinstance(session, CudaSession)

    def begin(rules: SequenceRules) -> None:
        session.start(0, rules, np.array([1, 2], np.int32), 2)
        session.submit(batch_of([(0, 2)], [[0]], [1], draws=[0], ids=np.array([1, 2], np.int32)))

    def next_step(past: int) -> StepBatch:
        return batch_of([(past, 1)], [[0]], [0], draws=[0], ids=np.array([LAST_DRAWN], np.int32))

    with pytest.raises(RequestError, match="no step was submitted"):
        session.wait()
    for rules in (SequenceRules(bad_words=((3, 4),)), SequenceRules(max_tokens=1)):
        begin(rules)
        with pytest.raises(RequestError, match="depends on a token that is not known yet"):
            session.submit(next_step(2))
        session.wait()
    begin(SequenceRules())
    session.submit(next_step(2))
    with pytest.raises(RequestError, match="two steps are running already"):
        session.submit(next_step(3))
    for call in (lambda: session.run(next_step(3)), lambda: begin(SequenceRules())):
        with pytest.raises(RequestError, match="steps that were submitted have not ended"):
            call()
    session.drop()
    begin(SequenceRules())
    session.wait()
    with pytest.raises(RequestError, match="token -2"):
        session.submit(batch_of([(2, 1)], [[0]], [0], draws=[0], ids=np.array([-2], np.int32)))
    session.close()


def test_every_step_is_tapped(gpu: ctypes.CDLL, engine: Path) -> None:
    """What lies in 16 bits comes back as float32; shapes are those of the plan."""
    opened = open_engine(engine)
    session = _gpu(opened)
    assert isinstance(session, CudaSession)
    batch = batch_of([(0, 5)], [[2]], [4], ids=np.arange(5, dtype=np.int32), want_logits=True)
    result, outputs = session.run_tapped(batch, [step.name for step in opened.plan.steps])
    assert list(outputs) == [step.name for step in opened.plan.steps]
    cols = {buffer.name: buffer.cols for buffer in opened.plan.buffers}
    for tapped in outputs.values():
        for name, values in tapped.items():
            assert values.dtype == np.float32
            assert values.shape[1] == cols[name]
            assert np.isfinite(values).all()
    assert result.logits is not None
    np.testing.assert_array_equal(outputs[opened.plan.steps[-1].name][opened.plan.logits], result.logits)
    session.close()


def _types(plan: Plan) -> dict[str, str]:
    """Step → types of what it writes."""
    types = {buffer.name: buffer.dtype.value for buffer in plan.buffers}
    return {step.name: " ".join(types[name] for name in step.outputs if name) for step in plan.steps}


def test_the_plan_says_what_lies_in_16_bits(engine: Path) -> None:
    """What products alone read, and nothing else; the arena is smaller for it."""
    plan = open_engine(engine).plan
    types = _types(plan)
    assert types["layers.0/attention_norm"] == types["layers.0/attention"] == types["layers.0/gate_up"] == "bf16"
    assert types["layers.1/mlp_norm"] == "bf16 f32", "the sum is the residual stream"
    assert types["layers.0/qkv"] == types["layers.0/attention_out"] == types["lm_head"] == "f32"


@pytest.mark.parametrize(
    ("step", "place", "dtype", "words"),
    [
        ("layers.0/attention", 0, DType.F16, "expected: f32 or bf16"),
        ("layers.0/qkv", 0, DType.BF16, "expected: f32"),
        ("embed", 0, DType.BF16, "expected: f32"),
        ("layers.0/attention", 0, DType.F32, "expected: bf16\n"),
        ("layers.1/attention_out.cast", 0, DType.F32, "expected: bf16\n"),
    ],
)
def test_types_that_kernels_do_not_store_are_refused(
    step: str, place: int, dtype: DType, words: str, gpu: ctypes.CDLL, engine: Path
) -> None:
    opened = open_engine(engine)
    name = next(each.outputs[place] for each in opened.plan.steps if each.name == step)
    buffers = tuple(
        dataclasses.replace(each, dtype=dtype if each.name == name else each.dtype) for each in opened.plan.buffers
    )
    changed = dataclasses.replace(opened.plan, buffers=buffers)
    with pytest.raises(EngineError, match=rf"has a type that cuda targets do not store(.|\n)*{words}"):
        find_target("cuda/sm90").open_session(changed, opened.weights, SessionOptions(num_blocks=(4,)))


def test_the_runtime_sizes_the_cache_by_the_gpus_memory(gpu: ctypes.CDLL, engine: Path) -> None:
    loaded = load_engine(engine, RuntimeConfig())
    per_sequence = -(-(loaded.limits.max_seq_len - 1) // 16)
    assert loaded.session.num_blocks == (loaded.limits.max_batch_size * per_sequence,)
    memory = find_target("cuda/sm90").kv_memory(loaded.engine.plan)
    assert memory is not None
    assert 3 << 30 < memory < find_gpus().gpus[0].memory_bytes  # the emulated GPU has 4 GiB
    loaded.session.close()
