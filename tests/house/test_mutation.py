"""The command that plants faults tells noticed ones from others, and refuses a list that does not fit the tree."""

from pathlib import Path

import pytest

from tests.mutation.run import LIST, REPOSITORY, Fault, MutationError, read_faults, run_faults

SUM = "def add(a, b):\n    return a + b\n\n\ndef forever(n):\n    while n > 0:\n        n -= 1\n"
TEST = "from small import add, forever\n\n\ndef test_add():\n    assert add(2, 2) == 4\n    forever(3)\n"
FAULTS = [("minus", "a + b", "a - b"), ("times", "a + b", "a * b"), ("no Python", "a + b", "a +")]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One module, and a test that cannot tell sums from products of 2 and 2."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time that pytest takes to start
    tree = tmp_path / "tree"
    (tree / "src" / "ingot").mkdir(parents=True)
    (tree / "src" / "small.py").write_text(SUM)
    (tree / "test_code.py").write_text(TEST)
    return tree


def faults_of(tree: Path, *chosen: tuple[str, str, str], tests: str = "test_code.py") -> list[Fault]:
    path = tree.parent / "faults.toml"
    path.write_text(
        "\n".join(
            f'[[fault]]\nwhat = "{what}"\nfile = "src/small.py"\nold = "{old}"\nnew = "{new}"\ntests = ["{tests}"]'
            for what, old, new in chosen
        )
    )
    return read_faults(path, tree)


@pytest.mark.slow
def test_what_no_test_notices_is_named(tree: Path) -> None:
    said: dict[str, bool] = {}
    faults = faults_of(tree, *FAULTS)
    missed = run_faults(faults, tree, 2, 60.0, lambda fault, noticed: said.update({fault.what: noticed}))
    assert said == {"minus": True, "times": False, "no Python": True}
    assert [fault.what for fault in missed] == ["times"]
    assert (tree / "src" / "small.py").read_text() == SUM, "faults are planted in copies"


@pytest.mark.slow
def test_a_fault_that_makes_tests_endless_is_noticed(tree: Path) -> None:
    assert not run_faults(faults_of(tree, ("endless", "n -= 1", "n -= 0")), tree, 1, 1.5, lambda *_: None)


@pytest.mark.parametrize(
    ("fault", "tests", "words"),
    [
        (("gone", "a / b", "a"), "test_code.py", "is there 0 times"),
        (("twice", "n", "m"), "test_code.py", "times"),
        (("same", "a + b", "a + b"), "test_code.py", "expected once"),
        (("no test", "a + b", "a"), "test_gone.py", "there is no test_gone.py"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(fault: tuple[str, str, str], tests: str, words: str, tree: Path) -> None:
    with pytest.raises(MutationError, match=words):
        faults_of(tree, fault, tests=tests)


def test_tests_must_pass_without_faults(tree: Path) -> None:
    (tree / "test_code.py").write_text(TEST.replace("== 4", "== 5"))
    with pytest.raises(MutationError, match="fail without a fault"):
        run_faults(faults_of(tree, FAULTS[0]), tree, 1, 60.0, lambda fault, noticed: None)


def test_a_test_that_is_not_there_notices_nothing(tree: Path) -> None:
    with pytest.raises(MutationError, match="fail without a fault"):
        run_faults(faults_of(tree, FAULTS[0], tests="test_code.py::test_gone"), tree, 1, 60.0, lambda *_: None)


def test_the_list_fits_the_tree() -> None:
    assert read_faults(LIST, REPOSITORY)
