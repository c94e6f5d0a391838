"""The layout: links that resolve, a link for every installed folder, names that say something."""

from tests.house.project import ROOMS, ROOT, files, pyproject

VAGUE = {"utils", "util", "helpers", "helper", "misc", "common"}


def _installed() -> dict[str, str]:
    tool = pyproject()["tool"]
    assert isinstance(tool, dict)
    packages = tool["scikit-build"]["wheel"]["packages"]
    assert isinstance(packages, dict)
    return packages


def test_every_installed_folder_has_a_link_and_every_link_a_row() -> None:
    rows = {name.removeprefix("ingot/"): folder for name, folder in _installed().items() if name != "ingot"}
    assert set(rows) == set(ROOMS)
    links = {path.name: path for path in (ROOT / "src/ingot").iterdir() if path.is_symlink() and path.is_dir()}
    assert set(links) == set(rows)
    for name, link in links.items():
        assert link.resolve() == ROOT / rows[name], f"src/ingot/{name} points elsewhere"
        assert not link.readlink().is_absolute()


def test_every_room_is_a_package() -> None:
    assert [room for room in ROOMS if not (ROOT / room / "__init__.py").is_file()] == []


def test_no_file_is_named_after_nothing() -> None:
    vague = [path for path in files(".py", ".cpp", ".h") if VAGUE & set(path.relative_to(ROOT).with_suffix("").parts)]
    assert vague == []


def test_the_package_is_typed() -> None:
    assert (ROOT / "src/ingot/py.typed").is_file()
