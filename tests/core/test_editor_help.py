"""What an editor or a REPL asks of a node is answered, and completing a name imports no plugin."""

from __future__ import annotations

import inspect
import pydoc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import use_registry
from slapo_testing.distributions import FakeEnvironment
from tests.dists.healthy import acme


@pytest.fixture
def schedule(fake_distributions: FakeEnvironment, tmp_path: Path) -> Iterator[slapo.Schedule]:
    """A schedule that sees `acme.pad(axis, mode="zeros")`, whose import leaves a file behind."""
    sentinel = f"open({str(tmp_path / 'imported')!r}, 'w').close()"
    fake_distributions.install(acme(before=(sentinel,), body=("axis: int", "mode: str = 'zeros'")))
    with use_registry(fake_distributions.registry(with_installed=True)):
        yield slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_completion_lists_primitives_and_namespaces_and_imports_no_plugin(
    schedule: slapo.Schedule, tmp_path: Path
) -> None:
    for place in (schedule, schedule["0"], schedule["*"]):
        names = set(dir(place))
        assert {"pad", "acme", "checkpoint", "core", "apply"} <= names
    assert dir(schedule["0"].acme) == ["pad"]
    assert repr(schedule["0"].pad) == "<primitive acme.pad at '0'>"
    assert repr(schedule["0"].acme.pad) == "<primitive acme.pad at '0'>"
    assert "acme_slapo" not in sys.modules
    assert not (tmp_path / "imported").exists()


def test_names_are_listed_once_and_paths_complete_in_brackets(schedule: slapo.Schedule) -> None:
    for place in (schedule, schedule["0"], schedule["*"]):
        assert len(dir(place)) == len(set(dir(place)))
    assert schedule._ipython_key_completions_() == ["0", "1"]
    nested = slapo.create_schedule(nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU())))
    assert nested["0"]._ipython_key_completions_() == ["0", "1"]
    assert nested.root._ipython_key_completions_() == ["0", "0.0", "0.1"]


def test_the_sentinel_sees_an_import(schedule: slapo.Schedule, tmp_path: Path) -> None:
    inspect.signature(schedule["0"].pad)
    assert "acme_slapo" in sys.modules
    assert (tmp_path / "imported").exists()


def test_signature_and_documentation_are_those_of_the_primitive(schedule: slapo.Schedule) -> None:
    for bound in (schedule["0"].pad, schedule["*"].pad, schedule.pad, schedule["0"].acme.pad):
        parameters = inspect.signature(bound).parameters
        assert list(parameters) == ["axis", "mode"]
        assert parameters["axis"].default is inspect.Parameter.empty
        assert parameters["mode"].default == "zeros"
        assert inspect.getdoc(bound) == (
            "pad(axis: int, mode: str = 'zeros')\n\nDo nothing.\n\nrewrite: ``y = f(x)`` -> ``y = f(x)``"
        )


def test_help_shows_the_documentation_with_the_arguments(schedule: slapo.Schedule) -> None:
    page = pydoc.plain(pydoc.render_doc(schedule["0"].checkpoint))
    assert "core.checkpoint = <primitive core.checkpoint at '0'>" in page
    assert "checkpoint(match: Any = None, preserve_rng_state: bool = True)" in page
    assert "preserve_rng_state: whether the recompute uses the RNG state of the first run" in page
    assert "recompute the rest for gradients" in page


def test_an_unknown_name_is_no_attribute(schedule: slapo.Schedule) -> None:
    assert not hasattr(schedule["0"], "pda")
    with pytest.raises(AttributeError, match="primitive 'pda'"):
        getattr(schedule["0"], "pda")  # noqa: B009
    with pytest.raises(slapo.UnknownNameError) as caught:
        getattr(schedule["0"].acme, "pda")  # noqa: B009
    assert caught.value.hint == "did you mean 'acme.pad'?"
