"""docs/reference/slapo-*.md: every public name, from its docstring, one page for each distribution.

A name that joins ``slapo_core.__all__`` or ``slapo_testing.__all__``, a member that joins one of their classes,
and a primitive that joins one of this project's distributions appear here by themselves.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

from docstring_markdown import sections, signature, tidy

import slapo_core
import slapo_testing as testing
from slapo_core import DISTRIBUTIONS, Primitive, effects, errors
from slapo_core.plugins import current_registry
from slapo_core.tree.selection import NodeGroup
from slapo_graph import patterns
from slapo_graph.protocol import Flag, Guard, Recorded, Untraceable, check
from slapo_runtime.context import BuildContext
from slapo_runtime.correspondence.storage import LiveTensor
from slapo_runtime.data import ReplicaSampler, sampler
from slapo_runtime.state import ModelState
from slapo_torch.dialect import TorchDialect
from slapo_torch.engine import TorchEngine
from slapo_tp.preconditions import After, Distributed, Divisible
from slapo_tune.samplers import SearchSpace
from slapo_verify import VerifyReport
from slapo_verify.compare import Largest

__all__ = ["MISSING", "reference_pages"]

MISSING = "*No docstring.*"
"""What stands in the place of a text that is not there; a test refuses it."""

_INTRODUCTION = """\
`import slapo_core as slapo` is the one import: `slapo.build` and the other names below are loaded from their
distributions at first use. Names listed as *imported from the package* need an import of their own, for example
`import slapo_models`. A class that is returned and not made by hand is described beside the function that returns it.

