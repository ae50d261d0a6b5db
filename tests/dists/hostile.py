"""Distributions that do everything wrong that a distribution can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slapo_core.plugins import State
from slapo_testing.distributions import FakeDistribution, primitive_source


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
    return [*_unreadable(), *_for_another_core(), *_bad_names(), *_bad_modules(), *_bad_classes()]


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
            "unusable",
            "entry_points.txt cannot be read: ",
        ),
        Hostile(
            _plain("bad-bytes", {}, files={"entry_points.txt": b"[slapo.v1.primitives]\n\xff\xfe = x:Y\n"}),
            "unusable",
            "entry_points.txt cannot be read: UnicodeDecodeError",
        ),
        Hostile(_plain("bad-latin", points, files={"METADATA": latin}), "unusable", "METADATA cannot be read: Unicode"),
        Hostile(_plain("bad-absent", points, files={"METADATA": None}), "unusable", "METADATA cannot be read: "),
        Hostile(_plain("bad-empty", points, files={"METADATA": b""}), "unusable", "METADATA"),
        Hostile(
            _plain("bad-versionless", points, version=None),
            "unusable",
            "METADATA cannot be read: ValueError: it has no Version",
        ),
        Hostile(
            _plain("bad-impostor", {"tp.evil": "x:Y"}, files={"METADATA": b"Name: slapo-tp\nVersion: 9\n"}),
            "unusable",
            "namespace 'tp' of primitive 'tp.evil' belongs to slapo-tp",
        ),
        Hostile(
            _plain("bad-require", points, requires=("slapo-core >= >= 1",)),
            "unusable",
            "METADATA cannot be read: InvalidRequirement",
        ),
    ]


def _for_another_core() -> list[Hostile]:
    points = {"x.y": "nothing:Y"}
    return [
        Hostile(
            _plain("other-major", points, group="slapo.v7.primitives"),
            "unusable",
            "unknown entry-point group 'slapo.v7.primitives'; did you mean 'slapo.v1.primitives'?",
        ),
        Hostile(
            _plain("other-range", points, requires=("slapo-core>=99",)),
            "unusable",
            "needs slapo-core>=99; installed is slapo-core",
        ),
        Hostile(
            _plain("other-old", points, requires=("Slapo_Core<0.0.1",)),
            "unusable",
            "needs slapo-core<0.0.1; installed is slapo-core",
        ),
    ]


def _bad_names() -> list[Hostile]:
    def unusable(name: str, points: Mapping[str, str], says: str, group: str = "slapo.v1.primitives") -> Hostile:
        return Hostile(_plain(name, points, group=group), "unusable", says)

    return [
        unusable("name-bare", {"shard": "x:Y"}, "primitive name 'shard' must be '<namespace>.<name>'"),
        unusable("name-upper", {"Acme.Pad": "x:Y"}, "primitive name 'Acme.Pad' must be"),
        unusable("name-keyword", {"kw.lambda": "x:Y"}, "primitive name 'kw.lambda' must be"),
        unusable("name-deep", {"a.b.c": "x:Y"}, "primitive name 'a.b.c' must be"),
        unusable("name-dunder", {"dd.__init__": "x:Y"}, "primitive name 'dd.__init__' must be"),
        unusable("name-thief", {"tp.shard": "x:Y"}, "namespace 'tp' of primitive 'tp.shard' belongs to slapo-tp"),
        unusable(
            "name-core", {"core.replace": "x:Y"}, "namespace 'core' of primitive 'core.replace' belongs to slapo-core"
        ),
        unusable("name-dialect", {"torch": "x:Y"}, "dialect 'torch' belongs to slapo-torch", "slapo.v1.dialects"),
        unusable("name-query-deep", {"a.b.c": "x:Y"}, "query name 'a.b.c' must be", "slapo.v1.queries"),
        unusable(
            "name-kind",
            {"x.y": "x:Y"},
            "group 'slapo.v1.primitive'; did you mean 'slapo.v1.primitives'?",
            "slapo.v1.primitive",
        ),
        unusable(
            "name-group",
            {"x.y": "x:Y"},
            "group 'slapo.primitives'; did you mean 'slapo.v1.primitives'?",
            "slapo.primitives",
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


def _malformed_value() -> Hostile:
    points = {"mod_value.thing": "not a module"}
    return Hostile(_plain("mod-value", points), "ok", "", "mod_value.thing", "unusable", "ValueError: ")


def _healthy(bare: str, before: Iterable[str]) -> str:
    return primitive_source(f"mod_{bare}.thing", before=before)


def _bad_modules() -> list[Hostile]:
    recursion = "def again():\n    again()\nagain()\n"
    group = "raise BaseExceptionGroup('several', [KeyError('a'), SystemExit(1)])\n"
    custom = "class Odd(BaseException): pass\nraise Odd('odd')\n"
    hidden = "class Meta(type):\n    def __subclasscheck__(cls, other): raise SystemExit(4)\nThing = 3\n"
    return [
        _module("absent", "import a_module_that_is_not_there\n", "unusable", "ModuleNotFoundError: No module named"),
        _module("syntax", "def broken(:\n", "unusable", "SyntaxError: "),
        _module("exit", "import sys\nsys.exit('bye')\n", "unusable", "SystemExit: bye"),
        _module("raise", "raise RuntimeError('no GPU')\n", "unusable", "RuntimeError: no GPU"),
        _module("recursion", recursion, "unusable", "RecursionError: "),
        _module("generator", "raise GeneratorExit\n", "unusable", "GeneratorExit: "),
        _module("several", group, "unusable", "BaseExceptionGroup: several"),
        _module("custom", custom, "unusable", "Odd: odd"),
        _module("empty", "", "unusable", "AttributeError: module 'mod_empty' has no attribute 'Thing'"),
        _module("number", hidden, "unusable", "must be a subclass of slapo_core.primitive.Primitive"),
        _module("bytes", "\x00", "unusable", "SyntaxError: "),
        _malformed_value(),
    ]


def _bad_classes() -> list[Hostile]:
    good = _healthy("{}", ())
    foreign = "class Thing:\n    name = 'mod_foreign.thing'\n"
    abstract = _healthy("abstract", ()).replace("def apply", "def not_apply")
    subclass = _healthy("subclass", ()).replace("class Thing", "class Base") + "class Thing(Base): pass\n"
    equivalence = _healthy("equivalence", ()).replace("Equivalence.EXACT", "'exact'")
    return [
        _module("foreign", foreign, "unusable", "must be a subclass of slapo_core.primitive.Primitive"),
        _module("abstract", abstract, "unusable", "class Thing does not define apply()"),
        _module("misnamed", good, "unusable", "Thing.name must be 'mod_misnamed.thing'"),
        _module("thawed", _healthy("thawed", ()).replace("frozen=True", ""), "unusable", "@dataclass(frozen=True)"),
        _module("subclass", subclass, "unusable", "@dataclass(frozen=True) (got no dataclass of its own)"),
        _module("equivalence", equivalence, "unusable", "Thing.equivalence must be an Equivalence (got 'exact')"),
        _module("instance", _healthy("instance", ()) + "Thing = Thing()\n", "unusable", "got an instance of Thing"),
    ]
