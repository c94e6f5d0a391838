"""TensorRT-LLM's spellings: each accepted value is what ingot does, every other one is refused with the way to go."""

import click
import pytest

from ingot.cli import app
from ingot.cli.absent_options import ABSENT
from ingot.cli.options_page import page
from ingot.cli.trtllm_compat import SPELLINGS, Spelling, judge
from ingot.errors import UsageError
from tests.house.project import ROOT

# `trtllm-build` of TensorRT-LLM 0.9 to 1.2, tensorrt_llm/commands/build.py and plugin/plugin.py
TRTLLM_BUILD = [
    "checkpoint_dir",
    "model_config",
    "build_config",
    "model_cls_file",
    "model_cls_name",
    "output_dir",
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_decoder_seq_len",
    "max_output_len",
    "max_beam_width",
    "max_num_tokens",
    "opt_num_tokens",
    "max_encoder_input_len",
    "max_prompt_embedding_table_size",
    "max_multimodal_len",
    "kv_cache_type",
    "paged_kv_cache",
    "input_timing_cache",
    "output_timing_cache",
    "profiling_verbosity",
    "strip_plan",
    "weight_sparsity",
    "weight_streaming",
    "fast_build",
    "workers",
    "log_level",
    "enable_debug_output",
    "visualize_network",
    "dry_run",
    "monitor_memory",
    "logits_dtype",
    "gather_context_logits",
    "gather_generation_logits",
    "gather_all_token_logits",
    "lora_dir",
    "lora_ckpt_source",
    "lora_target_modules",
    "max_lora_rank",
    "speculative_decoding_mode",
    "max_draft_len",
    "auto_parallel",
    "gpus_per_node",
    "cluster_key",
    "tp_size",
    "pp_size",
    "use_fused_mlp",
    "strongly_typed",
    "builder_opt",
    "weight_only_precision",
    "use_refit",
    "hardware_compatible",
    "bert_attention_plugin",
    "gpt_attention_plugin",
    "gemm_plugin",
    "lookup_plugin",
    "lora_plugin",
    "dora_plugin",
    "moe_plugin",
    "mamba_conv1d_plugin",
    "nccl_plugin",
    "context_fmha",
    "context_fmha_fp32_acc",
    "bert_context_fmha_fp32_acc",
    "remove_input_padding",
    "use_custom_all_reduce",
    "multi_block_mode",
    "enable_xqa",
    "attention_qk_half_accumulation",
    "tokens_per_block",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "use_context_fmha_for_generation",
    "multiple_profiles",
    "paged_state",
    "streamingllm",
    "reduce_fusion",
    "user_buffer",
    "gemm_allreduce_plugin",
    "pp_reduce_scatter",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "qserve_gemm_plugin",
    "fuse_fp4_quant",
    "norm_quant_fusion",
    "manage_weights",
]

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


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["build", "--speculative_decoding_mode", "eagle"], "--draft_dir builds a draft model"),
        (["build", "--opt-num-tokens", "64"], "any number of tokens"),
        (["build", "--lora_dir", "a", "b"], "merge the adapter"),
        (["convert", "--smoothquant", "0.5"], "calibrated"),
        (["convert", "--n_layer", "32"], "config.json"),
    ],
)
def test_options_that_are_not_there_are_refused_by_name(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(args) == 2
    said = capsys.readouterr().err
    assert "is an option of TensorRT-LLM that ingot does not have" in said
    assert words in said
    assert app.run(["run", *args[1:]]) == 2
    assert "TensorRT-LLM" not in capsys.readouterr().err, "other commands have no such history"


def test_no_option_is_both_there_and_absent() -> None:
    context = click.Context(app.group, info_name="ingot")
    for name in ("build", "convert"):
        command = app.group.get_command(context, name)
        assert command is not None
        assert {param.name for param in command.params} & set(ABSENT) == set()
    assert [name for name in TRTLLM_BUILD if name not in ABSENT and name not in _build_options()] == []


def _build_options() -> set[str]:
    command = app.group.get_command(click.Context(app.group, info_name="ingot"), "build")
    assert command is not None
    return {str(param.name) for param in command.params}


def test_the_options_page_is_what_the_commands_say() -> None:
    written = (ROOT / "docs/options.md").read_text()
    assert written == page(), "run: python -m ingot.cli.options_page > docs/options.md"


@pytest.mark.parametrize("name", CONTRACT)
def test_every_spelling_has_a_row_on_the_page(name: str) -> None:
    rows = (ROOT / "docs/options.md").read_text().split("## Coming from TensorRT-LLM")[1]
    assert f"--{name}" in rows
