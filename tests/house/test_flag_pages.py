"""Flags of vLLM and llama.cpp: the pages of docs/from show the rows that the command line answers with."""

from collections import Counter
from pathlib import Path

import click
import pytest

from ingot.cli import app
from ingot.cli.llama_cpp_flags import LLAMA_CPP
from ingot.cli.other_flags import Flag
from ingot.cli.vllm_flags import VLLM
from tests.house.flag_pages import TABLES, written

PROGRAMS = pytest.mark.parametrize("rows", [VLLM, LLAMA_CPP], ids=["vllm", "llama_cpp"])
# `vllm serve --help` of 0.11 and llama.cpp's tools/server/README.md: what people give most
COMMON = {
    "vllm": "max-model-len max-num-seqs max-num-batched-tokens gpu-memory-utilization tensor-parallel-size dtype "
    "quantization enable-lora lora-modules speculative-config enforce-eager trust-remote-code served-model-name "
    "kv-cache-dtype block-size swap-space enable-prefix-caching enable-chunked-prefill generation-config seed "
    "reasoning-parser tool-call-parser enable-auto-tool-choice chat-template api-key host port "
    "pipeline-parallel-size data-parallel-size enable-expert-parallel cpu-offload-gb",
    "llama.cpp": "model ctx-size parallel batch-size ubatch-size threads-batch gpu-layers n-gpu-layers flash-attn "
    "cont-batching no-mmap mlock cache-type-k cache-type-v predict temp repeat-penalty grammar-file json-schema-file "
    "lora model-draft draft-max chat-template-file jinja metrics alias embedding mmproj numa hf-repo split-mode",
}


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_the_pages_have_the_rows(page: Path) -> None:
    assert page.read_text() == written(page), "run: python -m tests.house.flag_pages"


@PROGRAMS
def test_every_flag_has_one_row(rows: tuple[Flag, ...]) -> None:
    count = Counter(name for row in rows for name in row.names())
    assert [name for name, times in count.items() if times > 1] == []


@pytest.mark.parametrize(("program", "rows"), [("vllm", VLLM), ("llama.cpp", LLAMA_CPP)])
def test_common_flags_have_a_row(program: str, rows: tuple[Flag, ...]) -> None:
    known = {name for row in rows for name in row.names()}
    assert [name for name in COMMON[program].split() if f"--{name.replace('-', '_')}" not in known] == []


@PROGRAMS
def test_what_a_row_offers_exists(rows: tuple[Flag, ...]) -> None:
    """The first option of ours that a row names is one of the commands that it names."""
    context = click.Context(app.group, info_name="ingot")
    for row in rows:
        ours = [word.split()[0] for word in row.way.split("`")[1::2] if word.startswith("--")]
        for name in row.where.split(", ") if row.where not in ("", "request") else []:
            command = app.group.get_command(context, name)
            assert command is not None
            options = {option for param in command.params for option in param.opts}
            assert not ours or ours[0] in options, f"{row.flags}: ingot {name} has no {ours[0]}"
