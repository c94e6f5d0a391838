"""Writes `docs/options.md` from the commands themselves: `python -m ingot.cli.options_page > docs/options.md`."""

from collections.abc import Iterator

import click

from ingot.cli.absent_options import ABSENT
from ingot.cli.app import COMMANDS, group
from ingot.cli.trtllm_compat import SPELLINGS, Spelling

_HEAD = """# Options

Written by `python -m ingot.cli.options_page`; a test keeps it in step with the commands. `_` and `-` are the same in
every option. What does not exist yet is refused with a reason, never accepted and ignored. The last section lists
[options of TensorRT-LLM](#coming-from-tensorrt-llm).

| command | does |
|---|---|
"""

_SPELLINGS_HEAD = """
## Coming from TensorRT-LLM

`trtllm-build` and `convert_checkpoint.py` options that `ingot build` and `ingot convert` know. *same*: does the same
here. *always on*, *always off*, *only VALUE*: that is how ingot works; other values are refused. *refused*: the refusal
says what to do instead.

| option | here | what happens |
|---|---|---|
"""

# Options that do something here, under the name that TensorRT-LLM gave them.
_SAME = {
    "--model_dir, --checkpoint_dir, --output_dir": "input and output directories",
    "--dtype": "type of the stored weights (convert)",
    "--use_weight_only, --weight_only_precision int8\\|int4": "the precisions w8 and w4g128; on convert recorded as "
    "the build's default",
    "--tp_size, --pp_size": "on convert recorded as the build's default; TensorRT targets refuse more than 1",
    "--max_batch_size, --max_input_len, --max_seq_len, --max_num_tokens": "limits; defaults are lowered to what the "
    "model allows, values you give are kept or refused",
    "--max_output_len N": "max_seq_len = max_input_len + N",
    "--gemm_plugin auto\\|disable\\|float32\\|float16\\|bfloat16": "the compute type of matmuls, so the "
    "precision: float32 is f32, bfloat16 is bf16, float16 runs as bf16 on CPUs and says so; auto and disable leave the "
    "choice to --precision, and with disable cuda targets use no cuBLASLt; beside quantised weights it is the type of "
    "the inputs: float16 and bfloat16 are --activations bf16",
    "--workers N": "threads that pack weights, of one rank file after the other; by default one for each core",
    "--log_level": "how much is said on stderr",
}


def page() -> str:
    """The whole page, as Markdown."""
    parts = [_HEAD + "".join(f"| [`ingot {name}`](#ingot-{name}) | {does} |\n" for name, does in COMMANDS.items())]
    context = click.Context(group, info_name="ingot")
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        parts += _sections(f"ingot {name}", command)
    rows = [f"| `{option}` | same | {what} |" for option, what in _SAME.items()]
    parts.append(_SPELLINGS_HEAD + "\n".join(rows + [_row(spelling) for spelling in SPELLINGS]))
    parts[-1] += "".join(f"\n| {names} | refused | {way} |" for way, names in _absent().items()) + "\n"
    return "\n".join(parts)


def _absent() -> dict[str, str]:
    """What to do instead → the options, as code."""
    found: dict[str, str] = {}
    for name, way in ABSENT.items():
        found[way] = f"{found[way]}, `--{name}`" if way in found else f"`--{name}`"
    return found


def _sections(title: str, command: click.Command) -> Iterator[str]:
    help_text = (command.help or "").replace("\b\n", "").strip()
    lines = [f"## {title}", "", *(line.strip() for line in help_text.splitlines())]
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        lines += ["", "| option | default | meaning |", "|---|---|---|"]
        lines += [_option(option) for option in options if option.name not in {spelling.name for spelling in SPELLINGS}]
    yield "\n".join(lines) + "\n"
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _sections(f"{title} {name}", inner)


def _option(option: click.Option) -> str:
    kinds = option.type.choices if isinstance(option.type, click.Choice) else ()
    value = "" if option.is_flag else f" {'|'.join(map(str, kinds)) or option.make_metavar(click.Context(group))}"
    default = "" if option.default in (None, False) or not option.show_default else f"`{option.default}`"
    if isinstance(option.default, tuple):
        default = ", ".join(f"`{each}`" for each in option.default)
    if option.required:
        default = "required"
    spelled = f"{option.opts[0]}{value}".replace("|", "\\|")
    return f"| `{spelled}` | {default} | {(option.help or '').replace('|', chr(92) + '|')} |"


def _row(spelling: Spelling) -> str:
    values = "\\|".join((*spelling.accepted, *spelling.refused)) if not spelling.flag else ""
    refused = f"; refused: {', '.join(spelling.refused)}" if spelling.refused and spelling.accepted else ""
    return f"| `--{spelling.name}{' ' + values if values else ''}` | {spelling.fate}{refused} | {spelling.way} |"


if __name__ == "__main__":
    print(page(), end="")
