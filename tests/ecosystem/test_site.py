"""The documentation as a site: its pages are reachable, guides begin alike, and the reading path stays short."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.ecosystem.pages import blocks

DOCS = Path(__file__).parents[2] / "docs"
MOST_WORDS = 35_000
"""Of all pages outside of reference/ and results/, without code and its output."""
MOST_LINES = 40
"""Of the first program of a guide."""
IMPORT = re.compile(r"^\s*(?:from|import) slapo_(\w+)", re.MULTILINE)
needs_generator = pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="not installed: make docs")


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    command = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--builder", "html", source, out]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)


def links(text: str) -> list[str]:
    """Return the targets of local links, outside of code."""
    return re.findall(r"\]\(([^)#:\s]+\.md)(?:#[^)\s]*)?\)", without_code(text))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def reachable(root: Path) -> set[Path]:
    """Return the pages that links lead to, from ``index.md`` on."""
    found, left = set(), [root / "index.md"]
    while left:
        page = left.pop()
        if page not in found:
            found.add(page)
            left += [(page.parent / target).resolve() for target in links(page.read_text("utf-8"))]
    return found


def problem(guide: str) -> str | None:
    """Return why a guide does not begin with what you get and a complete program."""
    opening = guide.partition("\n\n")[2]
    if not opening.startswith("**What you get**: "):
        return "does not begin with **What you get**"
    first = next(blocks(guide), None)
    if first is None or first.language != "python" or "import slapo_core as slapo" not in first.text:
        return "the first block is not a complete program"
    lines = len([line for line in first.text.splitlines() if line.strip()])
    return f"the first program has {lines} lines" if lines > MOST_LINES else None


def test_every_page_is_reachable_from_the_index() -> None:
    assert set(DOCS.rglob("*.md")) - reachable(DOCS) == set()


def test_an_unreachable_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("[one](one.md)\n\n```text\n[three](three.md)\n```\n")
    (tmp_path / "one.md").write_text("[two](two.md#part)\n")
    for name in ("two", "three"):
        (tmp_path / f"{name}.md").write_text("")
    assert {page.stem for page in reachable(tmp_path)} == {"index", "one", "two"}


def test_headings_go_down_by_one_level_and_no_conflict_is_left() -> None:
    for page in DOCS.rglob("*.md"):
        assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text("utf-8"), re.MULTILINE), f"{page}: a merge conflict"
        levels = [len(found) for found in re.findall(r"^(#+) ", without_code(page.read_text("utf-8")), re.MULTILINE)]
        assert levels[:1] == [1], page
        assert all(below <= above + 1 for above, below in itertools.pairwise(levels)), page


def test_the_reading_path_is_short() -> None:
    words = {
        page.relative_to(DOCS).as_posix(): len(without_code(page.read_text("utf-8")).split())
        for page in DOCS.rglob("*.md")
        if page.relative_to(DOCS).parts[0] not in ("reference", "results")
    }
    assert len(words) > 25
    assert sum(words.values()) <= MOST_WORDS, words


def test_each_guide_begins_with_what_you_get_and_a_program() -> None:
    problems = {page.stem: problem(page.read_text("utf-8")) for page in sorted((DOCS / "guides").glob("*.md"))}
    assert {name: text for name, text in problems.items() if text is not None} == {}


def requirements() -> dict[str, set[str]]:
    """Return the distributions of slapo that each of them needs, except for slapo-core, by short names."""
    direct = {}
    for file in (DOCS.parent / "plugins").glob("slapo-*/pyproject.toml"):
        lines = tomllib.loads(file.read_text("utf-8"))["project"]["dependencies"]
        direct[file.parent.name[6:]] = {name for line in lines for name in re.findall(r"^slapo-(\w+)", line)} - {"core"}
    for _ in direct:
        direct = {name: needed.union(*(direct[one] for one in needed)) for name, needed in direct.items()}
    return direct


def test_the_page_of_installing_names_all_that_a_distribution_needs() -> None:
    text, needed = (DOCS / "install.md").read_text("utf-8"), requirements()
    rows = {}
    for named, row in re.findall(r"^\| (`slapo-.*?) \|.*\|(.*)\|$", text, flags=re.MULTILINE):
        rows |= {name: set(re.findall(r"\w+", row)) for name in re.findall(r"`slapo-(\w+)`", named)}
    assert rows.pop("core") == set()
    assert rows == needed
    commands = re.findall(r"plugins/slapo-{(.*?)}", text)
    assert len(commands) == 2
    for command in commands:
        names = set(command.split(","))
        assert names.union(*(needed[name] for name in names)) == names
    for guide in (DOCS / "guides").glob("*.md"):
        opening = guide.read_text("utf-8").partition("```")[0]
        imported = {name for block in blocks(guide.read_text("utf-8")) for name in re.findall(IMPORT, block.text)}
        more = [name for name in imported & {*needed} - names if f"slapo-{name}" not in opening]
        assert not more, guide.name


def missing_numbers(page: Path) -> dict[str, list[str]]:
    """Return the numbers in rows of a page that are not in any of the tables that the row links to."""
    number = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)*(?<!,)")
    found = {}
    for row in page.read_text("utf-8").splitlines():
        tables = links(row) if row.startswith("| ") else []
        known = {each for table in tables for each in number.findall((page.parent / table).read_text("utf-8"))}
        missing = [each for each in number.findall(re.sub(r"\]\([^)]*\)", "", row)) if each not in known]
        if tables and missing:
            found[row] = missing
    return found


def test_headlines_have_the_numbers_of_their_tables() -> None:
    page = DOCS / "results" / "index.md"
    assert sum(1 for row in page.read_text("utf-8").splitlines() if row.startswith("| ") and links(row)) > 25
    assert missing_numbers(page) == {}


def test_a_number_that_the_table_has_not_is_found(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("323 ran, 1.25 times, 22.13 GiB\n")
    (tmp_path / "index.md").write_text(
        "| 323 ran, 1.2 and 22.13 | [table](table.md) |\n| 323, 1.25 | [t](table.md) |\n"
    )
    assert list(missing_numbers(tmp_path / "index.md").values()) == [["1.2"]]


@pytest.mark.parametrize(
    ("guide", "text"),
    [
        ("# A\n\nThis page.\n", "does not begin with **What you get**"),
        ("# A\n\n**What you get**: B.\n\n```console\n$ slapo\n```\n", "the first block is not a complete program"),
        ("# A\n\n**What you get**: B.\n\n```python\nsch.verify()\n```\n", "the first block is not a complete program"),
        (
            "# A\n\n**What you get**: B.\n\n```python\nimport slapo_core as slapo\n" + 40 * "x = 1\n" + "```\n",
            "the first program has 41 lines",
        ),
        ("# A\n\n**What you get**: B.\n\n```python\nimport slapo_core as slapo\n```\n", None),
    ],
)
def test_an_opening_that_is_not_the_usual_one_is_found(guide: str, text: str | None) -> None:
    assert problem(guide) == text


@pytest.mark.breadth
@pytest.mark.slow
@needs_generator
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "searchindex.js").stat().st_size > 100_000


@pytest.mark.breadth
@pytest.mark.slow
@needs_generator
@pytest.mark.parametrize("mistake", ["", "[page](missing.md)", "[anchor](index.md#missing)", "[file](../missing.py)"])
def test_a_link_that_leads_nowhere_is_a_warning(mistake: str, tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((DOCS / "conf.py").read_text("utf-8").replace('["_static"]', "[]"))
    (source / "index.md").write_text(f"# A\n\n## B\n\n- [C](c.md)\n- [D](c.md#d)\n\n{mistake}\n")
    (source / "c.md").write_text("# C\n\n## D\n\n[`beside`](../e.py#L3) and [folder](../f)\n")
    (tmp_path / "f").mkdir()
    (tmp_path / "e.py").write_text("beside = 1\n"), (tmp_path / "f" / "README.md").write_text("below\n")
    done = build(source, tmp_path / "site")
    html = (tmp_path / "site" / "c.html").read_text("utf-8")
    linked = [tmp_path / "site" / target for target in re.findall(r'href="(_downloads/[^"]*)"', html)]
    assert [file.read_text("utf-8") for file in linked] == ["beside = 1\n", "below\n"]
    assert ("WARNING" in done.stderr, done.returncode) == ((True, 1) if mistake else (False, 0)), done.stderr
