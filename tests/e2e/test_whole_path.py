"""convert → build → run → inspect → verify → bench, as commands on small models."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import BuildDefaults
from ingot.errors import install
from ingot.plugins.cpu.session import CpuSession
from ingot.quickstart import SCHEMA, SHIPPED
from ingot.runtime.generate_text import stream_text
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.text_stream import TextEvent
from tests.e2e.command import finish, ingot, start
from tests.handmade import TINY_GPT2, TINY_LLAMA, write_model


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("target", ["cpu", "ref"])
def test_from_hugging_face_to_tokens(config: dict[str, object], target: str, tmp_path: Path) -> None:
    model, checkpoint, engine = write_model(tmp_path / "m", config), tmp_path / "c", tmp_path / "e"
    converted = ingot("convert", "--model_dir", model, "--output_dir", checkpoint).succeeds()
    assert converted.out == ""
    built = ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", engine, "--target", target).succeeds()
    assert built.out == ""
    assert "max_seq_len lowered from 4096 to 65: the model has 64 positions" in built.err
    assert built.err.index("wrote ") < built.err.index("max_seq_len lowered"), "what was written comes first"
    assert built.err.splitlines()[-1] == f'  next    ingot run --engine_dir {engine} --prompt "Once upon a time"'
    verified = ingot("verify", engine).succeeds().out
    assert verified.splitlines()[-1].startswith("verify: OK, all hashes match")
    document = json.loads(ingot("inspect", engine, "--json").succeeds().out)
    assert document["limits"]["max_seq_len"] == 65
    assert document["steps"][-1]["name"]
    assert "Attention" in ingot("inspect", checkpoint).succeeds().out
    assert "Attention" in ingot("inspect", checkpoint / "model.onnx").succeeds().out


@pytest.mark.slow
def test_run_prints_completions_and_nothing_else(shipped_engine: Path) -> None:
    options = ("--engine_dir", shipped_engine, "--max_output_len", 12, "--seed", 3)
    both = ingot("run", *options, "--prompt", "The prince", "--prompt", "Natasha").succeeds()
    assert both.err == ""
    alone = [ingot("run", *options, "--prompt", prompt).succeeds().out for prompt in ("The prince", "Natasha")]
    assert both.out == "".join(alone)
    assert all(text.strip() for text in alone)
    streamed = ingot("run", *options, "--prompt", "The prince", "--prompt", "Natasha", "--stream").succeeds()
    assert streamed.out == both.out
    assert ingot("run", *options, stdin="The prince\n").succeeds().out == alone[0]


def test_run_follows_sampling_options(shipped_engine: Path) -> None:
    options = ("--engine_dir", shipped_engine, "--prompt", "The prince", "--temperature", 0, "--max_output_len", 12)
    free = ingot("run", *options).succeeds().out
    stop = free[5:9]
    assert ingot("run", *options, "--stop", "never seen", "--stop", stop).succeeds().out == free[:5] + "\n"
    assert "prince" in free
    assert "prince" not in ingot("run", *options, "--bad_words", "prince").succeeds().out
    assert ingot("run", *options, "--repetition_penalty", 1.5, "--frequency_penalty", 1).succeeds().out != free
    line = json.dumps({"prompt": "The prince", "stop": [stop], "min_tokens": 12, "ignore_eos": True})
    ignored = ingot("run", *options[:2], *options[4:], "--input_file", "-", stdin=line).succeeds().out
    assert ignored == ingot("run", *options, "--ignore_eos").succeeds().out
    ingot("run", *options, "--min_p", 2).fails("min_p must be", code=2)
    ingot("run", "--engine_dir", "none", "--prompt", "x", "--temperature", -1).fails("temperature must be", code=2)


@pytest.mark.slow
def test_the_commands_as_processes(tmp_path: Path) -> None:
    work = {"--model_dir": SHIPPED, "--output_dir": tmp_path / "c"}
    finish(start("convert", *(word for pair in work.items() for word in pair))).succeeds()
    finish(start("build", "--checkpoint_dir", tmp_path / "c", "--output_dir", tmp_path / "e")).succeeds()
    options = ("--engine_dir", tmp_path / "e", "--max_output_len", 8, "--seed", 5)
    done = finish(start("run", *options), stdin="The prince\n").succeeds()
    assert done.err == ""
    assert done.out == ingot("run", *options, "--prompt", "The prince").out
    finish(start("run", *options, "--isa", "none")).fails("none", code=2)


def test_run_reads_json_lines_and_prints_one_object_per_request(shipped_engine: Path, tmp_path: Path) -> None:
    lines = ['"The prince"', '{"prompt": [1, 1680, 620], "max_output_len": 3, "temperature": 0}']
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(lines) + "\n")
    options = ("--engine_dir", shipped_engine, "--max_output_len", 5, "--seed", 3, "--json")
    first, second = ingot("run", *options, "--input_file", file).succeeds().objects()
    assert (first["index"], first["prompt"], len(first["token_ids"])) == (0, "The prince", 5)
    assert (second["prompt"], len(second["token_ids"]), second["finish_reason"]) == ([1, 1680, 620], 3, "length")
    assert first["text"]
    piped = ingot("run", *options, "--input_file", "-", "--stream", stdin=file.read_text()).succeeds().objects()
    assert sorted(piped, key=lambda each: int(each["index"])) == [first, second]


@pytest.mark.slow
def test_an_engine_inside_its_checkpoint_is_not_lost(tmp_path: Path) -> None:
    convert = ("convert", "--model_dir", SHIPPED, "--output_dir", tmp_path / "c")
    build = ("build", "--checkpoint_dir", tmp_path / "c", "--output_dir", tmp_path / "c/e", "--no_autotune")
    ingot(*convert).succeeds()
    ingot(*convert).succeeds()
    ingot(*build).succeeds()
    ingot(*build).succeeds()
    ingot(*convert).fails("would be lost", "e/config.json", code=2)
    (tmp_path / "c/e/notes.txt").write_text("of mine")
    ingot(*build).fails("would be lost", "notes.txt", code=2)


@pytest.mark.slow
def test_lines_end_in_line_feeds_and_null_is_nothing(shipped_engine: Path) -> None:
    """Texts may hold whatever else ends lines, also half a surrogate pair, which JSON can spell."""
    lines = ['"a\u2028b\x85c"', '{"prompt": "x", "max_output_len": null}\r', '"\\ud800"']
    options = ("--engine_dir", shipped_engine, "--max_output_len", 3, "--json", "--ignore_eos")
    done = finish(start("run", *options, "--input_file", "-"), stdin="\n".join(lines))
    first, second, third = [json.loads(line) for line in done.out.split("\n")[:-1]]
    assert (done.code, first["prompt"], len(second["token_ids"])) == (1, "a\u2028b\x85c", 3)
    assert (third["prompt"], third["finish_reason"]) == ("\ud800", "abort")
    assert "half of a surrogate pair is not a character\n  got: U+D800 at place 0" in third["error"]


@pytest.mark.parametrize("stdin", ["", "\n"])
def test_an_empty_stdin_is_no_prompt(stdin: str, shipped_engine: Path) -> None:
    ingot("run", "--engine_dir", shipped_engine, stdin=stdin).fails("there is no prompt", code=2)


def test_a_bad_request_does_not_touch_the_others(shipped_engine: Path) -> None:
    options = ("--engine_dir", shipped_engine, "--max_output_len", 4, "--json")
    done = ingot("run", *options, "--input_file", "-", stdin='{"prompt": [99999]}\n"Natasha"\n')
    assert done.code == 1
    assert "error: request 0: " in done.err
    failed, other = done.objects()
    assert "99999" in failed["error"]
    assert (other["error"], len(other["token_ids"])) == (None, 4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x", "temperature": -1}', "temperature must be"),
        ('{"prompt": "x", "temprature": 1}', "did you mean 'temperature'?"),
        ('{"text": "x"}', "has no prompt"),
        ('{"prompt": {}}', "text or a list of token ids"),
        ('{"prompt": "x", "prompt": "y"}', "key 'prompt' appears twice"),
        ("{", "-:1"),
        ("[" * 10**5, "not JSON"),
        ("", "there is no prompt"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_runs(line: str, words: str, shipped_engine: Path) -> None:
    done = ingot("run", "--engine_dir", shipped_engine, "--input_file", "-", stdin=line)
    done.fails(words, code=1 if line else 2)


def test_generation_config_applies_in_run_unless_told_otherwise(shipped_engine: Path) -> None:
    options = ("--engine_dir", shipped_engine, "--prompt", "The prince", "--max_output_len", 20, "--json")
    texts = {ingot("run", *options, "--seed", seed).succeeds().objects()[0]["text"] for seed in (1, 2, 3)}
    assert len(texts) > 1, "generation_config.json of the shipped model samples"
    greedy = {ingot("run", *options, "--temperature", 0, "--seed", seed).succeeds().out for seed in (1, 2)}
    assert len(greedy) == 1


def test_bench_reports_medians_and_fractions(tiny_engine: Path) -> None:
    options = ("--engine_dir", tiny_engine, "--input_len", 10, "--output_len", 6, "--repetitions", 2, "--json")
    report = json.loads(ingot("bench", "latency", *options, "--batch_size", 1, "--batch_size", 3).succeeds().out)
    assert [batch["batch_size"] for batch in report["batches"]] == [1, 3]
    for batch in report["batches"]:
        assert len(batch["itl_ms"]) == 5
        assert 0 < batch["bandwidth_fraction"] == pytest.approx(batch["bandwidth_gbs"] / report["machine_gbs"])
        assert batch["tpot_ms"] > 0
    load = json.loads(ingot("bench", "throughput", *options, "--num_requests", 5).succeeds().out)
    assert load["output_tokens_per_second"] == pytest.approx(30 / load["seconds"])
    assert load["steps"] >= 6
    ingot("bench", "latency", *options, "--output_len", 60).fails("more than the engine allows", code=2)
    ingot("bench", "latency", *options, "--batch_size", 65).fails("--batch_size", "at most 64", code=2)


@pytest.mark.slow
def test_doctor_knows_every_target() -> None:
    machine = json.loads(ingot("doctor", "--json").succeeds().out)
    states = {state["name"]: state for state in machine["targets"]}
    assert states["ref"]["runs"]
    assert states["cuda/sm90"]["why_not"]
    assert machine["cores"] >= 1
    assert machine["libraries"]["numpy"]
    assert (machine["isa"] == "none") == (not any(states[f"cpu/{isa}"]["runs"] for isa in ("amx", "avx512", "avx2")))
    for state in states.values():
        assert state["runs"] or state["why_not"]


@pytest.mark.slow
def test_doctor_is_one_screen_and_all_has_every_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.cli.console.terminal_width", lambda *_: 80)
    short, whole = ingot("doctor").succeeds().out, ingot("doctor", "--all").succeeds().out
    for out in (short, whole):
        assert max(map(len, out.splitlines())) <= 80
    assert len(short.splitlines()) <= 24
    assert "ref" in short
    machine = json.loads(ingot("doctor", "--json").succeeds().out)
    flat = " ".join(whole.split())
    for state in machine["targets"]:
        assert state["name"] in whole
        if state["why_not"] is not None:
            assert flat.count(" ".join(state["why_not"].split())) >= 1
    (tmp_path / "e").mkdir()
    done = ingot("doctor", tmp_path / "e")
    assert (done.code, done.err) == (1, "")
    assert " ".join(done.out.split("CPU")[0].split()).startswith(f"{tmp_path / 'e'}: the engine has no manifest")


def test_quickstart_goes_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ModelRunner.from_dir

    def load_slow(engine: Path) -> ModelRunner:
        runner = load(engine)
        if isinstance(session := runner.executor._loop._session, CpuSession):
            session.slow_down(0.0001)  # per op of a step: not all tokens are there before somebody has looked at one
        return runner

    monkeypatch.setattr(ModelRunner, "from_dir", load_slow)
    done = ingot("quickstart", "--output_dir", tmp_path / "q", "--json").succeeds()
    report = json.loads(done.out)
    assert report["tokens"] == 100
    assert report["tpot_ms"] > 0
    assert report["bandwidth_fraction"] > 0
    assert "The prince looked at" in done.err
    assert (report["schema_answer"] is None) is (find_spec("llguidance") is None)
    if report["schema_answer"] is not None:
        jsonschema.validate(json.loads(report["schema_answer"]), SCHEMA)
        assert json.dumps(json.loads(report["schema_answer"])) in done.err
    ingot("verify", tmp_path / "q/engine").succeeds()


@pytest.mark.slow
def test_quickstart_whose_tokens_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*asked: Any) -> Iterator[TextEvent]:
        events = list(stream_text(*asked))
        tokens = tuple(token for event in events for token in event.token_ids)
        yield TextEvent(index=0, text="".join(event.text for event in events), token_ids=tokens)

    monkeypatch.setattr("ingot.quickstart.stream_text", late)
    monkeypatch.setattr("ingot.quickstart.find_spec", lambda name: None)
    shown = ingot("quickstart").succeeds()
    assert "all tokens came at once" in shown.err
    assert install("guided") in " ".join(shown.err.split())
    assert "quickstart --output_dir quickstart" in shown.err, "the engine was removed"
    assert "%" not in shown.err.split("model ")[0], "no progress of short work"
    report = json.loads(ingot("quickstart", "--json").succeeds().out)
    assert (report["tokens"], report["tpot_ms"], report["bandwidth_fraction"]) == (100, None, None)


def test_random_weights_of_a_given_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    made = [
        ingot(
            "convert", "--config", tmp_path / "config.json", "--random_weights", seed, "--output_dir", tmp_path / name
        )
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert all(each.succeeds() for each in made)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


def test_what_convert_was_told_is_the_build_default(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", TINY_LLAMA)
    ingot(
        "convert",
        "--model-dir",
        model,
        "--output-dir",
        tmp_path / "c",
        "--use-weight-only",
        "--weight-only-precision",
        "int4",
        "--tp-size",
        2,
    ).succeeds()
    assert Checkpoint.open(tmp_path / "c").config.build_defaults == BuildDefaults(precision="w4g128", tp_size=2)
    build = ("build", "--checkpoint_dir", tmp_path / "c", "--output_dir", tmp_path / "e")
    ingot(*build).fails("--sum_parts 2 is too large", code=2)
    ingot(*build, "--tp_size", 1).succeeds()
    assert json.loads((tmp_path / "e/config.json").read_text())["precision"] == "w4g128"
    ingot(*build, "--tp_size", 1, "--precision", "f32").succeeds()
    assert json.loads((tmp_path / "e/config.json").read_text())["precision"] == "f32"


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (["--gemm_plugin", "float32"], "f32"),
        (["--gemm_plugin", "bfloat16"], "bf16"),
        (["--gemm_plugin", "float16"], "bf16"),
        (["--gemm_plugin", "disable"], "f32"),
        (["--precision", "bf16", "--lm_head_precision", "bf16"], "bf16"),
        (["--use_weight_only"], "w8"),
        (["--use_weight_only", "--weight_only_precision", "int8"], "w8"),
        (["--use-weight-only", "--weight-only-precision", "int4"], "w4g128"),
        (["--config", "w4_careful"], "w4g64"),
        (["--precision", "w8", "--gemm_plugin", "float16", "--lm_head_precision", "w4g32"], "w8"),
    ],
)
def test_precision_by_any_of_its_names(
    options: list[str], precision: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    done = ingot("build", "--checkpoint_dir", tiny_checkpoint, "--output_dir", tmp_path / "e", *options).succeeds()
    assert json.loads((tmp_path / "e/config.json").read_text())["precision"] == precision
    assert ("compute float16" in done.err) == ("float16" in options)
    assert ("only cuda targets use a library" in done.err) == ("disable" in options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--precision", "f32", "--gemm_plugin", "bfloat16"], "different precisions"),
        (["--precision", "w8a8"], "ingot quantize --recipe w8a8"),
        (["--precision", "w8", "--use_weight_only", "--weight_only_precision", "int4"], "different precisions"),
        (["--precision", "w8", "--config", "w4_careful"], "different precisions"),
        (["--precision", "w8", "--gemm_plugin", "float32"], "does not fit quantised weights"),
        (["--precision", "w8", "--gemm_plugin", "bfloat16", "--activations", "int8"], "does not fit"),
        (["--config", "w8_float_inputs", "--activations", "int8"], "contradicts the recipe"),
        (["--config", "w4_careful", "--lm_head_precision", "bf16"], "contradicts the recipe"),
        (["--weight_only_precision", "int8"], "needs --use_weight_only"),
        (["--lm_head_precision", "w2"], "unknown lm_head_precision"),
        (["--activations", "int8"], "int8 activations are not supported for float weights"),
        (["--kv_cache_dtype", "int4"], "unknown kv_cache_dtype"),
        (["--tp_size", "2", "--target", "tensorrt/sm90"], "--tp_size 2 is not supported on tensorrt/sm90"),
        (["--pp_size", "2", "--target", "tensorrt/sm90"], "--pp_size 2 is not supported on tensorrt/sm90"),
        (["--config", "recipe.toml"], "the recipe cannot be read"),
        (["--timing_cache", "f", "--no_autotune"], "timing_cache cannot be combined with no_autotune"),
        (["--max_beam_width", "4"], "beam search"),
        (["--max_seq_len", "40", "--max_output_len", "4"], "set the same limit"),
        (["--target", "cpu/avx9"], "there is no target"),
        (["--max_mem", "lots"], "amount of memory"),
        (["--max_batch_size", "0"], "max_batch_size"),
    ],
)
def test_what_is_not_there_is_refused(options: list[str], words: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = ingot("build", "--checkpoint_dir", tiny_checkpoint, "--output_dir", tmp_path / "e", *options)
    done.fails(words, code=2)
    assert not (tmp_path / "e").exists()


def test_a_file_that_is_no_timing_cache_is_kept(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build = ("build", "--checkpoint_dir", tiny_checkpoint, "--output_dir", tmp_path / "e", "--timing_cache")
    (tmp_path / "letter").write_text("Dear reader")
    ingot(*build, tmp_path / "letter").fails("not a timing cache", code=2)
    assert (tmp_path / "letter").read_text() == "Dear reader"
    assert not (tmp_path / "e").exists()
    ingot(*build, tmp_path / "cache").succeeds()
    assert list(json.loads((tmp_path / "cache").read_text())) == ["machines", "timing_cache"]


def test_output_length_sets_the_sequence_length(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build = ("build", "--checkpoint_dir", tiny_checkpoint, "--output_dir", tmp_path / "e")
    ingot(*build, "--max_input_len", 20, "--max_output_len", 10).succeeds()
    limits = json.loads((tmp_path / "e/config.json").read_text())["limits"]
    assert (limits["max_input_len"], limits["max_seq_len"]) == (20, 30)
    ingot(*build, "--max_output_len", 10).succeeds()
    limits = json.loads((tmp_path / "e/config.json").read_text())["limits"]
    assert (limits["max_input_len"], limits["max_seq_len"]) == (55, 65)
    ingot(*build, "--max_input_len", 60, "--max_output_len", 10).fails("more than the model allows", code=2)