Also generated from the sources: [the command line](cli.md), [errors](errors.md), and [hooks](hooks.md), which a plugin
may answer. Written by hand: [extension points](extension-points.md) of a plugin,
[DeepSpeed's options](deepspeed-options.md) and [Megatron-core's options](megatron-options.md)."""

# Part -> its names, in the order of the page; a name of `slapo_core.__all__` that stands nowhere here goes to the part
# that its module belongs to.
_PARTS: dict[str, tuple[str, ...]] = {
    "Scheduling": ("create_schedule", "Schedule", "Node", "NodeGroup", "Mesh", "Record", "replay"),
    "Verifying": ("verify", "VerifyReport", "Largest", "observe", "Observation"),
    "Building and training": (
        "build",
        "Engine",
        "StepResult",
        "TorchDialect",
        "TorchEngine",
        "sampler",
        "ReplicaSampler",
    ),
    "Writing primitives": (
        "Primitive",
        "Edit",
        "Equivalence",
        "Violation",
        "Effect",
        "Layout",
        "Distributed",
        "Divisible",
        "After",
        "register_primitive",
    ),
    "Writing dialects and hooks": (
        "Dialect",
        "Plan",
        "BuildContext",
        "ModelState",
        "LiveTensor",
        "hookimpl",
        "Fact",
        "Problem",
    ),
    "Writing samplers": ("Sampler", "SearchSpace", "Trial"),
    "Writing tracers": ("Tracer", "Recorded", "Guard", "Flag", "Untraceable", "check"),
}
_HOMES = {
    "slapo_runtime.build": "Building and training",
    "slapo_torch": "Building and training",
    "slapo_verify": "Verifying",
    "slapo_core.schedule": "Scheduling",
    "slapo_core.plugins": "Writing primitives",
    "slapo_runtime.weights.live": "Building and training",
    "slapo_runtime.stages": "Building and training",
    "slapo_runtime": "Writing dialects and hooks",
}
_BESIDE = {
    cls.__name__: cls
    for cls in (
        After, BuildContext, Distributed, Divisible, Flag, Guard, Largest, LiveTensor, ModelState, NodeGroup, Recorded,
        ReplicaSampler, SearchSpace, TorchDialect, TorchEngine, Untraceable, VerifyReport, check, sampler,
    )
}  # fmt: skip
"""Classes that users or plugin authors meet, and that are no names of ``slapo_core`` itself."""
_NOT_MADE_BY_HAND = (
    "Schedule", "NodeGroup", "VerifyReport", "Largest", "TorchDialect", "TorchEngine", "Edit", "Mesh", "Node",
    "Record", "LiveTensor", "ReplicaSampler", "SearchSpace",
)  # fmt: skip
# class -> another class of which it is the implementation: what that documents is not said again.
_IMPLEMENTS = {"TorchEngine": "Engine", "TorchDialect": "Dialect"}
_VALUES = {
    "hookimpl": "Decorator that marks a function as a plugin's answer to the hook of its name: [hooks.md](hooks.md)."
}
"""What is neither a class nor a function has no docstring of its own."""


def reference_pages(note: str) -> dict[str, str]:
    """Return the pages by file name: one of each distribution, and ``index.md`` with a link to each name.

    Args:
        note: the comment that says how they are made.
    """
    parts = [(title, list(_named(title))) for title in _PARTS]
    parts.insert(1, ("Primitives", list(_primitives())))
    parts.append(("Patterns", list(_of_patterns())))
    parts.append(("Effects", list(_of_effects())))
    parts.append(("Testing", list(_of_testing())))
    placed = {name for _, entries in parts for name, _, _ in entries}
    parts.append(("Imported from the package", list(_of_packages(placed))))
    pages, index = {}, ["# Reference", "", note, _INTRODUCTION]
    for distribution in DISTRIBUTIONS:
        lines, seen = [f"# {distribution}", "", note], Counter[str]()
        index += ["", f"## [{distribution}]({distribution}.md)", ""]
        for title, entries in parts:
            own = [(name, entry) for name, owner, entry in entries if owner == distribution]
            if own:
                linked = [f"[`{name}`]({distribution}.md#{_anchor(name, seen)})" for name, _ in own]
                index.append(f"- {title}: {', '.join(linked)}")
                lines += ["", f"## {title}", *_HOW_IMPORTED.get(title, "").format(_package(distribution)).splitlines()]
                for _, entry in own:
                    lines += ["", *entry]
        pages[f"{distribution}.md"] = tidy(lines)
    return {"index.md": tidy(index), **pages}


_HOW_IMPORTED = {
    "Imported from the package": "\nNames of the module `{}`.\n",
    "Patterns": "\n`from slapo_graph import patterns`, or `slapo.patterns`.\n",
    "Effects": "\n`from slapo_core import effects`, or `slapo.effects`.\n",
    "Testing": "\nNames of the module `slapo_testing`.\n",
}
Entries = Iterator[tuple[str, str, list[str]]]
"""Name, distribution, lines."""


def _package(distribution: str) -> str:
    return distribution.replace("-", "_")


def _distribution(value: Any) -> str:
    return str(value.__module__).partition(".")[0].replace("_", "-")


def _named(title: str) -> Entries:
    placed = {name for names in _PARTS.values() for name in names}
    modules = {name for name in slapo_core.__all__ if inspect.ismodule(getattr(slapo_core, name))}
    public = [name for name in slapo_core.__all__ if name not in errors.__all__ and name not in modules]
    joined = [name for name in public if name not in placed and _part_of(name) == title]
    for name in (*_PARTS[title], *joined):
        value = _BESIDE.get(name) or getattr(slapo_core, name)
        yield name, "slapo-core" if name in _VALUES else _distribution(value), _entry(name, value)


def _of_packages(placed: set[str]) -> Entries:
    """Yield what a distribution's package exports, and no page has yet."""
    for distribution in DISTRIBUTIONS:
        package = importlib.import_module(_package(distribution))
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            is_primitive = isinstance(value, type) and issubclass(value, Primitive)
            if distribution != "slapo-core" and name not in placed and not is_primitive:
                yield name, distribution, _entry(name, value)


def _part_of(name: str) -> str:
    home = getattr(getattr(slapo_core, name), "__module__", "")
    return next((part for start, part in _HOMES.items() if home.startswith(start)), "Scheduling")


def _primitives() -> Entries:
    registry = current_registry()
    for name in registry.names("primitives"):
        entry = registry.resolve("primitives", name)
        if entry.distribution in DISTRIBUTIONS:
            cls: Any = registry.load(entry)
            call = signature(entry.bare, cls, returns=False)
            by_arguments = isinstance(cls.equivalence, property)
            promise = "what its arguments say" if by_arguments else cls.equivalence
            heading = [f"### {entry.name}", "", "```python", call, "```", ""]
            yield entry.name, entry.distribution, [*heading, f"*Promises {promise}.*", "", *_text(cls)]


