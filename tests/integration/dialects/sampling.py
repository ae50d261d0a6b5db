"""What of a matrix runs with the tests, in one launch for each number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from slapo_testing import preload_modules, run_ranks
from tests.integration.cells import Cell, run_cells
from tests.integration.dialects.cells import DialectCell
from tests.integration.dialects.subjects import SUBJECTS

__all__ = ["assert_clipping_shows", "differing", "sample"]

preload_modules("slapo_tp", "slapo_pipeline.partition.hook", "slapo_fusion")
preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in SUBJECTS))

Of = TypeVar("Of", bound=DialectCell)


def sample(cells: Callable[[str], list[Of]], is_left_out: Callable[[Of], bool]) -> list[Of]:
    """Every way to run, each with one of the families in turn.

    Args:
        cells: all runs of a family.
        is_left_out: of a way, unless ``SLAPO_TEST_WHOLE`` is set.
    """
    turns = [ways[number % len(ways)] for number, ways in enumerate(zip(*map(cells, SUBJECTS), strict=True))]
    return [cell for cell in turns if os.environ.get("SLAPO_TEST_WHOLE") or not is_left_out(cell)]


def differing(cells: Sequence[Cell], world_size: int) -> dict[str, list[str]]:
    """What differs on any rank, by the text of the cell; those of other sizes are left out.

    Args:
        cells: to run.
        world_size: number of ranks.
    """
    chosen = [cell for cell in cells if cell.world_size == world_size]
    ranks = run_ranks(run_cells, chosen, world_size=world_size, timeout=600)
    return {
        str(cell): sorted({one for said, _ in results for one in said})
        for cell, *results in zip(chosen, *ranks, strict=True)
    }


def assert_clipping_shows(said: Sequence[str]) -> None:
    """The control: clipped to another norm, the losses and every weight must be found to differ.

    Args:
        said: about a cell with another norm than the reference model's.
    """
    assert any(one.startswith("the loss of step 2 is") for one in said), said
    assert sum("after training differs by" in one for one in said) > 50, said
    assert not any("step 0" in one for one in said), said  # before the first clipping they are the same
