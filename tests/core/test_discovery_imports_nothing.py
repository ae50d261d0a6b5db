"""Listing a hundred plugins imports none of them, nor torch, and reads each one's metadata a few times at most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slapo_testing.distributions import FakeEnvironment
from tests.dists.healthy import acme, crowd

READS = 4  # of metadata files for each distribution: what it takes, counted instead of timed

MEASURE = """
import sys
opened = []
def watch(event, arguments):
    if event == "open" and ".dist-info" in str(arguments[0]) and "crowd_" in str(arguments[0]):
        opened.append(arguments[0])
sys.addaudithook(watch)
sys.argv = ["slapo", "plugins", "list", "--json"]
from slapo_core.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "rich", "pluggy", "typeguard"})
print(len(opened), ",".join(heavy), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 100])
def test_listing_reads_little_and_imports_no_plugin(
    count: int, fake_distributions: FakeEnvironment, tmp_path: Path
) -> None:
    sentinel = tmp_path / "imported"
    fake_distributions.install(*crowd(count, sentinel))
    done = fake_distributions.run("-c", MEASURE)
    assert done.returncode == 0, done.stderr
    listed = [plugin for plugin in json.loads(done.stdout)["plugins"] if plugin["name"].startswith("crowd-")]
    assert len(listed) == count
    assert {plugin["state"] for plugin in listed} <= {"ok"}
    reads, _, heavy = done.stderr.rstrip("\n").partition(" ")
    assert heavy == ""
    assert not sentinel.exists()
    assert count <= int(reads) <= READS * count


@pytest.mark.slow
def test_the_sentinel_can_fail(fake_distributions: FakeEnvironment, tmp_path: Path) -> None:
    sentinel = tmp_path / "imported"
    fake_distributions.install(*crowd(1, sentinel))
    assert fake_distributions.run("-c", "import crowd_000").returncode == 0
    assert sentinel.read_text() == "crowd_000"


def test_resolving_a_name_imports_nothing_and_loading_imports_one(fake_distributions: FakeEnvironment) -> None:
    sentinel = fake_distributions.directory / "imported"
    mark = (f"open({str(sentinel)!r}, 'a').write(__name__ + ' ')",)
    fake_distributions.install(acme(before=mark), acme("other-slapo", namespace="other", bare="cut", before=mark))
    registry = fake_distributions.registry()
    assert registry.resolve("primitives", "pad").value == "acme_slapo:Thing"
    assert registry.names("primitives") == ("acme.pad", "other.cut")
    assert registry.bare_names("primitives") == ("cut", "pad")
    assert registry.namespaces() == ("acme", "other")
    assert not sentinel.exists()
    registry.load("pad")
    registry.load("acme.pad")
    assert sentinel.read_text() == "acme_slapo "


def test_the_first_directory_on_the_path_wins(tmp_path: Path) -> None:
    first, second = FakeEnvironment(tmp_path / "first"), FakeEnvironment(tmp_path / "second")
    first.install(acme(version="2.0"))
    second.install(acme(version="1.0"))
    path = [str(first.directory), str(second.directory)]
    (plugin,) = first.registry().discover(path=path, environ={}).plugins
    assert plugin.label == "acme-slapo 2.0"
