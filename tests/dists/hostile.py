"""Distributions that do everything wrong that a distribution can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slapo_core.plugins.model import State
from slapo_core.testing.distributions import FakeDistribution, primitive_source


@dataclass(frozen=True)
class Hostile:
    """A distribution and what must become of it.

    Args:
        distribution: what to install.
        listed: its state before anything is imported.
        says: words of the reason.
        name: a primitive of it to use, where it can be listed as ``ok``.
        used: its state after that name was used.
        says_when_used: words of the reason then.
    """

    distribution: FakeDistribution
    listed: State
    says: str = ""
    name: str = ""
    used: State | None = None
    says_when_used: str = ""


def hostile_distributions() -> list[Hostile]:
    """All of them; they can be installed together."""
    return [*_unreadable(), *_for_another_core(), *_bad_names(), *_bad_modules(), *_bad_classes(), *_tampering()]


def _plain(
    name: str,
    points: Mapping[str, str],
    *,
    group: str = "slapo.v1.primitives",
    version: str | None = "1.0",
    requires: tuple[str, ...] = (),
    files: Mapping[str, bytes | None] | None = None,
) -> FakeDistribution:
    return FakeDistribution(name, version, {group: points}, requires=requires, files=files or {})


def _unreadable() -> list[Hostile]:
    points = {"x.y": "nothing:Y"}
    latin = b"Metadata-Version: 2.1\nName: bad-latin\nVersion: 1.0\nAuthor: Andr\xe9\n"
    return [
        Hostile(
            _plain("bad-lines", {}, files={"entry_points.txt": b"[slapo.v1.primitives]\nno equals sign\n"}),
            "broken",
            "'no equals sign' is not 'name = module:attribute'",
        ),
        Hostile(
            _plain("bad-bytes", {}, files={"entry_points.txt": b"[slapo.v1.primitives]\n\xff\xfe = x:Y\n"}),
            "broken",
            "entry_points.txt is not UTF-8",
        ),
        Hostile(_plain("bad-latin", points, files={"METADATA": latin}), "broken", "METADATA cannot be read: Unicode"),
        Hostile(_plain("bad-absent", points, files={"METADATA": None}), "broken", "METADATA cannot be read: "),
        Hostile(_plain("bad-empty", points, files={"METADATA": b""}), "broken", "METADATA"),
        Hostile(_plain("bad-versionless", points, version=None), "broken", "METADATA has no Version"),
        Hostile(
            _plain("bad-impostor", {"tp.evil": "x:Y"}, files={"METADATA": b"Name: slapo-tp\nVersion: 9\n"}),
            "broken",
            "METADATA says 'Name: slapo-tp' but the directory is 'bad_impostor-1.0.dist-info'",
        ),
        Hostile(
            _plain("bad-require", points, requires=("slapo-core >= >= 1",)),
            "broken",
            "malformed 'Requires-Dist: slapo-core >= >= 1'",
        ),
    ]


def _for_another_core() -> list[Hostile]:
    points = {"x.y": "nothing:Y"}
    return [
        Hostile(
            _plain("other-major", points, group="slapo.v7.primitives"),
            "incompatible",
            "written for plugin API v7; slapo-core",
        ),
        Hostile(
            _plain("other-range", points, requires=("slapo-core>=99",)),
            "incompatible",
            "needs slapo-core>=99; installed is slapo-core",
        ),
        Hostile(
            _plain("other-old", points, requires=("Slapo_Core<0.0.1",)),
            "incompatible",
            "needs slapo-core<0.0.1; installed is slapo-core",
        ),
    ]


def _bad_names() -> list[Hostile]:
    def rejected(name: str, points: Mapping[str, str], says: str, group: str = "slapo.v1.primitives") -> Hostile:
        return Hostile(_plain(name, points, group=group), "rejected", says)

    duplicate = b"[slapo.v1.primitives]\ndup.a = x:Y\ndup.a = x:Z\n"
    return [
        rejected("name-bare", {"shard": "x:Y"}, "primitive name 'shard' must be '<namespace>.<name>'"),
        rejected("name-upper", {"Acme.Pad": "x:Y"}, "primitive name 'Acme.Pad' must be"),
        rejected("name-keyword", {"kw.lambda": "x:Y"}, "primitive name 'kw.lambda' must be"),
        rejected("name-deep", {"a.b.c": "x:Y"}, "primitive name 'a.b.c' must be"),
        rejected("name-dunder", {"dd.__init__": "x:Y"}, "primitive name 'dd.__init__' must be"),
        rejected("name-reserved", {"rr.undo": "x:Y"}, "'undo' would hide a member of nodes or schedules"),
        rejected("name-shadow", {"ss.tp": "x:Y"}, "'tp' would hide a member of nodes or schedules"),
        rejected("name-thief", {"tp.shard": "x:Y"}, "namespace 'tp' of 'tp.shard' is reserved for slapo-tp"),
        rejected("name-core", {"core.replace": "x:Y"}, "namespace 'core' of 'core.replace' is reserved for slapo-core"),
        rejected("name-two", {"one.a": "x:Y", "two.b": "x:Y"}, "names in 2 namespaces (one, two)"),
        rejected("name-value", {"vv.a": "not a module"}, "points to 'not a module', which is not of the form"),
        rejected(
            "name-dialect", {"torch": "x:Y"}, "dialect name 'torch' is reserved for slapo-core", "slapo.v1.dialects"
        ),
        rejected("name-sampler", {"random": "x:Y"}, "is reserved for slapo-tune", "slapo.v1.samplers"),
        rejected("name-family", {"optuna.mine": "x:Y"}, "is reserved for slapo-tune", "slapo.v1.samplers"),
        rejected("name-sampler-deep", {"a.b.c": "x:Y"}, "or '<family>.<name>' of two of them", "slapo.v1.samplers"),
        rejected("name-kind", {"x.y": "x:Y"}, "there is no kind 'primitive'; did you mean", "slapo.v1.primitive"),
        rejected("name-group", {"x.y": "x:Y"}, "group 'slapo.primitives' is not of the form", "slapo.primitives"),
        rejected("name-hooks", {"a": "x", "b": "y"}, "more than one hooks module", "slapo.v1.hooks"),
        Hostile(
            _plain("name-twice", {}, files={"entry_points.txt": duplicate}),
            "rejected",
            "primitive name 'dup.a' is declared 2 times",
        ),
    ]


def _module(bare: str, source: str, state: State, says: str) -> Hostile:
    """A distribution ``mod-<bare>`` that looks right until its module is imported."""
    module = f"mod_{bare}"
    distribution = FakeDistribution(
        f"mod-{bare.replace('_', '-')}",
        "1.0",
        {"slapo.v1.primitives": {f"{module}.thing": f"{module}:Thing"}},
        {module: source},
    )
    return Hostile(distribution, "ok", "", f"{module}.thing", state, says)


def _healthy(bare: str, before: Iterable[str]) -> str:
    return primitive_source(f"mod_{bare}.thing", before=before)


def _bad_modules() -> list[Hostile]:
    recursion = "def again():\n    again()\nagain()\n"
    group = "raise BaseExceptionGroup('several', [KeyError('a'), SystemExit(1)])\n"
    custom = "class Odd(BaseException): pass\nraise Odd('odd')\n"
    hidden = "class Meta(type):\n    def __subclasscheck__(cls, other): raise SystemExit(4)\nThing = 3\n"
    return [
        _module("absent", "import a_module_that_is_not_there\n", "broken", "ModuleNotFoundError: No module named"),
        _module("syntax", "def broken(:\n", "broken", "SyntaxError: "),
        _module("exit", "import sys\nsys.exit('bye')\n", "broken", "SystemExit: bye"),
        _module("raise", "raise RuntimeError('no GPU')\n", "broken", "RuntimeError: no GPU"),
        _module("recursion", recursion, "broken", "RecursionError: "),
        _module("generator", "raise GeneratorExit\n", "broken", "GeneratorExit: "),
        _module("several", group, "broken", "BaseExceptionGroup: several"),
        _module("custom", custom, "broken", "Odd: odd"),
        _module("empty", "", "broken", "AttributeError: module 'mod_empty' has no attribute 'Thing'"),
        _module("number", hidden, "rejected", "must be a subclass of slapo_core.spec.primitive.Primitive"),
        _module("bytes", "\x00", "broken", "SyntaxError: "),
    ]


def _bad_classes() -> list[Hostile]:
    good = _healthy("{}", ())
    foreign = "class Thing:\n    name = 'mod_foreign.thing'\n"
    abstract = _healthy("abstract", ()).replace("def apply", "def not_apply")
    subclass = _healthy("subclass", ()).replace("class Thing", "class Base") + "class Thing(Base): pass\n"
    equivalence = _healthy("equivalence", ()).replace("Equivalence.EXACT", "'exact'")
    return [
        _module("foreign", foreign, "rejected", "must be a subclass of slapo_core.spec.primitive.Primitive"),
        _module("abstract", abstract, "rejected", "class Thing does not define apply()"),
        _module("misnamed", good, "rejected", "Thing.name must be 'mod_misnamed.thing'"),
        _module("thawed", _healthy("thawed", ()).replace("frozen=True", ""), "rejected", "@dataclass(frozen=True)"),
        _module("subclass", subclass, "rejected", "@dataclass(frozen=True) (got no dataclass of its own)"),
        _module("equivalence", equivalence, "rejected", "Thing.equivalence must be an Equivalence (got 'exact')"),
        _module("instance", _healthy("instance", ()) + "Thing = Thing()\n", "rejected", "got an instance of Thing"),
    ]


def _tampering() -> list[Hostile]:
    def tampers(bare: str, before: Iterable[str], says: str) -> Hostile:
        return _module(bare, _healthy(bare, before), "rejected", f"its import changed slapo: {says}")

    fail = ("slapo_core.errors.PathError = None", "raise ImportError('after the deed')")
    return [
        tampers(
            "patch_function",
            ("import slapo_core.spec.kinds as k", "k.Kind = None"),
            "slapo_core.spec.kinds.Kind was replaced",
        ),
        tampers(
            "patch_method",
            ("from slapo_core.plugins.registry import Registry", "Registry.resolve = lambda *a, **k: None"),
            "slapo_core.plugins.registry.Registry.resolve was replaced",
        ),
        tampers(
            "patch_module",
            ("import sys, types", "sys.modules['slapo_core.errors'] = types.ModuleType('slapo_core.errors')"),
            "the module slapo_core.errors was replaced",
        ),
        tampers(
            "patch_deletes",
            ("import slapo_core.errors as e", "del e.PathError"),
            "slapo_core.errors.PathError was deleted",
        ),
        tampers(
            "patch_adds",
            ("import slapo_core.spec.kinds as k", "k.extra = 1", "Primitive.__setattr__ = None"),
            "slapo_core.spec.kinds.extra was added; slapo_core.spec.primitive.Primitive.__setattr__ was added",
        ),
        tampers("patch_fails", ("import slapo_core.errors", *fail), "slapo_core.errors.PathError was replaced"),
    ]
