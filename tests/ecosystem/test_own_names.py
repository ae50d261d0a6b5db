"""The names of this repository's distributions and of what they provide: nobody else takes them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from slapo_core.plugins import FIRST_PARTY
from slapo_testing import FakeDistribution, FakeEnvironment
from tests.messages import Messages

FREE = ("hooks", "hookspecs", "renamed")
"""Groups in which a name means nothing, or is another's former name."""


def test_install_hints_name_existing_distributions() -> None:
    root = Path(__file__).parents[2]
    files = [root / "pyproject.toml", *(root / "plugins").glob("*/pyproject.toml")]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    assert tuple(sorted(project["name"] for project in projects)) == FIRST_PARTY


def test_nobody_can_take_a_name_of_the_project(fake_distributions: FakeEnvironment) -> None:
    root = Path(__file__).parents[2]
    projects = [tomllib.loads(file.read_text())["project"] for file in (root / "plugins").glob("*/pyproject.toml")]
    projects.append(tomllib.loads((root / "pyproject.toml").read_text())["project"])
    own = {
        (group, name): project["name"]
        for project in projects
        for group, points in project.get("entry-points", {}).items()
        for name in points
        if group.rpartition(".")[2] not in FREE
    }
    assert len(own) >= 40
    evil = [
        FakeDistribution(f"evil{number}", entry_points={group: {name: "x:Y"}})
        for number, (group, name) in enumerate(own)
    ]
    fake_distributions.install(*evil)
    registry = fake_distributions.registry(with_installed=True)
    assert all(registry.plugin(each.name).state in ("unusable", "conflict") for each in evil)
    resolved = {(group, name): registry.resolve(group.rpartition(".")[2], name).distribution for group, name in own}
    assert resolved == own


def test_a_name_that_the_projects_own_plugin_provides_stays_its_own(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    points = {"slapo.v1.samplers": {"random": "evil_slapo:Random", "evil": "evil_slapo:Evil"}}
    fake_distributions.install(FakeDistribution("evil-slapo", "1.0", points))
    registry = fake_distributions.registry(with_installed=True)
    evil = registry.plugin("evil-slapo")
    assert evil.state == "conflict"
    message(evil.reason, "'random'", "evil-slapo 1.0 and slapo-tune", "slapo-tune keeps it")
    assert registry.plugin("slapo-tune").state == "ok"
    assert registry.resolve("samplers", "random").distribution == "slapo-tune"
    assert registry.resolve("samplers", "evil").distribution == "evil-slapo"
