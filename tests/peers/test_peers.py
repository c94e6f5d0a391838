"""The comparison of peers without a peer: checkpoint, steps, ingot's adapter, limits, ratios, table, picture."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from ingot.bench.bytes_read import decode_bytes
from ingot.configs.runtime import isa_includes
from ingot.engine import read_plan
from ingot.plugins.registry import find_op
from tests.convert.gguf.test_blocks import write_llama
from tests.gguf_files import byte_tokens
from tests.house.project import ROOT
from tests.peers.__main__ import parse
from tests.peers.adapters import ik_llama_cpp as ik_adapter
from tests.peers.adapters import ingot as ingot_adapter
from tests.peers.adapters import llama_cpp as llama_adapter
from tests.peers.adapters.llama_cpp import cmake_switches
from tests.peers.adapters.protocol import Job, Prompts, time_regimes
from tests.peers.limits import Limits, limit, take_limits
from tests.peers.models import SHAPES, tensors, to_bf16, write_model
from tests.peers.peers import CLASSES, GGUF, ISAS, PEERS, SCREENED, cap, variants
from tests.peers.picture import draw
from tests.peers.regimes import DEFAULT, parse_regimes
from tests.peers.report import Heading, against_best, markdown, median_fraction
from tests.peers.rounds import Outcome, Turn
from tests.peers.steps import Step, Workshop, last_words, steps_of

TINY = {
    **SHAPES["tinyllama"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MACHINE = Limits(bandwidth=20e9, buffer_bytes=1000, peaks={"int8.avx2": 200e9})


def job(work: Path, **changes: Any) -> Job:
    plain = Job(work=work, model="tiny", peer="ingot", weights="w8", isa="avx2", threads=1, regimes="decode:2")
    return dataclasses.replace(plain, **changes)


def outcome(engine: str, *speeds: float, weights: str = "w", reason: str | None = None) -> Outcome:
    turns = [Turn(speeds={"decode:1": speed}, limits={"decode:1": 100.0}, machine=MACHINE) for speed in speeds]
    return Outcome(engine=engine, precision="w8", weights=weights, version="1.0", turns=turns, reason=reason)


HEADING = Heading(
    model="tinyllama",
    date="2026-01-02 03:04",
    machine="a machine",
    isa="avx2",
    threads=2,
    rounds=3,
    regimes=["decode:1"],
)


def test_regimes_are_read_or_refused_in_words() -> None:
    regimes = parse_regimes(DEFAULT)
    assert [(each.sequences, each.prompt) for each in regimes] == [
        (1, 64),
        (8, 64),
        (32, 64),
        (1, 512),
        (1, 4096),
        (1, 4096 - 64),
    ]
    assert [each.timed_tokens for each in regimes] == [64, 8 * 32, 32 * 16, 512, 4096, 64]
    assert [each.long for each in regimes] == [False] * 4 + [True] * 2
    assert ",".join(each.name for each in regimes) == DEFAULT
    assert parse_regimes("none") == ()
    for wrong in ("decode", "decode:0", "prefil:5", "decode:1,,prefill:3", "decode:x", "prefill:5@4", "decode:1@"):
        with pytest.raises(ValueError, match="is no regime: expected decode:SEQUENCES"):
            parse_regimes(wrong)
    with pytest.raises(ValueError, match="decodes 64 tokens, which are more context than that"):
        parse_regimes("decode:1@64")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm-135m", 134_515_008),
        ("tinyllama", 1_100_048_384),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen2.5-0.5b", 494_032_768),
    ],
)
def test_shapes_have_as_many_parameters_as_the_real_models(name: str, parameters: int) -> None:
    assert sum(int(np.prod(size)) for _, size in tensors(SHAPES[name])) == parameters


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5], np.float32)
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020]


@pytest.mark.parametrize("name", list(SHAPES))
def test_transformers_finds_no_token_beyond_the_vocabulary(name: str, tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 28, "intermediate_size": 32, "vocab_size": 400}
    write_model({**SHAPES[name], **small, "num_attention_heads": 14, "head_dim": 2}, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert max(tokenizer.get_vocab().values()) < 400
    assert tokenizer.encode("th", add_special_tokens=False) == [300]


@pytest.mark.slow
@pytest.mark.native
def test_ingot_runs_the_checkpoint_and_stays_below_its_limit(tmp_path: Path) -> None:
    task = job(tmp_path, regimes="decode:2,prefill:40")
    write_model(TINY, task.checkpoint)
    ingot_adapter.prepare(task)
    _, speeds = ingot_adapter.measure(task)
    assert set(speeds) == {"decode:2", "prefill:40"}
    assert min(speeds.values()) > 0
    plan = read_plan(ingot_adapter.engine_dir(task))
    machine = take_limits(plan, threads=1)
    one, eight = (limit(plan, regime, machine) for regime in parse_regimes("decode:1,decode:8"))
    assert one < eight < 8.1 * one
    near, far = (limit(plan, regime, machine) for regime in parse_regimes("decode:1@100,decode:1@250"))
    assert far < one < near  # 218, 96 and 68 tokens of context
    bound = dataclasses.replace(machine, peaks={name: 1e30 for name in machine.peaks})
    context = parse_regimes("decode:1@250")[0].prompt + 32
    nbytes = decode_bytes(plan, batch_size=1, context=context)
    assert limit(plan, parse_regimes("decode:1@250")[0], bound) == pytest.approx(machine.bandwidth / nbytes)
    halved = dataclasses.replace(machine, bandwidth=machine.bandwidth / 2)
    assert limit(plan, parse_regimes("decode:1")[0], halved) <= one


def test_time_regimes_counts_decoded_tokens_and_prompts() -> None:
    asked: list[tuple[int, int, int]] = []

    def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
        asked.append((len(prompts), len(prompts[0]), tokens))
        return 4.0, 2.0

    speeds = time_regimes(generate, parse_regimes("decode:8,prefill:100"))
    assert speeds == {"decode:8": 8 * 32 / 2.0, "prefill:100": 100 / 4.0}
    assert asked == [(8, 8, 3), (8, 64, 33), (1, 100, 1), (1, 100, 1)]
    asked.clear()
    time_regimes(generate, parse_regimes("decode:8@600,prefill:3000"))
    assert asked == [(8, 8, 3), (8, 600 - 32, 33), (1, 512, 1), (1, 3000, 1)]


def test_ratio_is_the_median_of_the_rounds_against_the_fastest_peer() -> None:
    outcomes = [outcome("ingot", 30, 44, 30), outcome("slow", 10, 10, 10), outcome("fast", 20, 22, 10)]
    found = against_best(outcomes, "w8", "decode:1")
    assert found is not None
    assert (found.peer, found.median, found.rounds) == ("fast w", 2.0, [1.5, 2.0, 3.0])
    assert median_fraction(outcomes[0], "decode:1") == 0.3
    assert against_best(outcomes[:1], "w8", "decode:1") is None


def test_table_shows_everyone_with_the_reason_of_those_that_did_not_run() -> None:
    text = markdown(HEADING, [outcome("ingot", 50, 40, 60), outcome("a", 20, 20, 20), outcome("b", reason="no wheel")])
    lines = text.splitlines()
    for line in (
        "| engine | weights | decode 1 |",
        "| ingot | w | 50.0 (50%) |",
        "| b | w | – |",
        "| *limit* | w8 | *100* |",
        "| w8 | 2.50 (2.00 to 3.00; a w) |",
        "- limits of w8: memory read 20.0 GB/s over 1,000 bytes; int8.avx2 200 Gop/s",
        "- not run: b w: no wheel",
    ):
        assert line in lines, text


def test_picture_is_a_png(tmp_path: Path) -> None:
    draw(HEADING, [outcome("ingot", 50), outcome("a", 20), outcome("b", reason="no wheel")], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_steps_are_done_once_and_failures_have_words(tmp_path: Path) -> None:
    said: list[str] = []
    count = [sys.executable, "-c", f"open({str(tmp_path / 'count')!r}, 'a').write('x')"]
    good = Step(what="count", command=count, environment={})
    bad = Step(what="break", command=[sys.executable, "-c", "raise SystemExit('no such thing')"], environment={})
    shop = Workshop(tmp_path, said.append)
    assert shop.do([good]) is None
    assert Workshop(tmp_path, said.append).do([good, bad, good]) == "break failed: no such thing"
    assert shop.do([bad]) == "break failed: no such thing"
    assert (tmp_path / "count").read_text() == "x"
    assert Workshop(tmp_path, said.append).do([dataclasses.replace(good, command=[*count, "changed"])]) is None
    assert (tmp_path / "count").read_text() == "xx"
    assert last_words(" \n") == "it said nothing"


def test_every_peer_has_an_adapter_and_its_steps_hide_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    for variant in variants(PEERS, (*CLASSES, *GGUF)):
        assert (ROOT / f"tests/peers/adapters/{variant.peer.adapter}.py").exists()
        last = steps_of(variant, job(tmp_path, peer=variant.peer.name, weights=variant.weights), {})[-1]
        assert ("somewhere" in last.environment["PYTHONPATH"]) == (variant.peer.name == "ingot")


def test_long_prompts_and_a_server_are_steps_where_they_are_wanted(tmp_path: Path) -> None:
    def whats(name: str, regimes: str, *, mixed: bool) -> list[str]:
        variant = next(each for each in variants(PEERS, ["w8"]) if each.peer.name == name)
        task = job(tmp_path, peer=name, weights=variant.weights, regimes=regimes)
        return [step.what for step in steps_of(variant, task, {}, mixed=mixed)]

    plain = whats("ingot", "prefill:2048", mixed=True)
    assert whats("ingot", "prefill:2049", mixed=True) == [*plain, "tiny for ingot w8 on avx2, long prompts"]
    assert whats("llama.cpp", "prefill:4096", mixed=False) == whats("llama.cpp", "prefill:512", mixed=False)
    served = whats("llama.cpp", "decode:1", mixed=True)
    assert set(served) - set(whats("llama.cpp", "decode:1", mixed=False)) == {"server of llama.cpp for avx2"}
    assert served.index("server of llama.cpp for avx2") == served.index("build of llama.cpp for avx2") + 1


def test_a_screened_lm_head_is_compared_with_what_w4g128_is() -> None:
    plain, screened = (
        [(each.peer.name, each.weights) for each in variants(PEERS, [name])] for name in ("w4g128", SCREENED)
    )
    assert screened == [("ingot", SCREENED), *plain[1:]]


@pytest.mark.slow
@pytest.mark.native
def test_ingot_screens_its_lm_head_where_that_is_asked_for(tmp_path: Path) -> None:
    task = job(tmp_path, weights=SCREENED, regimes="decode:1,decode:8")
    write_model({**TINY, "hidden_size": 128}, task.checkpoint)
    ingot_adapter.prepare(task)
    plan = read_plan(ingot_adapter.engine_dir(task))
    assert list(ingot_adapter.measure(task)[1]) == ["decode:1", "decode:8"]
    one, eight = parse_regimes("decode:1,decode:8")
    full = find_op(plan.steps[-1].op).plain(plan.steps[-1])
    plain = dataclasses.replace(plan, steps=(*plan.steps[:-1], full))
    machine = dataclasses.replace(MACHINE, peaks={"int8.avx2": 200e9, "f32.avx2": 100e9})
    assert limit(plan, one, machine) > limit(plain, one, machine)
    assert limit(plan, eight, machine) == limit(plain, eight, machine)


@pytest.mark.slow
@pytest.mark.native
def test_ingot_takes_long_prompts_on_an_engine_of_its_own(tmp_path: Path) -> None:
    task = job(tmp_path, regimes="decode:1,prefill:2100")
    write_model({**TINY, "max_position_embeddings": 2200}, task.checkpoint)
    ingot_adapter.prepare(task)
    ingot_adapter.lengthen(task)
    _, speeds = ingot_adapter.measure(task)
    assert list(speeds) == ["decode:1", "prefill:2100"]
    assert read_plan(ingot_adapter.engine_dir(task, long=True)).limits.max_input_len == 2200


def test_llama_cpp_is_asked_with_both_kinds_of_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def output(*command: object) -> str:
        words = [str(part) for part in command]
        asked.append(words)
        kind = words[words.index("-fa") + 1]
        if "llama-bench" in words[0]:
            assert kind == "0,1"
            return json.dumps([{"avg_ts": 30.0}, {"avg_ts": 40.0}])
        sizes = words[words.index("-npl") + 1].split(",")
        speeds = {"auto": 7.0, "on": 10.0, "off": 12.0}
        return "words\n" + "\n".join(json.dumps({"pl": int(size), "speed_tg": speeds[kind]}) for size in sizes)

    monkeypatch.setattr(llama_adapter, "output", output)
    task = job(tmp_path, regimes="decode:1,decode:2,decode:2@600,prefill:512,prefill:3000")
    _, speeds = llama_adapter.measure(task)
    assert speeds == {"decode:1": 7.0, "decode:2": 7.0, "decode:2@600": 12.0, "prefill:512": 40.0, "prefill:3000": 40.0}
    long = next(words for words in asked if "off" in words)
    assert [long[long.index(name) + 1] for name in ("-c", "-npp", "-ntg")] == ["1200", str(600 - 64), "64"]
    assert ["--no-warmup" in words for words in asked if "llama-bench" in words[0]] == [False, True]


def test_ik_llama_cpp_is_asked_with_tensors_repacked_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"

    def output(*command: object, both: bool = False) -> str:
        words = [str(part) for part in command]
        assert words[words.index("-m") + 1] == str(tmp_path / "tiny/gguf/Q4_K_M.gguf")
        assert both == ("llama-batched-bench" in words[0])
        if "llama-bench" in words[0]:
            return json.dumps([{"avg_ts": 40.0 if words[words.index("-rtr") + 1] == "1" else 30.0}, {"avg_ts": 20.0}])
        speed = 12.5 if "-rtr" in words else 11.0
        row = (
            f"|    64 |     64 |    1 |    128 |    1.000 |    64.00 |    4.000 | {speed:8.2f} |    5.000 |     9.00 |"
        )
        return f"words\n{head}\n|-------|\n{row}\nllama_print_timings:"

    monkeypatch.setattr(ik_adapter, "output", output)
    task = job(tmp_path, peer="ik_llama.cpp", weights="Q4_K_M file", regimes="decode:1,prefill:512")
    version, speeds = ik_adapter.measure(task)
    assert version.startswith("ik_llama.cpp ")
    assert speeds == {"decode:1": 12.5, "prefill:512": 40.0}
    with pytest.raises(ValueError, match="printed 0 rows"):
        ik_adapter.decode_speed(head)
    with pytest.raises(FileNotFoundError, match=r"which the adapter of llama\.cpp makes"):
        ik_adapter.prepare(task)


def test_engines_that_read_the_same_file_wait_for_llama_cpp_to_make_it(tmp_path: Path) -> None:
    assert list(GGUF) == ["gguf-q4_k_m", "gguf-q4_0", "gguf-q8_0", "gguf-q6_k", "gguf-iq4_xs"]
    found = variants(PEERS, ["gguf-q6_k"])
    assert [each.peer.name for each in found] == ["ingot", "llama.cpp", "ik_llama.cpp"]
    whats = []
    for variant in found:
        task = job(tmp_path, peer=variant.peer.name, weights=variant.weights)
        assert task.file == tmp_path / "tiny/gguf/Q6_K.gguf"
        whats.append([step.what for step in steps_of(variant, task, {})])
    made = "tiny for llama.cpp Q6_K file on avx2"
    assert [each.count(made) for each in whats] == [1, 1, 1]
    assert whats[1][-1] == made
    assert [each[-1] for each in (whats[0], whats[2])] == [
        f"tiny for {name} Q6_K file on avx2" for name in ("ingot", "ik_llama.cpp")
    ]
    assert whats[0][: len(whats[1])] == whats[1]
    assert job(tmp_path).of_file == ""


def test_llama_cpp_makes_files_as_users_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(llama_adapter, "run", lambda *command, cwd=None: ran.append([str(part) for part in command]))
    task = job(tmp_path, peer="llama.cpp", weights="IQ4_XS file")
    task.folder.mkdir(parents=True)
    (task.folder / "bf16.gguf").write_bytes(b"")
    llama_adapter.prepare(task)
    assert ran[0][1:] == [str(task.folder / "bf16.gguf"), str(task.file), "IQ4_XS"]
    llama_adapter.prepare(dataclasses.replace(task, weights="Q4_0"))
    assert "--output-tensor-type" in ran[1]


@pytest.mark.native
def test_ingot_keeps_the_codes_of_a_file(tmp_path: Path) -> None:
    task = job(tmp_path, weights="Q4_0 file", regimes="decode:1")
    task.file.parent.mkdir(parents=True)
    values = write_llama(tmp_path, 2, vocab=259, tokenizer=byte_tokens())
    (tmp_path / "model.gguf").rename(task.file)
    ingot_adapter.prepare(task)
    assert len(values) == 11
    assert any(step.kernel.startswith("matmul.w4t") for step in read_plan(ingot_adapter.engine_dir(task)).steps)


def test_isas() -> None:
    by_name = {peer.name: peer for peer in PEERS}
    assert cap(by_name["openvino"], "amx", "amx") == {}
    assert cap(by_name["ctranslate2"], "avx2", "amx") == {"CT2_FORCE_CPU_ISA": "AVX2"}
    with pytest.raises(ValueError, match="cannot be held to avx2 on this machine, which has amx"):
        cap(by_name["openvino"], "avx2", "amx")
    for isa in ISAS:
        assert ("-DGGML_AVX512=ON" in ik_adapter.cmake_switches(isa)) == ("avx512" in isa_includes(isa))
        assert ("-DCMAKE_CXX_FLAGS=-mavx512vl -mavx512dq" in ik_adapter.cmake_switches(isa)) == (
            "avx512" in isa_includes(isa)
        )
        assert ("-DGGML_AVX512=ON" in cmake_switches(isa)) == ("avx512" in isa_includes(isa))
        assert ("-DGGML_AVX_VNNI=ON" in cmake_switches(isa)) == (isa == "avxvnni")
    assert {"-DGGML_AVX2=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_NATIVE=OFF"} <= set(cmake_switches("avx512"))


@pytest.mark.native
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "lama.cpp"], "unknown peer 'lama.cpp': did you mean llama.cpp?"),
        (["--precisions", "w9"], "unknown precision 'w9'"),
        (["--regimes", "decode"], "'decode' is no regime"),
        (["--rounds", "0"], "at least 1"),
        (["--isa", "amx"], "--isa amx: this machine has avx512"),
        (["--isa", "avxvnni"], "--isa avxvnni: this machine has avx512"),
        (["--model", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_bad_input_is_refused_in_words(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--work", str(tmp_path), "--model", "tinyllama", *arguments], ("avx512", "avx2"))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
