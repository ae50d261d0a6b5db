"""docs/reference.md: every public name, from its docstring.

A name that joins ``slapo_core.__all__`` or ``slapo_testing.__all__``, a member that joins one of their classes,
and a primitive that joins one of this project's distributions appear here by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

from docstring_markdown import sections, signature, tidy

import slapo_core
import slapo_testing as testing
from slapo_core import effects, errors
from slapo_core.plugins import current_registry
from slapo_core.tree.selection import NodeGroup
from slapo_graph import patterns
from slapo_graph.protocol import Flag, Guard, Recorded, Untraceable, check
from slapo_runtime.context import BuildContext
from slapo_runtime.correspondence.storage import LiveTensor
from slapo_runtime.state import ModelState
from slapo_torch.dialect import TorchDialect
from slapo_torch.engine import TorchEngine
from slapo_tp.preconditions import After, Distributed, Divisible
from slapo_tune.samplers import SearchSpace
from slapo_verify import VerifyReport
from slapo_verify.compare import Largest

__all__ = ["MISSING", "reference_page"]

MISSING = "*No docstring.*"
"""What stands in the place of a text that is not there; a test refuses it."""

_INTRODUCTION = """\
`import slapo_core as slapo` gives the names of the first five parts; a class that is returned and not made by hand is
described beside what returns it, and what only plugin authors need says where it is imported from. What is raised on
purpose is in [errors.md](errors.md), the command line in [cli.md](cli.md), and what a plugin may answer in
[hooks.md](hooks.md)."""

# Part -> its names, in the order of the page; a name of `slapo_core.__all__` that stands nowhere here goes to the part
# that its module belongs to.
_PARTS: dict[str, tuple[str, ...]] = {
    "Scheduling": ("create_schedule", "Schedule", "Node", "NodeGroup", "Mesh", "Record", "replay"),
    "Verifying": ("verify", "VerifyReport", "Largest", "observe", "Observation"),
    "Building and training": ("build", "Engine", "StepResult", "TorchDialect", "TorchEngine"),
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
        SearchSpace, TorchDialect, TorchEngine, Untraceable, VerifyReport, check,
    )
}  # fmt: skip
"""Classes that users or plugin authors meet, and that are no names of ``slapo_core`` itself."""
_NOT_MADE_BY_HAND = (
    "Schedule", "NodeGroup", "VerifyReport", "Largest", "TorchDialect", "TorchEngine", "Edit", "Mesh", "Node",
    "Record", "LiveTensor", "SearchSpace",
)  # fmt: skip
# class -> another class of which it is the implementation: what that documents is not said again.
_IMPLEMENTS = {"TorchEngine": "Engine", "TorchDialect": "Dialect"}
_VALUES = {
    "hookimpl": "Decorator that marks a function as a plugin's answer to the hook of its name: [hooks.md](hooks.md)."
}
"""What is neither a class nor a function has no docstring of its own."""
_DISTRIBUTIONS = (
    "slapo-core",
    "slapo-deepspeed",
    "slapo-fusion",
    "slapo-graph",
    "slapo-lightning",
    "slapo-loss",
    "slapo-megatron",
    "slapo-models",
    "slapo-pipeline",
    "slapo-torch",
    "slapo-tp",
    "slapo-tune",
)


def reference_page(note: str) -> str:
    """The page.

    Args:
        note: the comment that says how it is made.
    """
    parts = [(title, list(_named(title))) for title in _PARTS]
    parts.append(("Primitives", list(_primitives())))
    parts.append(("Writing patterns: slapo_graph.patterns", list(_of_patterns())))
    parts.append(("Effects: slapo_core.effects", list(_of_effects())))
    parts.append(("Testing: slapo_testing", list(_of_testing())))
    lines = ["# Reference", "", note, _INTRODUCTION, ""]
    for title, entries in parts:
        links = ", ".join(f"[`{name}`](#{_anchor(name)})" for name, _ in entries)
        lines.append(f"- **{title}**: {links}")
    for title, entries in parts:
        lines += ["", f"## {title}"]
        for _, entry in entries:
            lines += ["", *entry]
    return tidy(lines)


def _named(title: str) -> Iterator[tuple[str, list[str]]]:
    placed = {name for names in _PARTS.values() for name in names}
    modules = {name for name in slapo_core.__all__ if inspect.ismodule(getattr(slapo_core, name))}
    public = [name for name in slapo_core.__all__ if name not in errors.__all__ and name not in modules]
    joined = [name for name in public if name not in placed and _part_of(name) == title]
    for name in (*_PARTS[title], *joined):
        yield name, _entry(name, _BESIDE.get(name) or getattr(slapo_core, name))


def _part_of(name: str) -> str:
    home = getattr(getattr(slapo_core, name), "__module__", "")
    return next((part for start, part in _HOMES.items() if home.startswith(start)), "Scheduling")


def _primitives() -> Iterator[tuple[str, list[str]]]:
    registry = current_registry()
    for name in registry.names("primitives"):
        entry = registry.resolve("primitives", name)
        if entry.distribution in _DISTRIBUTIONS:
            cls: Any = registry.load(entry)
            call = signature(entry.bare, cls, returns=False)
            by_arguments = isinstance(cls.equivalence, property)
            promise = "what its arguments say" if by_arguments else cls.equivalence
            origin = f"*Of {entry.distribution}; promises {promise}.*"
            yield entry.name, [f"### {entry.name}", "", "```python", call, "```", "", origin, "", *_text(cls)]


def _of_patterns() -> Iterator[tuple[str, list[str]]]:
    for name in patterns.__all__:
        yield name, _entry(name, getattr(patterns, name))


def _of_effects() -> Iterator[tuple[str, list[str]]]:
    for name in effects.__all__:
        if name not in slapo_core.__all__:
            yield name, _entry(name, getattr(effects, name))


def _of_testing() -> Iterator[tuple[str, list[str]]]:
    for name in sorted(testing.__all__):
        value = getattr(testing, name)
        if isinstance(value, tuple):
            listed = [f"- `{check.name}`: {check.description}" for check in value]
            yield name, [f"### {name}", "", "Every check, in the order in which they run:", "", *listed]
            continue
        fixture = getattr(value, "__wrapped__", None)
        if not isinstance(value, type) and fixture is not None:
            yield name, [f"### {name}", "", "*A fixture of pytest.*", "", *_text(fixture)]
            continue
        yield name, _entry(name, value)


def _entry(name: str, value: Any) -> list[str]:
    """One public function, class or value, with its members."""
    if not isinstance(value, type):
        if not isinstance(value, FunctionType):
            return [f"### {name}", "", _VALUES.get(name, MISSING)]
        return [f"### {name}", "", "```python", signature(name, value), "```", "", *_text(value)]
    lines = [f"### {name}", ""]
    if value.__module__.startswith(("slapo_runtime.", "slapo_torch.")) and name in _BESIDE:
        lines += [f"*In `{value.__module__}`.*", ""]
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


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")
