"""Full texts of errors, kept in one file for each distribution, so that a wording is changed in one place.

A test asserts the class of an error, its fields and a key word; the fixture :func:`message` compares the whole text
with ``tests/messages.txt`` or ``plugins/slapo-x/tests/messages.txt``. After a wording was changed, ``make messages``
writes the files again: read their diff.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
_UPDATED = pytest.StashKey[dict[str, dict[str, str]]]()


class Messages:
    """The texts of one test.

    Args:
        file: of the distribution.
        key: of the test, e.g. ``"core/test_globs.py::test_no_match[a]"``.
        updated: takes the texts instead of comparing them; None compares.
    """

    def __init__(self, file: Path, key: str, updated: dict[str, str] | None) -> None:
        self._file, self._key, self._updated, self._count = file, key, updated, 0

    def __call__(self, error: Any, *words: str) -> str:
        """Hold the text of an error against the file, and its key words against the text.

        Args:
            error: an exception, what ``pytest.raises`` gives, or a text.
            words: one or more, each in the text.

        Returns:
            The text.
        """
        text = _same_everywhere(str(getattr(error, "value", error)).rstrip())
        missing = [word for word in words if word not in text]
        assert not missing, f"{missing} not in: {text}"
        assert words, "a key word of the message is missing: message(error, 'tp size 4')"
        self._count += 1
        key = self._key if self._count == 1 else f"{self._key} #{self._count}"
        if self._updated is not None:
            self._updated[key] = text
            return text
        expected = read(self._file).get(key)
        if text != expected:
            diff = "\n".join(difflib.ndiff((expected or "").splitlines(), text.splitlines()))
            pytest.fail(f"another text than in {self._file.relative_to(ROOT)}; `make messages` accepts it\n{diff}")
        return text


def _same_everywhere(text: str) -> str:
    """Without line numbers of tests, directories, addresses, and which distributions are not installed."""
    text = re.sub(r"; not installed: slapo-[\w, -]+", "", text)
    text = re.sub(r"/\S*?pytest-of-[^/]+/pytest-\d+/(?:popen-\w+/)?\w+", "TMP", text).replace(f"{ROOT}/", "")
    return re.sub(r" at 0x[0-9a-f]+", " at 0x", re.sub(r"(\w+\.py):\d+", r"\1:N", text))


@pytest.fixture
def message(request: pytest.FixtureRequest) -> Messages:
    """Compare the text of an error: ``message(error, "key word")``."""
    file = messages_file(request.path)
    updated = request.config.stash.get(_UPDATED, None)
    key = f"{request.path.relative_to(file.parent).as_posix()}::{request.node.name}"
    return Messages(file, key, None if updated is None else updated.setdefault(str(file.relative_to(ROOT)), {}))


def messages_file(test: Path) -> Path:
    """The golden file of the distribution that a test belongs to."""
    parts = test.relative_to(ROOT).parts
    return ROOT.joinpath(*(parts[: parts.index("tests") + 1]), "messages.txt")


_READ: dict[Path, Mapping[str, str]] = {}


def read(file: Path) -> Mapping[str, str]:
    """The texts of a golden file, by their keys."""
    if file not in _READ:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        sections = re.split(r"^== (.*) ==$", text, flags=re.MULTILINE)
        _READ[file] = {key: body.strip("\n") for key, body in zip(sections[1::2], sections[2::2], strict=True)}
    return _READ[file]


def _write(file: Path, texts: Mapping[str, str]) -> None:
    sections = [f"== {key} ==\n{text}\n" for key, text in sorted(texts.items())]
    file.write_text("\n".join(sections), encoding="utf-8")


# -- writing the files ------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help="write the golden files of error messages again")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-messages"):
        config.stash[_UPDATED] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    updated = session.config.stash.get(_UPDATED, None)
    if updated is None:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["messages"] = updated
    else:
        _merge(updated)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take what a process of pytest-xdist has found."""
    _merge(getattr(node, "workeroutput", {}).get("messages", {}))


def _is_test(directory: Path, key: str) -> bool:
    module, _, name = key.partition("::")
    path = directory / module
    function = re.split(r"[\[ ]", name)[0]
    return path.exists() and f"def {function}(" in path.read_text(encoding="utf-8")


def _merge(updated: Mapping[str, Mapping[str, str]]) -> None:
    for name, texts in updated.items():
        file = ROOT / name
        _READ.pop(file, None)
        kept = {key: text for key, text in read(file).items() if _is_test(file.parent, key)}
        _write(file, {**kept, **texts})
        _READ.pop(file, None)
