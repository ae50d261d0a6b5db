"""docs/guides/real-models.md: its schedules are right, and a schedule without a step fails as it says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.ecosystem.pages import Block, blocks, matches, steps
from tests.tiers import sampled

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "real-models.md").read_text(encoding="utf-8")
FILES = {block.value: block.text for block in blocks(PAGE) if block.key == "file"}
preload_modules(
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "qwen3", "t5", "vit"))
)
preload_modules("slapo_tp", "tests.ecosystem.test_real_models")
PATIENCE = 1800.0  # seconds; the machine may be busy


@dataclass(frozen=True)
class Claim:
    """What the page says about a schedule that is not the right one.

    Args:
        line: where the page says it.
        file: the schedule.
        without: the argument, or the part of a line, that is left out; None where ``act`` is what happens.
        act: statements on a schedule of the model without any step.
        shown: what the page shows, ``...`` for anything.
    """

    line: int
    file: str
    without: str | None
    act: str
    shown: str


def claims() -> list[Claim]:
    found, file, refused = [], "", None
    for block in blocks(PAGE):
        if block.key == "file":
            file = block.value
        elif block.key == "without":
            found.append(Claim(block.line, file, block.value, "", block.text))
        elif block.key == "refused":
            refused = block
        elif block.language == "text" and refused is not None:
            found.append(Claim(refused.line, refused.value, None, refused.text, block.text))
            refused = None
    return found


def left_out(source: str, what: str) -> str:
    """The program without an argument, or, if ``what`` is none, without the lines that hold it."""
    if f", {what}" in source:
        return source.replace(f", {what}", "")
    lines = source.splitlines()
    kept = [re.sub(r"\S.*", "pass", line) if what in line else line for line in lines]
    assert kept != lines, f"nothing in the program says {what!r}"
    return "\n".join(kept) + "\n"


def load(directory: Path, name: str, source: str) -> ModuleType:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"page_{directory.name}", directory / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(directory: Path, claim: Claim) -> str:
    """What happens: the report, or the error as a user sees it, who runs the program where it is."""
    return _outcome(directory, claim).replace(f"{directory}/", "")


def _outcome(directory: Path, claim: Claim) -> str:
    source = FILES[claim.file]
    try:
        if claim.without is None:
            body = "".join(f"    {line}\n" for line in claim.act.splitlines())
            module = load(directory, claim.file, f"{source}\n\ndef act(sch):\n{body}")
            module.act(slapo.create_schedule(module.model, mesh={"tp": 2}))
            return "nothing was refused"
        module = load(directory, claim.file, left_out(source, claim.without))
        sch = slapo.create_schedule(module.model, mesh={"tp": 2})
        module.schedule(sch)
        return str(slapo.verify(sch, module.batch, optimizer_steps=0))
    except slapo.SlapoError as error:
        return str(error) if claim.without is None else f"{type(error).__name__}: {error}"


def says(shown: str, got: str) -> bool:
    """Whether the lines shown are among those printed, in their order; ``...`` stands for anything."""
    return matches(f"{shown.rstrip()}...", got) or matches(shown.rstrip().replace("\n  ", "\n...\n  ") + "...", got)


def is_checked(block: Block, before: Block | None) -> bool:
    if block.key in ("file", "without", "refused") or block.language == "console":
        return True
    return block.language == "text" and before is not None and before.key == "refused"


def test_every_block_of_the_page_is_checked() -> None:
    found = list(blocks(PAGE))
    assert len(FILES) == 8
    assert len(claims()) >= 18
    assert [
        block.line for before, block in zip([None, *found], found, strict=False) if not is_checked(block, before)
    ] == []
    assert PAGE.count("```") == 2 * len(found)


def judged(directory: Path, name: str) -> tuple[int, int, int, set[str]]:
    """What the report on a right schedule says: ranks, steps verified, steps there are, and what was compared."""
    module = load(directory, name, FILES[name])
    sch = slapo.create_schedule(module.model, mesh={"tp": 2})
    module.schedule(sch)
    report = slapo.verify(sch, module.batch)
    compared = {each.kind for each in report.largest if each.compared}
    return report.world_size, report.steps_verified, len(sch.records), compared


def all_judged(directory: Path) -> dict[str, tuple[int, int, int, set[str]]]:
    """Of every schedule."""
    own = directory / f"rank{dist.get_rank()}"
    return {name: judged(own / name.removesuffix(".py"), name) for name in sampled(FILES, 4)}


def outcomes(directory: Path) -> list[str]:
    """Of every claim about a schedule that is not right."""
    own = directory / f"rank{dist.get_rank()}"
    return [outcome(own / str(claim.line), claim) for claim in claims()]


@pytest.mark.ranks
def test_the_schedules_are_right(tmp_path: Path) -> None:
    mine, other = run_ranks(all_judged, tmp_path, world_size=2, timeout=PATIENCE)
    assert mine == other
    for name, (world_size, verified, steps_there_are, compared) in mine.items():
        assert (world_size, verified) == (2, steps_there_are), name
        assert {"output", "gradient", "parameter"} <= compared, name


@pytest.mark.breadth
@pytest.mark.ranks
def test_without_a_step_it_is_wrong_as_the_page_says(tmp_path: Path) -> None:
    mine, other = run_ranks(outcomes, tmp_path, world_size=2, timeout=PATIENCE)
    assert mine == other
    wrong = [
        f"real-models.md:{claim.line} without {claim.without}\n--- shown\n{claim.shown}--- printed\n{got}"
        for claim, got in zip(claims(), mine, strict=True)
        if not says(claim.shown, got)
    ]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_whole_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (console,) = (block for block in blocks(PAGE) if block.language == "console")
    ((command, shown),) = steps(console.text)
    assert command == "python gpt2.py"
    (tmp_path / "gpt2.py").write_text(FILES["gpt2.py"], encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "gpt2.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert matches(shown, done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("shown", "got", "same"),
    [
        ("Error: first in ...\n", "Error: first in a\n  step\n", True),
        ("Error: first in b\n", "Error: first in a\n  step\n", False),
        ("Error: ...\n  missing: b\n", "Error: a\n  step\n  missing: b\n", True),
        ("Error: ...\n  missing: b\n", "Error: a\n  step\n", False),
    ],
)
def test_the_comparison_of_messages_can_fail(shown: str, got: str, same: bool) -> None:
    assert says(shown, got) is same


def test_left_out_rows_are_unsupported() -> None:
    assert left_out("f(1, packed=3)\n", "packed=3") == "f(1)\n"
    assert left_out("def g():\n    f(1)  # one\n    h()\n", "f(1)") == "def g():\n    pass\n    h()\n"
    with pytest.raises(AssertionError, match="nothing in the program"):
        left_out("f(1)\n", "g(")
