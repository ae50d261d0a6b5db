"""Pages of the documentation as programs: their blocks, what they show, and whether that is what is printed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slapo_core import RankFailedError
from tests.support.programs import run_program

__all__ = ["Block", "Page", "blocks", "matches", "steps"]

ROOT = Path(__file__).parents[2]
BORDER = "-- end of block --"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its ``key=value``, and its text."""

    language: str
    key: str
    value: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    for match in re.finditer(r"^```(\w+)(?: (\w+)=(\S+))?\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        line = page.count("\n", 0, match.start()) + 1
        yield Block(match[1], match[2] or "", match[3] or "", match[4], line)


def steps(console: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output shown below it."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def matches(expected: str, got: str) -> bool:
    """Whether ``got`` is ``expected``, where ``...`` stands for anything, line breaks included."""
    pattern = ".*?".join(map(re.escape, re.split(r"\.\.\.\n?", expected)))
    return re.fullmatch(pattern, got, flags=re.DOTALL) is not None


class Page:
    """One of ``docs/``.

    Args:
        name: of the file.

    Attributes:
        text: of the page.
        blocks: in their order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        self.blocks = list(blocks(self.text))

    def check(self, block: Block, expected: str, got: str) -> None:
        assert matches(expected, got), f"{self.name}:{block.line}\n--- shown\n{expected}--- printed\n{got}"

    def shown(self) -> list[tuple[Block, str]]:
        """Each block of Python with the output below it."""
        found: list[tuple[Block, str]] = []
        for block in self.blocks:
            if block.language == "python" and not block.key:
                found.append((block, ""))
            elif block.language == "text":
                assert not found[-1][1], f"line {block.line}: a second output of one block"
                found[-1] = (found[-1][0], block.text)
        return found

    def prints_what_it_shows(self, directory: Path, *, at_least: int, guarded: bool = False) -> None:
        """Run its blocks of Python one after another, as one program.

        Args:
            directory: an empty one.
            at_least: how many blocks there are.
            guarded: whether they stand under ``if __name__ == "__main__":``, as what starts processes has to.
        """
        parts = self.shown()
        assert len(parts) >= at_least
        program = "".join(f"{block.text}\nprint({BORDER!r})\n" for block, _ in parts)
        if guarded:
            program = f'if __name__ == "__main__":\n{textwrap.indent(program, "    ")}'
        (directory / "page.py").write_text(program, encoding="utf-8")
        printed = run_program(directory / "page.py").split(f"{BORDER}\n")
        assert printed.pop() == ""
        for (block, expected), got in zip(parts, printed, strict=True):
            self.check(block, expected, got)

    def trains_on_two_ranks(self, directory: Path) -> None:
        """Run its file ``train.py`` as the first command says that starts it.

        Args:
            directory: an empty one.
        """
        (source,) = (block for block in self.blocks if block.value == "train.py")
        launch = next(block for block in self.blocks if block.text.startswith("$ torchrun --nproc-per-node 2 train.py"))
        (directory / "train.py").write_text(source.text, encoding="utf-8")
        ((_, expected),) = steps(launch.text)
        self.check(launch, expected, run_program(directory / "train.py", processes=2))

    def runs_its_files(self, directory: Path) -> None:
        """Write its files, and run them as its commands say: ``python file arguments``, or by torchrun.

        A ``diff`` block changes a file for the commands below it; a ``console status=1`` block shows an error.

        Args:
            directory: an empty one.
        """
        for block in self.blocks:
            if block.key == "file" and block.language != "diff":
                (directory / block.value).write_text(block.text, encoding="utf-8")
        for block in self.blocks:
            if block.language == "diff":
                self.change(block, directory)
            for command, expected in steps(block.text) if block.language == "console" else ():
                words = command.split()
                processes = int(words[2]) if words[:2] == ["torchrun", "--nproc-per-node"] else None
                script, *arguments = words[1 if processes is None else 3 :]
                try:
                    got = run_program(directory / script, *arguments, processes=processes)
                except RankFailedError as error:
                    if block.key != "status":
                        raise
                    expected, got = f"{expected.rstrip()}...", str(error).replace(f"{directory}/", "")
                else:
                    assert block.key != "status", f"{self.name}:{block.line}: no error"
                self.check(block, expected, got)

    def change(self, block: Block, directory: Path) -> None:
        """Replace the ``-`` lines of a ``diff`` block by its ``+`` lines."""
        file = directory / block.value
        source = file.read_text(encoding="utf-8")
        old, new = ("".join(re.findall(rf"^\{sign}(.*\n)", block.text, flags=re.MULTILINE)) for sign in "-+")
        assert source.count(old) == 1, f"{self.name}:{block.line}"
        file.write_text(source.replace(old, new), encoding="utf-8")
