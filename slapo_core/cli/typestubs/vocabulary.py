"""The primitives that are installed, as methods that a type checker can read."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_core.cli.typestubs.annotations import AnnotationWriter
from slapo_core.errors import PluginError
from slapo_core.plugins.registry import Registry
from slapo_core.spec.primitive import public_signature

__all__ = ["Omission", "vocabulary_source"]

_HEADER = """\
# What can be written after sch["..."] here, made by `slapo stubs` from what is installed. Do not edit: make it anew
# after installing or removing a plugin.
"""


@dataclass(frozen=True)
class Omission:
    """A primitive, or a whole plugin, that the stubs leave out, and why."""

    what: str
    reason: str


class _Source:
    """Text that `inspect` prints as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def vocabulary_source(registry: Registry) -> tuple[str, tuple[Omission, ...]]:
    """The stub of every usable primitive, and what was left out.

    Args:
        registry: what is installed; every primitive of it is imported, a broken one is an omission.
    """
    omissions = [
        Omission(plugin.label, f"{plugin.state}: {plugin.reason}") for plugin in registry.plugins if not plugin.usable
    ]
    bare = {name: registry.resolve("primitives", name).name for name in registry.bare_names("primitives")}
    writer = AnnotationWriter(taken=[*bare, *registry.namespaces(), *(full.split(".")[1] for full in bare.values())])
    methods: dict[str, tuple[str, str]] = {}  # full name -> arguments, documentation
    for full in registry.names("primitives"):
        entry = registry.resolve("primitives", full)
        try:
            cls = registry.load(entry)
            summary = (inspect.getdoc(cls) or "").strip().partition("\n")[0]
            methods[full] = (_arguments(cls, writer), f"{summary} [{full}, {entry.label}]".strip())
        except PluginError as error:
            omissions.append(Omission(f"{full} of {entry.label}", error.message))
        except (TypeError, NameError, AttributeError) as error:  # annotations that cannot be evaluated
            omissions.append(Omission(f"{full} of {entry.label}", f"its signature cannot be read: {error}"))
    text = _render(registry, methods, bare, writer, omissions)
    return text, tuple(omissions)


def _arguments(cls: type, writer: AnnotationWriter) -> str:
    signature = public_signature(cls)
    own_init = cls.__init__  # type: ignore[misc]  # a dataclass's is made from its fields, and may be overridden
    hints = {**typing.get_type_hints(cls), **typing.get_type_hints(own_init)}
    parameters = []
    for parameter in signature.parameters.values():
        hint = hints.get(parameter.name, hints.get(f"{parameter.name}_", Any))
        changes: dict[str, Any] = {"annotation": _Source(writer.argument(hint))}
        if parameter.default is not inspect.Parameter.empty:
            changes["default"] = _Source(_default(parameter.default))
        parameters.append(parameter.replace(**changes))
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    if any(parameter.name == "self" for parameter in parameters):
        raise TypeError("an argument is called 'self'")
    positional_only = any(parameter.kind is inspect.Parameter.POSITIONAL_ONLY for parameter in parameters)
    if not positional_only:
        receiver = receiver.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return str(inspect.Signature([receiver, *parameters]))


def _default(value: Any) -> str:
    """Defaults that are literals are shown by editors; for others, `...` says that there is one."""
    return repr(value) if value is None or type(value) in (bool, int, float, str) else "..."


def _render(
    registry: Registry,
    methods: Mapping[str, tuple[str, str]],
    bare: Mapping[str, str],
    writer: AnnotationWriter,
    omissions: Iterable[Omission],
) -> str:
    labels = sorted({registry.resolve("primitives", full).label for full in methods})
    usable = {name: full for name, full in bare.items() if full in methods}
    namespaces = sorted({full.partition(".")[0] for full in methods} - set(usable))
    lines = [*(f"# from {label}" for label in labels)]
    lines += [f"# left out: {item.what}: {' '.join(item.reason.split())}" for item in omissions]
    lines += ["", "import typing as _t", *writer.imports, "", "from slapo_core.tree.node import TreeNode as _Node", ""]
    lines += ['_Result = _t.TypeVar("_Result")', ""]
    for namespace in namespaces:
        lines += ["", f"class _Namespace_{namespace}(_t.Generic[_Result]):", f'    """Primitives of {namespace}."""']
        for full, (arguments, documentation) in methods.items():
            if full.startswith(f"{namespace}."):
                lines += _method(full.partition(".")[2], arguments, documentation, "_Result")
    for cls, result in (("OnNodes", "_t.Self"), ("OnRoot", "_Node")):
        lines += ["", f"class {cls}:", "    ..."]
        for namespace in namespaces:
            lines += ["    @property", f"    def {namespace}(self) -> _Namespace_{namespace}[{result}]: ..."]
        for name, full in usable.items():
            lines += _method(name, *methods[full], result)
    return _HEADER + "\n".join(lines) + "\n"


def _method(name: str, arguments: str, documentation: str, result: str) -> list[str]:
    return [f"    def {name}{arguments} -> {result}:", f"        {_quoted(documentation)}", "        ..."]


def _quoted(text: str) -> str:
    return repr(text) if '"' in text or "\\" in text else f'"""{text}"""'
