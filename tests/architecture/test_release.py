"""A release has one version: of every distribution, of their requirements of each other, and of the changelog."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools.release import CHANGELOG, ROOT, main, projects, range_of, texts


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of every file that holds a version or a requirement, at version 0.1.0."""
    for file in [*texts(ROOT), ROOT / CHANGELOG]:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    assert main(["--root", str(tmp_path), "0.1.0", "--write"]) == 0
    return tmp_path


def contents(tree: Path) -> dict[Path, str]:
    return {file: file.read_text() for file in sorted(tree.rglob("*")) if file.is_file()}


def test_the_range_of_a_requirement_ends_where_names_may_change() -> None:
    assert [range_of(version) for version in ("0.1.0", "0.12.3", "1.4.0")] == [">=0.1,<0.2", ">=0.12,<0.13", ">=1.4,<2"]


def test_versions_requirements_and_changelog_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert "tools/release.py --check" in lint


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("plugins/slapo-tp/pyproject.toml", 'version = "0.1.0"', 'version = "0.1.1"', 'must be version = "0.1.0"'),
        ("plugins/slapo-tp/pyproject.toml", "runtime>=0.1,<0.2", "runtime>=0.1,<0.3", "slapo-runtime>=0.1,<0.2"),
        ("examples/slapo-hello/pyproject.toml", "core>=0.1,<0.2", "core>=0.0,<0.1", "slapo-core>=0.1,<0.2"),
        ("plugins/slapo-tp/pyproject.toml", '"tests", ', "", "the sdist must hold the tests"),
        ("plugins/slapo-tp/pyproject.toml", 'name = "slapo-tp"', 'name = "slapo-pt"', "name must be 'slapo-tp'"),
        (CHANGELOG, "## [0.1.0]", "## [0.0.9]", "no section for 0.1.0"),
    ],
)
def test_disagreeing_versions_are_an_error(
    file: str, old: str, new: str, says: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    assert main(["--root", str(tree), "--check"]) == 1
    (error,) = capsys.readouterr().err.split("error: ")[1:]
    assert file in error
    assert says in error


def test_a_version_is_shown_first_and_written_when_asked(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(tree)
    assert main(["--root", str(tree), "9.8.0"]) == 0
    assert '+version = "9.8.0"' in capsys.readouterr().out
    assert contents(tree) == before

    assert main(["--root", str(tree), "9.8.0", "--write"]) == 0
    for name, file in projects(tree).items():
        own = tomllib.loads(file.read_text())["project"]
        required = [*own["dependencies"], *(one for extra in own["optional-dependencies"].values() for one in extra)]
        assert own["version"] == "9.8.0"
        assert [one for one in required if one.startswith("slapo-") and "0.1" in one] == []
        assert name == "slapo-core" or f"slapo-core{range_of('9.8.0')}" in own["dependencies"]
    assert "slapo-core>=9.8,<10" in (tree / "examples/slapo-hello/pyproject.toml").read_text()

    assert main(["--root", str(tree), "--check"]) == 1  # the changelog is written by hand
    changelog = (tree / CHANGELOG).read_text()
    (tree / CHANGELOG).write_text(changelog.replace("## [0.1.0]", "## [9.8.0]\n\n## [0.1.0]"))
    assert main(["--root", str(tree), "--check"]) == 0
    with pytest.raises(SystemExit):
        main(["--root", str(tree), "9.8"])


@pytest.mark.slow
def test_wheels_and_sdists_are_built_and_sdists_hold_the_tests(tree: Path, tmp_path: Path) -> None:
    for part in subprocess.check_output(["git", "ls-files", "plugins/slapo-models"], cwd=ROOT, text=True).splitlines():
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, tree / part)
    assert main(["--root", str(tree), "--build", str(tmp_path / "dist"), "slapo-models"]) == 0
    with tarfile.open(tmp_path / "dist" / "slapo_models-0.1.0.tar.gz") as sdist:
        assert "slapo_models-0.1.0/tests/test_models_schedules.py" in sdist.getnames()
    with ZipFile(tmp_path / "dist" / "slapo_models-0.1.0-py3-none-any.whl") as wheel:
        assert "Requires-Dist: slapo-core<0.2,>=0.1" in wheel.read("slapo_models-0.1.0.dist-info/METADATA").decode()
        assert [name for name in wheel.namelist() if "tests/" in name] == []
