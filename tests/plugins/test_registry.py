"""Targets and ops are found by name; families resolve to the best member that runs here."""

import subprocess
import sys
from collections.abc import Callable

import pytest

import ingot.plugins.registry as registry
from ingot.errors import PassError, TargetError, UsageError
from ingot.plugins.op import Op
from ingot.plugins.ref.target import RefTarget
from ingot.plugins.target import EnginePart, Target


class Paper(RefTarget):
    """A target with any name; `lack` says why it cannot run here."""

    def __init__(self, name: str, lack: str | None) -> None:
        self.name, self._lack = name, lack

    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        return self._lack


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> tuple[Target, ...]:
    """paper/a cannot run here, paper/b and paper/c can."""
    members = (Paper("paper/a", "too thin"), Paper("paper/b", None), Paper("paper/c", None))
    monkeypatch.setattr(registry, "targets", lambda names=None: members)
    return members


def test_ref_is_found() -> None:
    assert registry.find_target("ref").name == "ref"
    assert "ref" in [target.name for target in registry.targets()]


def test_targets_are_found_by_their_names_alone() -> None:
    every = registry.targets()
    for target in every:
        assert target in registry.targets([target.name])
        family = target.name.split("/")[0]
        assert [each.name for each in registry.targets([family]) if each.name.split("/")[0] == family] == [
            each.name for each in every if each.name.split("/")[0] == family
        ]
    assert registry.targets(["paper"]) == ()


def test_who_runs_on_cpus_waits_for_no_other_target() -> None:
    code = (
        "import sys; from ingot.plugins.registry import fit_targets; fit_targets(['cpu/avx2'], where='here');"
        "print([name for name in sys.modules if name.startswith(('ingot.plugins.cuda', 'ingot.plugins.tensorrt'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_exact_name_is_found_whether_it_runs_here_or_not(family: tuple[Target, ...]) -> None:
    assert registry.find_target("paper/a") is family[0]


def test_a_family_is_its_best_member_that_runs_here(family: tuple[Target, ...]) -> None:
    assert registry.find_target("paper") is family[1]


def test_a_family_without_a_member_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "targets", lambda names=None: (Paper("paper/a", "too thin"), Paper("paper/b", "too thick"))
    )
    with pytest.raises(TargetError, match="paper/a: too thin; paper/b: too thick"):
        registry.find_target("paper")


def test_an_unknown_target_lists_the_known_ones(family: tuple[Target, ...]) -> None:
    with pytest.raises(UsageError, match=r"no target 'stone'(.|\n)*paper, paper/a, paper/b, paper/c"):
        registry.find_target("stone")


def test_an_unknown_op_lists_the_known_ones() -> None:
    with pytest.raises(PassError, match=r"no op 'sing'(.|\n)*matmul"):
        registry.find_op("sing")


def named(holds: Callable[[Op], object]) -> set[str]:
    return {name for name in registry.op_names() if holds(registry.find_op(name))}


def test_what_ops_are_by_their_specs() -> None:
    """Builder, plan and targets ask for these instead of listing names."""
    assert named(lambda op: op.is_matmul) == {"matmul", "fp8_matmul"}
    assert named(lambda op: op.packed is not None) > {"matmul", "head_matmul", "moe_gate_up", "moe_down"}
    assert named(lambda op: op.by_dtype) >= {"matmul", "embedding", "rope_kv_write", "paged_attention"}
    assert not named(lambda op: op.by_dtype) & {"rope_query", "rope_table", "rms_norm", "gather_rows", "softcap"}
    assert named(lambda op: op.norms) == named(lambda op: op.norms and op.residual is not None)
    for name in registry.op_names():
        op = registry.find_op(name)
        given = len(op.inputs) - len(op.batch_inputs)
        assert all(0 <= index < given for index in op.decisive), f"{name}: decisive inputs are activations"
        assert not {*op.decisive} & {op.packed, op.residual, *op.vectors, *op.tables}, name
        assert not op.monotone or (len(op.inputs) == 1 and op.by_rows), name


def test_a_plan_says_who_writes_and_reads_the_cache() -> None:
    """By the inputs of its steps, which `plan_check.py` looks at: it knows no ops."""
    for name in registry.op_names():
        op = registry.find_op(name)
        inputs = {each.rstrip("?") for each in op.inputs}
        assert ({"block_tables", "token_sequences"} <= inputs) == op.writes_kv, name
        assert ({"block_tables", "past_lengths"} <= inputs) == (op.reads_kv or op.state is not None), name


def test_what_works_row_by_row() -> None:
    """Rows of the last layer that nobody wants are left out of these alone."""
    found = {name for name in registry.op_names() if registry.find_op(name).by_rows}
    assert found >= {"matmul", "moe_route", "moe_down", "layer_norm", "softcap", "mix_streams", "take_columns"}
    others = {"embedding", "gather_rows", "rope_table", "rope_query", "rope_kv_write", "paged_attention", "sample"}
    assert not found & (others | {"latent_kv_write", "latent_attention", "causal_conv", "linear_attention"})
    assert not found & {"all_reduce", "all_gather", "send", "recv"}