def _of_patterns() -> Entries:
    for name in patterns.__all__:
        yield name, "slapo-graph", _entry(name, getattr(patterns, name))


def _of_effects() -> Entries:
    for name in effects.__all__:
        if name not in slapo_core.__all__:
            yield name, "slapo-core", _entry(name, getattr(effects, name))


def _of_testing() -> Entries:
    for name in sorted(testing.__all__):
        value = getattr(testing, name)
        if isinstance(value, tuple):
            listed = [f"- `{check.name}`: {check.description}" for check in value]
            text = "Every check, in the order in which they run:"
            yield name, "slapo-testing", [f"### {name}", "", text, "", *listed]
            continue
        fixture = getattr(value, "__wrapped__", None)
        if not isinstance(value, type) and fixture is not None:
            yield name, "slapo-testing", [f"### {name}", "", "*A fixture of pytest.*", "", *_text(fixture)]
            continue
        yield name, "slapo-testing", _entry(name, value)


def _entry(name: str, value: Any) -> list[str]:
    """One public function, class or value, with its members."""
    if not isinstance(value, type):
        if not isinstance(value, FunctionType):
            return [f"### {name}", "", _VALUES.get(name, MISSING)]
        return [f"### {name}", "", *_place(name, value), "```python", signature(name, value), "```", "", *_text(value)]
    lines = [f"### {name}", "", *_place(name, value)]
    if name not in _NOT_MADE_BY_HAND and Protocol not in value.__bases__ and _is_constructed(value):
        lines += ["```python", signature(name, value, returns=False), "```", ""]
    lines += _text(value)
    described = dict(_members(value))
    known = dict(_members(getattr(slapo_core, _IMPLEMENTS[name]))) if name in _IMPLEMENTS else {}
    for own, member in described.items():
        text = _documentation(member)
        if own in known and not text:
            continue  # said where the protocol says it
        lines += ["", f"#### `{name}.{own}`", "", *_call(own, member), *(sections(text) if text else [MISSING])]
    return lines


def _place(name: str, value: Any) -> list[str]:
    is_inside = name in _BESIDE and value.__module__.startswith(("slapo_runtime.", "slapo_torch."))
    return [f"*In `{value.__module__}`.*", ""] if is_inside else []


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties, those of bases first."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("slapo"):
            found |= {
                name: member
                for name, member in vars(base).items()
                if (not name.startswith("_") or name == "__getitem__")
                and isinstance(member, (FunctionType, property, classmethod, staticmethod))
                and name not in getattr(cls, "__dataclass_fields__", {})
            }
    yield from found.items()


def _call(name: str, member: Any) -> list[str]:
    if isinstance(member, property):
        result = _annotation_of(member.fget)
        return [f"`{name}`{f': `{result}`' if result else ''}", ""]
    function: Callable[..., Any] = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    return ["```python", signature(name, function), "```", ""]


def _annotation_of(function: Any) -> str:
    result = inspect.signature(function).return_annotation
    return "" if result is inspect.Signature.empty else str(result).replace("'", "")


def _is_constructed(cls: type) -> bool:
    return "__init__" in vars(cls) and not issubclass(cls, BaseException)


def _documentation(value: Any) -> str:
    own = value.fget if isinstance(value, property) else value
    return inspect.cleandoc(getattr(own, "__doc__", None) or "")


def _text(value: Any) -> list[str]:
    text = inspect.cleandoc(value.__doc__ or "") if isinstance(value, (type, FunctionType)) else ""
    return sections(text) if text else [MISSING]


def _anchor(name: str, seen: Counter[str]) -> str:
    """Return the anchor of a heading: headings that differ in case only are numbered."""
    anchor = name.lower().replace(".", "")
    seen[anchor] += 1
    return anchor if seen[anchor] == 1 else f"{anchor}-{seen[anchor] - 1}"
