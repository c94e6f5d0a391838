"""What newcomers ask: where each answer stands, and the words that carry it."""

import re

import pytest

from ingot.builder.timing_cache import FORMAT
from ingot.checkpoint import CHECKPOINT_SCHEMA
from ingot.manifest import ENGINE_SCHEMA
from ingot.plan import PLAN_SCHEMA
from tests.house.project import ROOT

# question: page, what must be found there
QUESTIONS = {
    "How do I install without a compiler?": ("docs/how-to/install.md", r"Run `make wheel` on a machine with a"),
    "Which families work?": ("docs/support.md", r"\| `llama` \| Llama 2"),
    "Which systems and processors?": ("docs/how-to/install.md", r"x86-64 with AVX2(.|\n)*macOS, Windows and ARM"),
    "Is my Qwen2.5 AWQ checkpoint supported?": ("docs/quantised_checkpoints.md", r"\| awq \| version gemm"),
    "Is my GGUF Q4_K_M file supported?": ("docs/quantised_checkpoints.md", r"Q4_K_M, Q5_K_S or the like .* is read"),
    "How much memory does an 8B in w4 take?": ("docs/how-to/limits.md", r"\| `w4g128`, KV in bf16 \| 4.3 GiB"),
    "How do I cap memory?": ("docs/how-to/limits.md", r"## Cap it(.|\n)*--kv_cache_memory 4GiB"),
    "What does max_num_tokens do?": ("docs/how-to/limits.md", r"### max_num_tokens(.|\n)*Lower `max_num_tokens` when"),
    "How do I serve behind nginx, with TLS and keys?": ("docs/how-to/serve.md", r"proxy_buffering|nginx.conf"),
    "What happens on SIGTERM?": ("docs/how-to/serve.md", r"SIGTERM.*503.*`--drain_timeout` \(30 s\)"),
    "What does exit 1 of build mean?": ("docs/errors.md", r"\| 1 \| the work failed"),
    "Which code does build give for an unknown precision?": ("docs/errors.md", r"\| 2 \|.*`--precision w5`"),
    "How long does an 8B take to build?": ("docs/how-to/limits.md", r"an 8B \(15 GiB\) on two cores(.|\n)*8 minutes"),
    "How do I set a startup probe?": ("docs/how-to/deploy.md", r"startupProbe(.|\n)*failureThreshold"),
    "How fast are weights loaded?": ("docs/how-to/deploy.md", r"seconds for each GiB of weights"),
    "What is left after Ctrl-C?": ("docs/errors.md", r"interrupted leaves no output directory that looks finished"),
    "How do I build here and run on another CPU?": ("docs/how-to/deploy.md", r"Without `--target` the engine is for"),
    "How do I prove that engine and checkpoint are equal?": ("docs/verify.md", r"ingot verify \S+ --against"),
    "How do I measure TTFT, TPOT and goodput?": ("docs/how-to/measure.md", r"bench serve --url(.|\n)*goodput"),
    "How do I get log probabilities of a prompt?": ("docs/sampling.md", r"`prompt_logprobs`"),
    "When do two runs give the same tokens?": ("docs/reproducibility.md", r"same bits"),
    "How do I add a family?": ("docs/how-to/add.md", r"convert/families/<model_type>.py"),
    "How do I add a fused op?": ("docs/how-to/add.md", r"(?i)fused op"),
    "Which alerts shall I set?": ("docs/how-to/serve.md", r"\| alert \| fires when"),
    "How do I replace an engine without dropped requests?": (
        "docs/how-to/deploy.md",
        r"Replace an engine without dropped",
    ),
    "What is w4g128, and what does it lose?": ("docs/how-to/quantise.md", r"In `w4g128` a weight is a 4-bit code"),
    "Can I use several GPUs?": ("docs/how-to/limits.md", r"## Several GPUs(.|\n)*CUDA_VISIBLE_DEVICES"),
    "What becomes of my trtllm-build options?": ("docs/options.md", r"## Coming from TensorRT-LLM"),
    "Does it run code of a model?": ("docs/from/vllm.md", r"ingot runs no code of a model"),
    "Is it safe to open a model of strangers?": ("docs/security.md", r"never runs it(.|\n)*What is not defended"),
    "Does it respect the quota of a container?": (
        "docs/how-to/serve.md",
        r"the quota of a container .* cgroup v2 \| yes",
    ),
    "How do I send prompts of 32k tokens?": ("docs/how-to/limits.md", r"--max_seq_len 32768 --max_input_len 32767"),
    "How do I change API keys?": ("docs/how-to/serve.md", r"reads the file once, when it starts"),
    "How do I update ingot?": ("docs/how-to/deploy.md", r"## After an update of ingot(.|\n)*To update, follow"),
    "Does my old Checkpoint survive an update?": ("docs/changes.md", r"\| Checkpoint \| .*convert the model again"),
    "How do I use a LoRA adapter?": ("docs/how-to/lora.md", r"merge_and_unload\(\)"),
    "My p99 TPOT must be 50 ms: what do I turn?": ("docs/how-to/latency.md", r"(?s)--max_batch_size.*--tpot_target"),
    "How many 8k requests of an 8B fit into 32 GB?": ("docs/how-to/limits.md", r"requests fit(.|\n)*20 requests"),
    "How do I query p99?": ("docs/metrics.md", r"histogram_quantile\(0.99"),
    "Is it faster than vLLM on CPUs?": ("docs/from/vllm.md", r"vLLM.s CPU backend beside(.|\n)*times as fast in\sbf16"),
    "Does it download anything?": ("README.md", r"ingot downloads nothing"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_documents_answer(question: str) -> None:
    page, words = QUESTIONS[question]
    assert re.search(words, (ROOT / page).read_text()), f"{page} no longer answers: {question}"


def test_the_numbers_of_the_formats() -> None:
    page = (ROOT / "docs/changes.md").read_text()
    assert f"`schema_version` in its `config.json`, now {CHECKPOINT_SCHEMA} |" in page
    assert f"`schema_version` of its `config.json`, now {ENGINE_SCHEMA}, and `plan_schema` of its plans, now" in page
    assert f"now {PLAN_SCHEMA} |" in page
    assert f'`"timing_cache": {FORMAT}`' in page
