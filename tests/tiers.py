"""The tiers of the tests, their order, and what a whole run leaves out.

Unit tests start no process. Those marked ``ranks`` do; those marked ``slow`` take long: documentation, examples and
tables. What is marked ``breadth`` goes over further models, sizes and forms of a behavior that another test holds: it
runs in ``make test-all`` only (``SLAPO_TEST_WHOLE=1``), or where it is asked for by its name.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest

from slapo_runtime import launcher
from slapo_testing.parametrize import BoundCheck

ROOT = Path(__file__).parent.parent
DURATIONS = ROOT / "tests" / "durations.json"
C = TypeVar("C")
F = TypeVar("F")


def sampled(cases: Iterable[C], step: int = 2) -> list[C]:
    """Return every ``step``-th case of a table; all of them in ``make test-all``."""
    return list(cases)[:: 1 if os.environ.get("SLAPO_TEST_WHOLE") else step]


def crossed(cases: Iterable[C], forms: Sequence[F]) -> list[tuple[C, F]]:
    """Return each case with one of the forms, in turn; with all of them in ``make test-all``."""
    whole = bool(os.environ.get("SLAPO_TEST_WHOLE"))
    return [
        (case, form) for number, case in enumerate(cases) for form in (forms if whole else [forms[number % len(forms)]])
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.relative_to(ROOT)} again")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # looking for garbage takes a quarter of the time of the imports, until all files are collected
    config.pluginmanager.register(_Processes(), "processes")
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations(), "durations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their directory, sort files by recorded durations, and leave breadth out."""
    for item in items:
        if "tests/integration" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
    recorded: dict[str, float] = json.loads(DURATIONS.read_text())["all"]
    items.sort(key=lambda item: -recorded.get(_file(item.nodeid), 0.0))  # a long file at the end leaves workers idle
    if os.environ.get("SLAPO_TEST_WHOLE"):
        return
    broad = {item for item in items if item.get_closest_marker("breadth")}
    broad |= set(_left_out([item for item in items if item not in broad]))
    if broad and len(broad) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item in broad])
        items[:] = [item for item in items if item not in broad]


def pytest_collection_finish() -> None:
    """Leave what all test files import out of every later search for garbage."""
    gc.freeze()
    gc.enable()


_LEAST, _OF = 2, 4
_MANY = 4  # cases of a unit test, of which every second stays


def _left_out(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Leave out up to three quarters of the cases of a parametrized test where there are many, of a unit test half.

    Cases stay whose last parameter stays least often: of a kit's checks, which several plugins run, each runs.
    """
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    stay: Counter[Any] = Counter()
    for name, cases in sorted(tests.items()):
        is_unit = not (cases[0].get_closest_marker("ranks") or cases[0].get_closest_marker("slow"))
        if len(cases) > (_MANY if is_unit else _LEAST):
            step = 2 if is_unit else min(_OF, len(cases) // _LEAST + 1)
            turns = {item: turn % step for turn, item in enumerate(sorted(cases, key=_nodeid), crc32(name.encode()))}
            for _ in range(len(cases) // step):
                chosen = min(cases, key=lambda item: (stay[_tried(item)], turns[item], item.nodeid))
                cases.remove(chosen)
                stay[_tried(chosen)] += 1
            yield from cases


def _nodeid(item: pytest.Item) -> str:
    return item.nodeid


def _tried(item: pytest.Item) -> Any:
    """What a case tries: the check of a kit, or the name of its last parameter."""
    last = list(item.callspec.params.values())[-1]  # type: ignore[attr-defined]
    return last.check if isinstance(last, BoundCheck) else item.nodeid.partition("[")[2].rpartition("-")[2]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _lists_fonts(command: object = None) -> bool:
    """Return whether matplotlib starts it, once on each machine."""
    return isinstance(command, list) and command[:1] == ["fc-list"]


class _Processes:
    """Refuses processes in a test that is not marked as one that starts some."""

    def __init__(self) -> None:
        self._unit: str | None = None
        for owner, name in ((launcher._Run, "start"), (subprocess.Popen, "__init__")):
            self._hold(owner, name)

    def _hold(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def refusing(*args: Any, **kwargs: Any) -> Any:
            if self._unit is not None and not _lists_fonts(*args[1:2]):
                pytest.fail(f"a unit test starts no process: mark {self._unit} with pytest.mark.ranks or .slow")
            return original(*args, **kwargs)

        setattr(owner, name, refusing)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marked = item.get_closest_marker("ranks") or item.get_closest_marker("slow")
        self._unit = None if marked else item.nodeid
        try:
            return (yield)
        finally:
            self._unit = None


class _Durations:
    """Sums what the tests of each file take, and what its unit tests take, from which `make check` draws."""

    def __init__(self) -> None:
        self._seconds: dict[str, defaultdict[str, float]] = {"all": defaultdict(float), "unit": defaultdict(float)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds["all"][_file(report.nodeid)] += report.duration
        if not {"ranks", "slow"} & set(report.keywords):
            self._seconds["unit"][_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        rounded = {
            tier: {name: round(took, 1) for name, took in sorted(files.items())}
            for tier, files in self._seconds.items()
        }
        DURATIONS.write_text(json.dumps(rounded, indent=0) + "\n")
