"""The programs that a test can run: on the shipped model, small."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ingot
from ingot.builder.build import build
from ingot.builder.calibrate import SAMPLE_TEXT
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.plugins.cpu.native import detect_isa
from ingot.quickstart import SHIPPED
from tests.convert.gguf.test_architectures import CASES
from tests.house.project import ROOT
from tests.peers.models import SHAPES, write_model
from tests.plugins.cuda.conftest import emulation as emulation
from tests.plugins.cuda.emulation import Emulation
from tests.programs import compare_commits, gguf_mixtures, gguf_speed, gguf_tokens, random_quantised
from tests.programs.all_reduce_alone import find_compiler
from tests.programs.block_times import LAYOUTS
from tests.programs.llama_tools import LlamaTools
from tests.real_models import REAL_MODELS

TINY = {
    **SHAPES["tinyllama"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("programs")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "checkpoint"))
    build(BuildConfig(), work / "checkpoint", work / "engine")
    return work / "engine"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "error", "-m", f"tests.programs.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_engines_are_compared(engine: Path) -> None:
    text = run("compare_engines", engine, engine, "--input_len", 20, "--output_len", 4, "--rounds", 2)
    assert "1 x 20 tokens in, 4 out, 2 rounds in turn" in text
    assert [line.split(" | ")[0] for line in text.splitlines()[-2:]] == ["| prefill", "| decode"]


def test_kernels_are_timed_by_rows() -> None:
    kernels = ("matmul.w4a8.avx2:32", "matmul.w4ta8.avx2:32")
    head, _, *rows = run("time_products", *kernels, "--rows", "1,9", "--n", 64, "--k", 64, "--rounds", 1).splitlines()
    assert head == "| rows | `matmul.w4a8.avx2:32` | `matmul.w4ta8.avx2:32` |"
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 9"]
    assert all(row.count(" GB/s)") == 2 for row in rows)


def test_products_of_experts_are_timed_by_rows() -> None:
    kernels = ("moe_gate_up.w8.avx2", "moe_down.w8.avx2")
    shape = ("--experts", 3, "--slots", 2, "--n", 64, "--k", 64, "--rounds", 1)
    head, _, *rows = run("time_products", *kernels, "--rows", "1,9", *shape).splitlines()
    assert head == "| rows | `moe_gate_up.w8.avx2:0` | `moe_down.w8.avx2:0` |"
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 9"]
    assert all(row.count(" GB/s)") == 2 for row in rows)


@pytest.mark.slow
def test_attention_is_timed_by_contexts() -> None:
    kernels = ("paged_attention.bf16.avx2", "paged_attention.int8.avx2")
    shape = ("--heads", 4, "--kv_heads", 2, "--head_dim", 8, "--rounds", 2)
    head, _, *rows = run("time_attention", *kernels, "--steps", "2x40,prompt:33", *shape).splitlines()
    assert head == "| step | `paged_attention.bf16.avx2` | `paged_attention.int8.avx2` |"
    assert [row.split(" | ")[0] for row in rows] == ["| 2x40", "| prompt:33"]
    assert all(row.count(" GB/s)") == 2 for row in rows)


@pytest.mark.slow
def test_each_precision_has_a_row(tmp_path: Path) -> None:
    """Of a random model: fewer bytes, and errors that grow. So have types of the KV cache."""
    write_model(TINY, tmp_path / "m")
    text = tmp_path / "text"
    text.write_text(SAMPLE_TEXT.read_text()[:600])
    table = run("precisions", tmp_path / "m", text)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    precisions, caches = ["f32", "bf16", "w8", "w4g32", "w4g64", "w4g128"], ["f32", "bf16", "int8", "fp8"]
    assert [row[0].strip("| `") for row in rows] == precisions + caches
    sizes, errors = ([float(row[column].split()[0]) for row in rows] for column in (1, 4))
    assert sizes[0] > 1.9 * sizes[1]
    least = 1.5 if detect_isa() == "avx512bf16" else 1.58  # 12 or 16 bits, over 8
    assert sizes[1] > least * sizes[2] > least * sizes[3]
    assert errors[0] <= errors[1] < errors[2] < errors[3]
    assert sizes[6] == 2 * sizes[7] > 2 * sizes[8] == 2 * sizes[9]
    assert errors[6] <= errors[7] <= errors[8] < errors[9]


def test_a_commit_has_lost_where_three_rounds_of_four_say_so() -> None:
    before = [100.0] * 8

    def lost(*after: float) -> bool:
        return compare_commits.Row(name="case", before=before, after=after).lost

    assert not lost(*before)
    assert not lost(*[102.0] * 8)
    assert lost(*[104.0] * 8)
    assert lost(*[104.0] * 6, 90.0, 200.0), "one round is noise"
    assert not lost(*[104.0] * 5, 100.0, 100.0, 100.0)


def test_a_part_of_the_list_is_chosen_by_names() -> None:
    assert len(compare_commits.chosen([])) == 9
    assert compare_commits.chosen(["w8, 8 x", "bf16, 1 x"]) == [("w8", 64, 8), ("bf16", 512, 1)]
    assert compare_commits.chosen(["w3"]) == []


@pytest.mark.slow
def test_two_worktrees_run_the_same_cases(tmp_path: Path) -> None:
    """Both are the ingot that is tested here."""
    (tmp_path / "root/src").mkdir(parents=True)
    (tmp_path / "root/src/ingot").symlink_to(Path(ingot.__file__).parent)
    write_model(TINY, tmp_path / "tiny")
    rows = compare_commits.compare([tmp_path / "root"] * 2, tmp_path / "tiny", tmp_path, 1, [("w8", 20, 2)])
    assert [row.name for row in rows] == ["w8, 2 x 20 tokens, TTFT", "w8, 2 x 20 tokens, TPOT"]
    assert all(0 < each < 60_000 for row in rows for each in (*row.before, *row.after))


def test_a_worktree_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init",), ("add", "file"), ("commit", "-m", "one")):
        (repository / "file").write_text("one")
        subprocess.run(["git", *names, *arguments], cwd=repository, check=True, capture_output=True)
    command = "open('built', 'a').write(open('file').read())"
    monkeypatch.setattr(compare_commits, "BUILD", ((sys.executable, "-c", command),))
    roots = {compare_commits.prepare("HEAD", tmp_path, repository) for _ in range(2)}
    assert [(root / "built").read_text() for root in roots] == ["one"]
    with pytest.raises(SystemExit, match="rev-parse"):
        compare_commits.prepare("no-such-commit", tmp_path, repository)


@pytest.mark.slow
def test_grammar_costs(engine: Path) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    table = run("grammar_costs", engine, "--rounds", 1)
    assert [line.split(",")[0].strip("| ") for line in table.splitlines()[2:]] == ["compile", "mask", "consume"]


@pytest.mark.slow
def test_the_way_of_a_request(engine: Path) -> None:
    """Four threads, each of which sees only its own part."""
    lines = run("trace_request", "--engine_dir", engine).splitlines()
    pairs = zip(lines[0:-1:2], lines[1:-1:2], strict=True)  # the last one adds up
    modules = {head.split(":")[0]: set(found.strip().split(", ")) for head, found in pairs}
    assert set(modules) == {"loop", "prepare", "engine", "text"}
    assert {"runtime.scheduler", "plugins.cpu.session"} <= modules["engine"]
    assert not modules["engine"] & {"runtime.tokenizer", "runtime.text_stream", "runtime.chat_template"}
    assert not modules["loop"] & {"runtime.tokenizer", "runtime.scheduler", "runtime.step_loop"}
    assert "runtime.scheduler" not in modules["text"] | modules["prepare"]


@pytest.mark.slow
def test_guided_storm(engine: Path) -> None:
    """Fails by itself for a wrong answer, or where anything is left. 10,000 requests: python -m, as its head says."""
    pytest.importorskip("llguidance", reason="needs llguidance")
    counts, preempted, *_ = run("guided_storm", engine, "--requests", 300).splitlines()
    assert int(preempted.removeprefix("preempted: ")) > 0
    assert counts.startswith("300 requests in ")
    assert all(each in counts for each in ("free", "given up", "guided, whole", "refused"))


@pytest.mark.slow
def test_hostile_schemas(engine: Path) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    options = ("--seconds", 0.4, "--rounds", 1, "--form", "a cycle", "--form", "doubling")
    steps, slowest, *table, last = run("hostile_schemas", engine, *options).splitlines()
    assert steps.endswith("of 1 forms that are not refused:")
    assert slowest.endswith(": doubling")
    assert len(table) == 6
    assert "200" in last


@pytest.mark.slow
def test_guided_share(engine: Path) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    table = run("guided_share", engine, engine, "--rows", 4, "--rounds", 1, "--context", 16, "--steps", 4)
    head, *rows = table.splitlines()
    assert head.startswith("4 rows, ")
    assert rows[-1].startswith("| share of grammars | ")
    assert rows[-1].endswith("% |")


@pytest.mark.slow
def test_the_way_of_a_weight() -> None:
    """Each room sees its own part, and the table of the documents names no module that weights do not pass."""
    modules, documented = _stages(run("trace_weight")), _stages((ROOT / "docs/design.md").read_text())
    assert [stage.split(":")[0] for stage in modules] == ["convert", "build", "build", "open", "open"]
    for stage, names in modules.items():
        room = stage.split(":")[0].replace("build", "builder").replace("open", "runtime")
        assert {name.split(".")[0] for name in names} & {"convert", "builder", "runtime"} <= {room}
        assert documented[stage] <= names


def _stages(text: str) -> dict[str, set[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: set(row[1].replace("`", "").split(", ")) for row in rows if len(row) == 2 and ": " in row[0]}


@pytest.mark.slow
def test_the_way_of_input_ids() -> None:
    """One pass makes of them what they are in the Plan; another one ends the positions that the graph makes of their
    shape."""
    lines = run("trace_input_ids").splitlines()
    assert lines[2:6] == [
        "| graph of the Checkpoint | Gather, Shape |",
        "| after `insert_embedding` | Embedding, Shape |",
        "| after `insert_paged_attention` | Embedding |",
        "| Plan | `embedding` |",
    ]
    assert [line.split(":")[0] for line in lines[9:]] == ["| step", "| session"]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_ranks_are_taken_away_at_random_moments(rounds: int) -> None:
    assert f"{rounds} rounds, the longest" in run("rank_faults", "--rounds", rounds)


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs mpirun and mpicxx of Open MPI or MPICH")
def test_sums_of_ranks_are_timed_beside_those_of_mpi() -> None:
    """The program compares each sum with what it must be."""
    lines = run("all_reduce_alone", "--rounds", 2).splitlines()
    ways = [line.split(" | ")[1] for line in lines[3:]]
    assert len(ways) == 16
    assert set(ways) == {
        "ingot, sums left where the ranks meet",
        "ingot, sums on every rank",
        "MPI_Allreduce",
        "MPI_Allreduce in place",
    }


@pytest.mark.slow
def test_moves_of_blocks_are_timed() -> None:
    first, *rows = run("block_times", "--rounds", 3, "--layers", 3, "--kv_heads", 4, "--head_dim", 16).splitlines()
    assert first.startswith("blocks of 24 KiB")
    assert [row.split(":")[0] for row in rows] == [f"tp {tp} x pp {pp}" for tp, pp in LAYOUTS]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_prompts_apart_are_compared_with_one_server(tmp_path: Path) -> None:
    rows = [{"arrival": n / 10, "input_len": 40 + 60 * n, "output_len": 8} for n in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--trace", tmp_path / "t.jsonl", "--rate", 9, "--num_requests", 4, "--rounds", 1)
    found = [line.rsplit(maxsplit=6) for line in run("apart_tails", *options).splitlines()]
    names = [(form, name) for form in ("one server", "prefill apart") for name in ("ttft", "tpot")]
    assert [(form, name) for form, name, *_ in found] == names
    for _, _, *shares, _, count in found:
        assert count == "4"
        assert 0 < float(shares[0]) <= float(shares[1]) <= float(shares[2])


@pytest.mark.slow
def test_memory_of_quantising_is_printed_by_layers() -> None:
    widths = ("--hidden", 64, "--inner", 96, "--heads", 2, "--kv_heads", 1, "--vocab", 400)
    _, _, *rows = run("quantize_memory", "--layers", 1, *widths, "--calibration_tokens", 256).splitlines()
    assert re.fullmatch(r"\| 1 \| [\d.]+ [MG]iB \| 0\.\d+ GiB \| \d+ s \| \d+ s \|", rows[0]), rows


@pytest.mark.slow
def test_time_of_quantising_a_weight_is_printed_beside_its_operations() -> None:
    *_, row = run("quantize_times", 96, 64, "--tokens", 300).splitlines()
    number = r"[\d.]+"
    figures = rf"{number}, {number} Gop/s \| 0\.\d s \| {number} s \| \d+% \| 0\.\d+ GiB"
    assert re.fullmatch(rf"\| 96 x 64 \| 300 \| 0\.00 \| {figures} \|", row), row


@pytest.mark.slow
def test_damaged_checkpoints_are_refused_or_read_right() -> None:
    """Of each way of storing codes one format; the program itself fails where one is not."""
    names = ("gptq v1 asymmetric, desc_act", "ct nvfp4", "bnb nf4", "gguf 2")
    lines = run("hostile_quantised", *names, "--count", 5).splitlines()
    assert [line.split(": ")[0] for line in lines] == list(names)
    assert all(" refused" in line for line in lines)


def test_a_random_quantised_checkpoint_has_the_numbers_that_were_written(tmp_path: Path) -> None:
    assert "'quant_method': 'awq'" in random_quantised.check("awq", 0, tmp_path)


@pytest.mark.slow  # of every format two
def test_random_quantised_checkpoints_have_the_numbers_that_were_written() -> None:
    lines = run("random_quantised", "--count", 2, "--seed", 100).splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["2 of 2 equal"] * (len(random_quantised.FORMATS) + 1)


def test_tensors_of_a_gguf_file_have_the_types_of_its_mixture() -> None:
    def types(kind: str, columns: int, *, tied: bool = True) -> list[str]:
        names = ["token_embd", "output", "blk.0.attn_v", "blk.3.ffn_down", "blk.2.ffn_down", "blk.2.attn_norm"]
        return [gguf_tokens.tensor_type(kind, f"{name}.weight", columns, 8, tied=tied) for name in names]

    assert types("Q4_K_M", 256) == ["Q6_K", "Q6_K", "Q6_K", "Q6_K", "Q4_K", "F32"]
    assert types("IQ4_XS", 256, tied=False) == ["IQ4_XS", "Q6_K", "IQ4_XS", "IQ4_XS", "IQ4_XS", "F32"]
    assert types("Q4_K_M", 96) == ["Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q5_0", "F32"]
    assert types("Q8_0", 172) == ["F16"] * 5 + ["F32"]


@pytest.mark.slow
def test_llama_cpp_reads_the_same_files(tmp_path: Path) -> None:
    for name in ("gguf", "xllamacpp"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
    text = tmp_path / "text.json"
    text.write_text(json.dumps([SAMPLE_TEXT.read_text()[at : at + 250] for at in range(0, 280, 70)]))
    numbers = ("--prompts", 4, "--tokens", 4)
    plain, mixed = run("gguf_tokens", SHIPPED, text, "F32", "Q4_K_M", *numbers).splitlines()[2:]
    assert plain.split(" | ")[1:6] == ["f32", "4 of 4", "4 of 4", "4, 4", "4, 4"]
    assert mixed.startswith("| Q4_K_M (")
    row = run("gguf_speed", SHIPPED, tmp_path, "Q4_0", "--rounds", 1, "--prompt", 20, "--tokens", 4).splitlines()[-1]
    assert row.startswith("| Q4_0 | w4tg32 | ")
    (taken,) = run("gguf_tokens", tmp_path / "Q4_0.gguf", text, *numbers).splitlines()[2:]
    assert taken.startswith("| Q4_0 (28 Q4_0, 9 F32, 1 Q6_K) | w4tg32 | ")


@pytest.mark.slow
def test_llama_cpp_makes_and_reads_files_with_its_own_programs(tmp_path: Path) -> None:
    tools = LlamaTools.on_path()
    if tools is None:
        pytest.skip("needs llama-quantize and llama-server")
    text = tmp_path / "text.json"
    text.write_text(json.dumps([SAMPLE_TEXT.read_text()[at : at + 250] for at in range(0, 280, 70)]))
    numbers = ("--prompts", 4, "--tokens", 4, "--tools", tools.folder)
    plain, mixed = run("gguf_tokens", SHIPPED, text, "F32", "Q4_K_M", *numbers).splitlines()[2:]
    assert plain.split(" | ")[1:6] == ["f32", "4 of 4", "4 of 4", "4, 4", "4, 4"]
    assert mixed.startswith("| Q4_K_M (24 Q4_K, 9 F32, 5 Q6_K) | "), "the mixture that gguf_tokens makes itself"


@pytest.mark.slow
@pytest.mark.parametrize("name", gguf_mixtures.MIXTURES)
def test_files_of_mixtures_are_read(name: str, tmp_path: Path) -> None:
    """With sizes that the settings of a mixture do not name."""
    mixture = gguf_mixtures.MIXTURES[name]
    config = {**REAL_MODELS[name].cut(mixture.layers), **mixture.change, "vocab_size": 61, "hidden_size": 64}
    few = {"num_experts": 10, "num_local_experts": 10}
    config |= {key: value for key, value in few.items() if key in config}
    gguf_mixtures.write_mixture(tmp_path / "plain.gguf", mixture, config, {})
    report = convert(ConvertOptions(model_dir=tmp_path / "plain.gguf", output_dir=tmp_path / "checkpoint"))
    assert report.model.family == CASES[mixture.architecture].family
    assert report.model.num_layers == mixture.layers


def test_speeds_of_a_gguf_file_are_medians_with_the_ratio_of_each_round() -> None:
    turns = [[(30.0, 4.0), (10.0, 4.0), (20.0, 8.0)], [(10.0, 4.0)] * 3]
    assert gguf_speed.row("Q4_0", "w4tg32", turns) == (
        "| Q4_0 | w4tg32 | 20 | 10 | 3.00, 1.00, 2.00 | 4 | 4 | 1.00, 1.00, 2.00 |"
    )


@pytest.mark.slow
def test_the_host_of_a_gpu_is_timed(emulation: Emulation, tmp_path: Path) -> None:
    """On the emulated GPU, whose kernels are left out."""
    numbers = ("--sequences", "1,3", "--steps", 4, "--rounds", 1, "--graph_us", 200, "--engine_dir", tmp_path)
    head, _, *rows = run("host_time", *numbers, "--parts", "--streamed", "--sampled").splitlines()
    names = head.strip("| ").split(" | ")
    assert names[:4] == ["sequences", "engine", "scheduler", "batch"]
    assert names[-3:] == ["reader", "step", "ahead"]
    for row, size in zip(rows, ("1", "3"), strict=True):
        found = dict(zip(names, row.strip("| ").split(" | "), strict=True))
        assert found["sequences"] == size
        assert float(found["engine"]) > 100
        assert float(found["step"]) > 100
        assert found["ahead"] == "100"
