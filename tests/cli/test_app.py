"""The frame of the command line: names, typos, help, and how errors become words and exit codes."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import ingot
from ingot.cli import app
from ingot.errors import BuildError, UsageError, install


def commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(app.group, info_name="ingot")
    for name in app.COMMANDS:
        command = app.group.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", child) for inner, child in command.commands.items())


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_every_command_has_an_example_and_words_for_every_option(name: str, command: click.Command) -> None:
    assert "Example: ingot " in (command.help or "")
    assert " " in name or "`ingot help exit_codes`" in command.get_help(click.Context(command))
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_the_version_names_the_build(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "build.json"
    monkeypatch.setattr("ingot.build_info.BUILD_FILE", file)
    assert app.run(["--version"]) == 0
    first, commit, *_ = capsys.readouterr().out.splitlines()
    assert first == f"ingot, version {ingot.__version__}"
    assert commit.split() == ["commit", "unknown"]
    file.write_text('{"commit": "0123abc", "compiler": "GNU 14.2"}')
    assert app.run(["--version"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert (facts["commit"], facts["compiler"]) == ("0123abc", "GNU 14.2")
    assert facts["kernels"]


def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert [name for name in app.COMMANDS if name not in out] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["biuld"], "did you mean build?"),
        (["frobnicate"], "the commands are quickstart, convert"),
        (["build", "--chekpoint_dir", "x"], "--checkpoint_dir"),
        (["convert", "--output_dir", "x", "--dtype", "float23"], "float32"),
        (["bench", "latncy"], "latency"),
        (["convert"], "--output_dir"),
        (["convert"], "next: `ingot convert --help` lists the options"),
        (["biuld"], "next: `ingot --help` lists the commands"),
        (["--biuld"], "next: `ingot --help` lists the options"),
    ],
)
def test_typos_are_answered_with_the_near_name(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert words in captured.err


@pytest.mark.parametrize("command", ["serve", "run", "build", "convert"])
@pytest.mark.parametrize(
    ("flag", "program", "words"),
    [
        (["--max-model-len", "4096"], "--max_model_len is an option of vLLM", "--max_seq_len N --max_input_len N-1"),
        (["--enable-lora"], "--enable_lora is an option of vLLM", "merge the adapter"),
        (["--speculative-model=x"], "--speculative_model is an option of vLLM", "--speculative_config"),
        (["--tensor-parallel-size", "2"], "--tensor_parallel_size is an option of vLLM", "`ingot build`: `--tp_size"),
        (["--model-draft", "x"], "--model_draft is an option of llama.cpp", "--draft_dir CHECKPOINT"),
        (["--lora-scaled", "x"], "--lora_scaled is an option of llama.cpp", "`ingot convert --lora`"),
        (["-ngl", "99"], "-ngl is an option of llama.cpp", "on a CPU or on a GPU"),
        (["-m", "x.gguf"], "-m is an option of llama.cpp", "--engine_dir DIR"),
        (["-hf", "x/y"], "-hf is an option of llama.cpp", "ingot downloads nothing"),
    ],
)
def test_flags_of_other_programs_are_answered_by_name(
    command: str, flag: list[str], program: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([command, *flag]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{program} that ingot does not have" in said
    assert words in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--max_body"], "did you mean --max_body_size?"),
        (["build", "--chekpoint-dir", "x"], "did you mean --checkpoint_dir?"),
        (["serve", "--max_seq_len", "2"], "--max_seq_len is an option of `ingot build`, not of `ingot serve`"),
        (["serve", "--max_seq_len", "2"], "give it to `ingot build`"),
        (["serve", "--maximal-frobnication", "2"], "there is no option --maximal_frobnication\n"),
    ],
)
def test_only_near_options_are_offered(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(args) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--engine_dir", "--engine-dir"])
def test_underscores_and_hyphens_are_the_same(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["run", option, "does-not-exist", "--prompt", "x"]) == 2
    assert "does-not-exist" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "words"), [("0", "at least 1 byte"), ("much", "amount of memory")])
def test_sizes_name_their_option(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["build", "--checkpoint_dir", "c", "--output_dir", "e", "--max_mem", given]) == 2
    said = capsys.readouterr().err
    assert "--max_mem" in said
    assert words in said


@pytest.mark.slow
def test_serve_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from ingot.cli import app; sys.exit(app.run(['serve', '--engine_dir', 'e']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert install("serve") in result.stderr


def test_serve_refuses_wrong_values(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in (
        (["--engine_dir", "e"], "e"),
        (["--engine_dir", "e", "--request_timeout", "0"], "request_timeout"),
        (["--engine_dir", "e", "--api_key", " "], "API key"),
        (["--engine_dir", "e", "--otlp_endpoint", "collector:4318"], "OTLP"),
        (["--engine_dir", "e", "--api_key_file", "e"], "API keys"),
    ):
        assert app.run(["serve", *args]) in (1, 2)
        err = capsys.readouterr().err
        assert words in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            BuildError("no kernel", where="step 3", hint="use f32"),
            1,
            "error: no kernel\n  where: step 3\n  next: use f32",
        ),
        (UsageError("two of them"), 2, "error: two of them"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out/x"),
            1,
            "error: a file cannot be read or written\n  where: out/x\n  got: no space left on device",
        ),
        (MemoryError(), 1, "out of memory"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_errors_become_words_and_a_code(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(app.group, "main", fails)
    assert app.run(["anything"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_traceback_is_there_for_those_who_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app.group, "main", fails)
    assert app.run(["--traceback", "anything"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_bench_serve_says_what_it_cannot_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    args = ["bench", "serve", "--engine_dir", str(tmp_path / "none"), "--trace", str(trace)]
    assert app.run(args) == 2
    assert "--url URL, or --offline" in capsys.readouterr().err
    assert app.run([*args, "--offline"]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_a_file_of_an_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing or damaged, and what to do, before an engine is opened."""
    broken = tmp_path / "schema.json"
    broken.write_text("{")
    run = ["run", "--engine_dir", str(tmp_path), "--prompt", "a", "--json_schema"]
    assert app.run([*run, str(tmp_path / "absent.json")]) == 2
    assert "look at how the path is spelled" in capsys.readouterr().err
    assert app.run([*run, str(broken)]) == 1
    said = capsys.readouterr().err
    assert "the JSON schema is not JSON" in said
    assert str(broken) in said
