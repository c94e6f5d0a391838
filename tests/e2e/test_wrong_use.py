"""Exit codes of command lines that name wrong paths and values: the next step is one that works."""

from pathlib import Path

from tests.e2e.command import ingot


def test_a_path_that_does_not_exist_is_wrong_use_and_the_like_one_is_named(tmp_path: Path) -> None:
    for name in ("engine-w8", "checkpoint", "model"):
        (tmp_path / name).mkdir()
    run = ("run", "--prompt", "x", "--engine_dir")
    ingot(*run, tmp_path / "engine-w4").fails(f"did you mean {tmp_path / 'engine-w8'}?", code=2)
    ingot(*run, tmp_path / "zzz").fails("there is no engine directory", "how the path is spelled", code=2)
    build = ("build", "--output_dir", tmp_path / "e", "--checkpoint_dir")
    ingot(*build, tmp_path / "chekpoint").fails(f"did you mean {tmp_path / 'checkpoint'}?", code=2)
    convert = ("convert", "--output_dir", tmp_path / "c", "--model_dir")
    ingot(*convert, tmp_path / "modell").fails(f"did you mean {tmp_path / 'model'}?", code=2)


def test_a_value_that_does_not_fit_is_wrong_use_and_a_request_that_fails_is_failed_work(
    shipped_engine: Path, shipped_checkpoint: Path, tmp_path: Path
) -> None:
    build = ("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e")
    ingot(*build, "--max_seq_len", 1024).fails("at most 513", code=2)
    ingot(*build, "--precision", "int4").fails("w4g128", code=2)
    done = ingot("run", "--engine_dir", shipped_engine, "--prompt", "x", "--max_output_len", 600)
    done.fails("ask for at most 511 new tokens", code=1)
    assert "build" not in done.err, "the model has no more positions: a build would refuse that, too"


def test_a_pattern_that_is_none_is_wrong_use_and_a_file_of_one_is_named(shipped_engine: Path, tmp_path: Path) -> None:
    run = ("run", "--engine_dir", shipped_engine, "--prompt", "x", "--max_output_len", 4)
    ingot(*run, "--regex", "a(").fails(
        "--regex is not a pattern", "where: --regex", "got: unclosed group, at character 2 of the pattern", code=2
    )
    ingot(*run, "--regex", "a" * 5000 + "\\").fails("error: --regex is not a pattern", code=2)
    ingot(*run, "--regex", "[ab]{2}").succeeds()
    for option, text, words in (
        ("grammar", "start: (", "llguidance refuses this"),
        ("json_schema", "3", "JSON schema"),
    ):
        (tmp_path / option).write_text(text)
        ingot(*run, f"--{option}", tmp_path / option).fails(words, f"where: {tmp_path / option}", code=1)


def test_the_default_length_of_an_answer_is_lowered_to_what_the_prompt_leaves(shipped_engine: Path) -> None:
    """513 tokens in all; only a length that the user gives is refused."""
    lines = "".join(f'{{"prompt": {[5] * length}, "ignore_eos": true}}\n' for length in (500, 512, 100))
    run = ("run", "--engine_dir", shipped_engine, "--input_file", "-")
    found = ingot(*run, "--json", stdin=lines).succeeds().objects()
    assert [(len(each["token_ids"]), each["finish_reason"]) for each in found] == [
        (13, "length"),
        (1, "length"),
        (128, "length"),
    ]
    (longer,) = ingot(*run, "--json", "--min_tokens", 140, stdin=lines.splitlines()[-1]).succeeds().objects()
    assert len(longer["token_ids"]) == 140
    ingot(*run, "--max_output_len", 14, stdin=lines.splitlines()[0]).fails("here 13 new ones", code=1)


def test_a_directory_in_place_of_the_input_file_is_not_called_misspelled(shipped_engine: Path, tmp_path: Path) -> None:
    run = ("run", "--engine_dir", shipped_engine, "--input_file", tmp_path)
    ingot(*run).fails("the input file cannot be read", "next: give a file", code=2)


def test_lines_of_the_input_file(shipped_engine: Path) -> None:
    """Some editors begin a file with a mark of its byte order. Errors name the line and its field."""
    run = ("run", "--engine_dir", shipped_engine, "--input_file", "-")
    line = '\ufeff{"prompt": [5], "max_output_len": 2, "ignore_eos": true}\n'
    (found,) = ingot(*run, "--json", stdin=line).succeeds().objects()
    assert len(found["token_ids"]) == 2
    refused = ingot(*run, stdin='"a"\n{"prompt": "b", "max_output_len": 0}\n')
    refused.fails("max_output_len must be a whole number, at least 1", "where: -:2", "got: 0", code=1)
