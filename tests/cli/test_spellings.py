"""TensorRT-LLM's spellings: each accepted value is what ingot does, every other one is refused with the way to go."""

import pytest

from ingot.cli.options_page import page
from ingot.cli.spellings import SPELLINGS, Spelling, judge
from ingot.errors import UsageError
from tests.house.project import ROOT

CONTRACT = [
    "use_weight_only",
    "weight_only_precision",
    "tp_size",
    "pp_size",
    "max_output_len",
    "gemm_plugin",
    "gpt_attention_plugin",
    "paged_kv_cache",
    "remove_input_padding",
    "context_fmha",
    "use_paged_context_fmha",
    "kv_cache_type",
    "max_beam_width",
    "input_timing_cache",
    "output_timing_cache",
    "workers",
    "log_level",
    "profiling_verbosity",
    "strip_plan",
    "weight_streaming",
    "multiple_profiles",
    "gather_context_logits",
    "gather_generation_logits",
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.name)
def test_accepted_values_give_a_note_and_all_others_are_refused(spelling: Spelling) -> None:
    for value in spelling.accepted:
        assert spelling.way in judge(spelling, value)
    for value in (*spelling.refused, "nonsense"):
        with pytest.raises(UsageError, match="is refused") as caught:
            judge(spelling, value)
        assert caught.value.hint == spelling.way


def test_the_options_page_is_what_the_commands_say() -> None:
    written = (ROOT / "docs/options.md").read_text()
    assert written == page(), "run: python -m ingot.cli.options_page > docs/options.md"


@pytest.mark.parametrize("name", CONTRACT)
def test_every_spelling_has_a_row_on_the_page(name: str) -> None:
    rows = (ROOT / "docs/options.md").read_text().split("## Coming from TensorRT-LLM")[1]
    assert f"--{name}" in rows
