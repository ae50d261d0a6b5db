"""The kit can fail: for every check there are bad primitives that it catches, and good ones that it passes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slapo_core import Primitive
from slapo_core.plugins import Registry, use_registry
from slapo_testing import (
    CHECKS,
    Case,
    CheckError,
    FakeDistribution,
    FakeEnvironment,
    NotApplicable,
    primitive_source,
)
from slapo_testing.checks.declarations import documentation_violations
from slapo_testing.probe import probe
from tests.messages import Messages
from tests.support import kit_primitives as kit
from tests.tiers import sampled

CHECK = {check.name: check for check in CHECKS}
PRIMITIVES = [
    value
    for value in vars(kit).values()
    if inspect.isclass(value) and issubclass(value, kit.Good | kit.GoodOnMesh) and value is not kit.Bad
]


@pytest.fixture(autouse=True)
def known() -> Iterator[Registry]:
    """A registry of this test, in which the primitives of `kit_primitives` are registered."""
    with use_registry(Registry.discover(environ={})) as registry:
        for cls in PRIMITIVES:
            registry.register(cls)
        kit.SEEN.clear()
        yield registry


def case(primitive: Primitive | Callable[[], Primitive], **options: Any) -> Case:
    return Case(primitive, **{"model": kit.Net, "path": "fc1", "inputs": kit.batch, **options})


def bad(cls: type[Primitive]) -> Case:
    return case(cls())


ON_MESH = {"mesh": ("tp",)}


@pytest.mark.slow
def test_a_good_primitive_passes_every_check(message: Messages) -> None:
    good = case(kit.Good(), rejects=[kit.Good("wieght"), ("fc2", kit.Good("gewicht"))])
    skipped = {check.name: reason for check in CHECKS if (reason := outcome(check, good)) is not None}
    message(skipped.pop("entry_point_agrees"), "'kit.good'", "this process")
    assert skipped == {"mesh_of_one_is_free": "the case has no mesh=(...)"}


@pytest.mark.slow
def test_a_good_distributed_primitive_passes_every_check() -> None:
    good = case(kit.GoodOnMesh(), mesh=("dp", "tp"))
    skipped = {check.name for check in CHECKS if outcome(check, good) is not None}
    assert skipped == {"entry_point_agrees", "rejected_cases_change_nothing"}


def outcome(check: Any, good: Case) -> str | None:
    try:
        check(good)
    except NotApplicable as reason:
        return str(reason)
    return None


CAUGHT = [
    ("json_round_trip", bad(kit.GrowsWhenMade), "read from JSON differs"),
    ("json_round_trip", case(kit.HasDictionary(options={"a": 1})), "the value cannot be hashed"),
    ("json_round_trip", case(kit.HasDictionary(options=kit.silent)), "JSON cannot store the arguments"),
    ("json_round_trip", bad(kit.HashedByIdentity), "another hash"),
    ("json_round_trip", bad(kit.DependsOnGlobalState), "other records"),
    ("json_round_trip", case(kit.Good(), serializable=False), "serializable=False"),
    ("preconditions_mutate_nothing", bad(kit.PreconditionsMark), "fc1.seen: added (True)"),
    ("preconditions_mutate_nothing", bad(kit.PreconditionsDraw), "torch's RNG state: advanced"),
    ("preconditions_mutate_nothing", bad(kit.PreconditionsForget), "are not deterministic"),
    (
        "preconditions_mutate_nothing",
        case(kit.Good(), rejects=[kit.RefusesAndMarks("wieght")]),
        "fc1.weight (tensor): 1 of 32 elements",
    ),
    (
        "rejected_cases_change_nothing",
        case(kit.Good(), rejects=[kit.AcceptsAnything("wieght")]),
        "of rejects= is accepted",
    ),
    (
        "rejected_cases_change_nothing",
        case(kit.Good(), rejects=[kit.FindsOutTooLate("wieght")]),
        "ApplyError: finds_out_too_late('wieght')",
    ),
    (
        "rejected_cases_change_nothing",
        case(kit.Good(), rejects=[kit.GivesNoHint("wieght")]),
        "without a hint",
    ),
    (
        "rejected_cases_change_nothing",
        case(kit.Good(), rejects=[kit.RefusesAndMarks("wieght")]),
        "refusing refuses_and_marks('wieght')",
    ),
    ("faults_roll_back", bad(kit.WritesInPlace), "is not rolled back"),
    ("faults_roll_back", bad(kit.SwallowsErrors), "is swallowed"),
    ("faults_roll_back", bad(kit.HidesErrors), "without its cause"),
    ("faults_roll_back", bad(kit.WorksThreeTimes), "cannot be applied after faults"),
    ("undo_is_exact", bad(kit.WritesInPlace), "fc1.weight (tensor): 1 of 32 elements"),
    ("undo_is_exact", bad(kit.PatchesTheClass), "class Linear.patched: added (a bool)"),
    ("undo_is_exact", bad(kit.AddsHookBehindOurBack), "(function silent)"),
    ("deepcopy_runs_on_itself", bad(kit.HoldsTheModule), "the output of a deep copy changes"),
    (
        "deepcopy_runs_on_itself",
        bad(kit.KnowsTheOriginal),
        "has another output",
    ),
    ("mesh_of_one_is_free", case(kit.AlwaysPays(), **ON_MESH), "forward hooks of 'fc1': AlwaysPays.apply.<locals>"),
    (
        "forward_and_gradients_on_1_rank",
        bad(kit.ComputesSomethingElse),
        "required: equivalence EXACT",
    ),
    ("forward_and_gradients_on_1_rank", case(kit.LosesTheGradient(), path="fc2"), "gradient"),
    ("forward_and_gradients_on_2_ranks", case(kit.WrongOnTwoRanks(), **ON_MESH), "required: equivalence EXACT"),
    (
        "forward_and_gradients_on_2_ranks",
        case(kit.RaisesOnRankOne(), **ON_MESH),
        "ValueError: rank 1",
    ),
    (
        "forward_and_gradients_on_2_ranks",
        case(kit.Good(), model=kit.LambdaNet),
        "cannot be sent to other processes",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "case", "word"), CAUGHT, ids=[f"{c}-{case.label}" for c, case, _ in CAUGHT])
def test_a_bad_primitive_is_caught(check: str, case: Case, word: str, message: Messages) -> None:
    with pytest.raises(CheckError) as caught:
        CHECK[check](case)
    text = str(caught.value)
    assert word in text
    message(kit.prose(text), f"{case} fails {check}: ")
    assert re.search(r"\n  required: .+\n  got:      .+\n(?s:.*)  hint:     .+", text), text


def test_fault_on_two_ranks_passes_the_check_on_one() -> None:
    CHECK["forward_and_gradients_on_1_rank"](case(kit.WrongOnTwoRanks(), **ON_MESH))


def test_every_check_has_a_negative_control() -> None:
    elsewhere = {"documentation", "entry_point_agrees", "light_import"}
    assert {check for check, _, _ in CAUGHT} | elsewhere == set(CHECK)


def test_unexpected_error_is_chained(message: Messages) -> None:
    with pytest.raises(CheckError) as caught:
        CHECK["undo_is_exact"](case(kit.Good(), path="fc9"))
    message(kit.prose(str(caught.value)), "good() at 'fc9' fails undo_is_exact: PathError was raised")
    assert "'fc9'" in str(caught.value.__cause__)


DOCSTRINGS = {
    "none": (None, "there is no docstring"),
    "title": (
        "freeze\n\nArgs:\n    parameter: which.\n\nrewrite: ``a`` -> ``b``",
        "not a sentence: 'freeze'",
    ),
    "field": ("Stop it.\n\nrewrite: ``a`` -> ``b``", "for 'parameter'"),
    "empty field": ("Stop it.\n\nArgs:\n    parameter:\n\nrewrite: ``a`` -> ``b``", "for 'parameter'"),
    "rewrite": ("Stop it.\n\nArgs:\n    parameter: which.\n\nIt is -> that.", "no 'rewrite:' block"),
    "arrow": ("Stop it.\n\nArgs:\n    parameter: it.\n\nrewrite: all\n\nSo -> so.", "shows no 'before -> after'"),
}


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_an_incomplete_docstring_is_caught(name: str, message: Messages) -> None:
    text, word = DOCSTRINGS[name]
    made = dataclasses.dataclass(frozen=True)(type("Thing", (kit.Good,), {"__doc__": text, "__module__": __name__}))
    violations = documentation_violations(made)
    assert len(violations) == 1
    message(violations[0], word)
    with pytest.raises(CheckError, match="docstring of Thing"):
        CHECK["documentation"](case(made()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"before": [("fc2", kit.Good("wieght"))]}, ("before=", "  got:      cannot apply good('wieght') at 'fc2': ")),
        ({"model": lambda: None}, ("is not an nn.Module\n",)),
    ],
)
def test_case_that_cannot_be_set_up_is_reported(
    options: dict[str, Any], words: tuple[str, ...], message: Messages
) -> None:
    with pytest.raises(CheckError) as caught:
        CHECK["undo_is_exact"](case(kit.Good(), **options))
    message(caught, *words)


def test_complete_docstrings_pass() -> None:
    assert documentation_violations(kit.Good) == documentation_violations(kit.GoodOnMesh) == []


# -- entry points -----------------------------------------------------------------------------------------------


def test_class_without_an_entry_point_is_caught(message: Messages) -> None:
    with use_registry(Registry.discover(environ={})), pytest.raises(CheckError) as caught:
        CHECK["entry_point_agrees"](case(kit.Good()))
    message(caught, "entry_point_agrees", "'kit.good'", "tests.support.kit_primitives:Good", "pyproject.toml")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kit.good", "kit_dist:Thing", ("'kit.good' of kit-dist 1.0", "another class")),
        ("kit.well", "tests.support.kit_primitives:Good", ("Good.name", "'kit.well'")),
        ("kit.good", "kit_dist:Missing", ("'kit.good' of kit-dist 1.0", "cannot be loaded")),
    ],
)
def test_wrong_entry_points_are_caught(
    fake_distributions: FakeEnvironment, name: str, value: str, words: tuple[str, ...], message: Messages
) -> None:
    points = {"slapo.v1.primitives": {name: value}}
    fake_distributions.install(
        FakeDistribution("kit-dist", "1.0", points, {"kit_dist": primitive_source("kit.good")}, ("slapo-core",))
    )
    with use_registry(fake_distributions.registry()), pytest.raises(CheckError) as caught:
        CHECK["entry_point_agrees"](case(kit.Good()))
    message(caught, *words)


def test_an_entry_point_that_agrees_passes(fake_distributions: FakeEnvironment) -> None:
    points = {"slapo.v1.primitives": {"kit.good": "tests.support.kit_primitives:Good"}}
    fake_distributions.install(FakeDistribution("kit-dist", "1.0", points, requires=("slapo-core",)))
    with use_registry(fake_distributions.registry()):
        CHECK["entry_point_agrees"](case(kit.Good()))


# -- imports ----------------------------------------------------------------------------------------------------

IMPORTS = {
    "heavy_transformers": ("import transformers", "it imports transformers"),
    "heavy_prints": ("print('hello')", "it prints 'hello'"),
    "heavy_leaks": ("import os; os.write(2, b'from C')", "it prints 'from C'"),
    "heavy_dtype": (
        "import torch; torch.set_default_dtype(torch.float64)",
        "torch's default dtype (torch.float32 -> torch.float64)",
    ),
    "heavy_seed": ("import torch; torch.manual_seed(0)", "it changes torch's random state"),
    "heavy_environ": (
        "import os; os.environ['KIT_X'] = '1'",
        "KIT_X (unset -> '1')",
    ),
    "heavy_module": (
        "from torch import nn; nn.Module.forward = None",
        "torch.nn.Module.forward (",
    ),
    "heavy_attribute": (
        "from torch import nn; nn.Module.spy = 1",
        "torch.nn.Module.spy (unset -> 1)",
    ),
    "heavy_slapo": (
        "import slapo_core.errors; slapo_core.errors.PathError = None",
        "slapo_core.errors.PathError (replaced)",
    ),
    "heavy_method": (
        "from slapo_core.primitive import Primitive; Primitive.bind = None",
        "slapo_core.primitive.Primitive.bind (replaced)",
    ),
    "heavy_builtin": (
        "import builtins; builtins.print = None",
        "builtins.print (<built-in function print> -> None)",
    ),
    "heavy_writes": ("open('/tmp/slapo-kit-import', 'a').close()", "it writes '/tmp/slapo-kit-import'"),
    "heavy_deletes": (
        "import contextlib, os\nwith contextlib.suppress(OSError): os.remove('/nowhere/at-all')",
        "it calls os.remove('/nowhere/at-all')",
    ),
    "heavy_process": ("import subprocess; subprocess.run(['true'])", "a process (subprocess.Popen)"),
    "heavy_thread": (
        "import threading\ndef work(): pass\nthreading.Thread(target=work).start()",
        "a thread (Thread-1 (work))",
    ),
    "heavy_network": (
        "import socket\nwith socket.socket() as s: s.connect_ex(('127.0.0.1', 1))",
        "the network (socket.connect)",
    ),
    "heavy_modules": (
        "import sys, types\nfor i in range(501): sys.modules[f'kit_many.m{i}'] = types.ModuleType(f'm{i}')",
        "502 modules",
    ),
    "heavy_raises": ("raise ValueError(3)", "ValueError: 3"),
    "heavy_exits": ("import os; os._exit(3)", "exit code 3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", sampled(IMPORTS, 3))
def test_an_import_that_is_not_light_is_caught(
    fake_distributions: FakeEnvironment, module: str, message: Messages
) -> None:
    source, word = IMPORTS[module]
    (fake_distributions.directory / f"{module}.py").write_text(source)
    (fake_distributions.directory / "transformers.py").write_text("")
    violations = probe(module).violations
    assert len(violations) == 1
    message(kit.prose(violations[0]), word)


@pytest.mark.slow
def test_import_may_be_slow_read_files_and_write_bytecode(fake_distributions: FakeEnvironment) -> None:
    lines = (
        "import sys, time",
        "sys.dont_write_bytecode = False",
        "import kit_part",
        "open(__file__).read()",
        "open('/dev/null', 'w').close()",
        "end = time.process_time() + 1.1",
        "while time.process_time() < end: pass",
    )
    (fake_distributions.directory / "kit_slow.py").write_text("\n".join(lines))
    (fake_distributions.directory / "kit_part.py").write_text("")
    found = probe("kit_slow")
    assert (found.violations, found.modules, found.usable) == ((), 2, True)
    assert list((fake_distributions.directory / "__pycache__").glob("kit_part.*.pyc"))


@pytest.mark.slow
def test_endless_import_is_killed(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    (fake_distributions.directory / "heavy_forever.py").write_text("while True: pass")
    monkeypatch.setattr("slapo_testing.probe._TIMEOUT", 0.2)
    found = probe("heavy_forever")
    (violation,) = found.violations
    message(violation, "within 0.2 s")
    assert not found.usable


@pytest.mark.slow
def test_check_reports_findings_of_the_probe(fake_distributions: FakeEnvironment, message: Messages) -> None:
    source = primitive_source("kit.thing", before=("print('hello')",))
    (fake_distributions.directory / "kit_loud.py").write_text(source)
    import kit_loud

    with pytest.raises(CheckError) as caught:
        CHECK["light_import"](case(kit_loud.Thing()))
    message(caught, "thing() at 'fc1' fails light_import: ", "kit_loud", "  got:      it prints 'hello'\n")
