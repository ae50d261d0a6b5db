"""``slapo stubs``: write typed stubs of the installed primitives, for mypy, pyright, editors."""

from __future__ import annotations

import difflib
import inspect
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core.errors import PluginError, Verbatim
from slapo_core.plugins import current_registry
from slapo_core.plugins.metadata import core_version

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry

STUB_PACKAGE = "slapo_core-stubs"
"""The directory that type checkers look for (PEP 561)."""

_VOCABULARY = "_vocabulary.pyi"


def stubs(
    install: Annotated[bool, typer.Option("--install", help="Write into this environment's site-packages.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 and show the diff if out of date.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Write into (or check) this directory.")] = None,
) -> None:
    """Make typed stubs of the installed primitives; without an option, print them. Imports every primitive.

    mypy reads stubs from site-packages only: use --install. pyright also reads them from its stubPath:
    --output typings.
    """
    if install and output is not None:
        raise typer.BadParameter("choose one of --install and --output", param_hint="--output")
    if output is not None and output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is not a directory", param_hint="--output")
    source, left_out = vocabulary_source(current_registry())
    for text in left_out:
        print(f"left out: {text}", file=sys.stderr)
    directory = Path(sysconfig.get_path("purelib")) if output is None else output
    if check:
        _check(source, directory, "slapo stubs --install" if output is None else f"slapo stubs --output {output}")
    elif install:
        print(f"wrote {_install(source, directory)}; to remove it: pip uninstall slapo-core-stubs")
    elif output is not None:
        print(f"wrote {_write(source, directory)}")
    else:
        print(source, end="")


def _check(source: str, directory: Path, command: str) -> None:
    place = directory / STUB_PACKAGE
    if not place.is_dir():
        print(f"error: no stubs found at {place}\n  hint: {command}", file=sys.stderr)
        raise typer.Exit(1)
    file = place / _VOCABULARY
    old = file.read_text("utf-8") if file.exists() else ""
    if old != source:
        lines = old.splitlines(keepends=True), source.splitlines(keepends=True)
        print("".join(difflib.unified_diff(*lines, f"{file}", f"{_VOCABULARY} as installed now")), end="")
        print(f"error: the stubs at {place} are out of date\n  hint: {command}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"the stubs at {place} are up to date")


def _write(source: str, directory: Path) -> Path:
    package = directory / STUB_PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "py.typed").write_text("partial\n", "utf-8")
    (package / _VOCABULARY).write_text(source, "utf-8")
    return package


def _install(source: str, site_packages: Path) -> Path:
    """Write the package with its metadata, so that ``pip uninstall slapo-core-stubs`` removes it."""
    for old in site_packages.glob("slapo_core_stubs-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    package, version = _write(source, site_packages), core_version() or "0"
    info = site_packages / f"slapo_core_stubs-{version}.dist-info"
    info.mkdir()
    summary = "Types of the slapo schedule language as installed here, made by `slapo stubs`"
    metadata = f"Metadata-Version: 2.1\nName: slapo-core-stubs\nVersion: {version}\nSummary: {summary}\n"
    (info / "METADATA").write_text(metadata, "utf-8")
    (info / "INSTALLER").write_text("slapo\n", "utf-8")
    (info / "RECORD").touch()
    written = sorted(path.relative_to(site_packages).as_posix() for each in (package, info) for path in each.iterdir())
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in written), "utf-8")
    return package


class AnnotationWriter:
    """Writes types as source, and collects the imports for it.

    Modules are imported under names with an underscore (``import torch as _torch``), so that no primitive, whatever
    its name, hides one inside the class body.

    Args:
        taken: names with another meaning in the class body; builtins among them are qualified.
    """

    def __init__(self, taken: Collection[str] = ()) -> None:
        self._taken = frozenset(taken)
        self._modules: set[str] = set()

    @property
    def imports(self) -> tuple[str, ...]:
        """The import lines, sorted."""
        return tuple(f"import {module} as {_alias(module)}" for module in sorted(self._modules))

    def argument(self, hint: Any) -> str:
        """Format the type of an argument for a field declared as ``hint``.

        Lists become tuples and sets frozen sets when a primitive is made, so both are accepted: the field
        ``tuple[str, ...]`` gives ``tuple[str, ...] | list[str]``.
        """
        if hint is None or hint is types.NoneType:
            return "None"
        if hint is Any or isinstance(hint, typing.TypeVar):
            return self._name("typing", "Any")
        if hint is ...:
            return "..."
        origin = typing.get_origin(hint)
        return self._class(hint) if origin is None else self._generic(origin, typing.get_args(hint))

    def _generic(self, origin: Any, arguments: tuple[Any, ...]) -> str:
        if origin in (typing.Union, types.UnionType):
            return " | ".join(dict.fromkeys(map(self.argument, arguments)))
        if origin is typing.Annotated:
            return self.argument(arguments[0])
        if origin is typing.Literal:
            return f"{self._name('typing', 'Literal')}[{', '.join(map(repr, arguments))}]"
        if origin is Callable:
            takes, gives = arguments if len(arguments) == 2 else (..., arguments[-1])
            listed = f"[{', '.join(map(self.argument, takes))}]" if isinstance(takes, list) else "..."
            return f"{self._class(origin)}[{listed}, {self.argument(gives)}]"
        if origin is tuple and arguments == ((),):
            return f"{self._class(tuple)}[()]"
        inner = ", ".join(map(self.argument, arguments))
        text = f"{self._class(origin)}[{inner}]"
        if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
            return f"{text} | {self._class(list)}[{self.argument(arguments[0])}]"
        if origin is frozenset:
            return f"{text} | {self._class(set)}[{inner}]"
        return text

    def _class(self, hint: Any) -> str:
        module, name = getattr(hint, "__module__", None), getattr(hint, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str) or "<locals>" in name or module == "__main__":
            return self._name("typing", "Any")  # a checker has no name for it
        if module == "builtins" and name not in self._taken:
            return name
        return self._name(module, name)

    def _name(self, module: str, name: str) -> str:
        self._modules.add(module)
        return f"{_alias(module)}.{name}"


def _alias(module: str) -> str:
    return "_" + module.replace(".", "_")


_HEADER = """\
# What can be written after sch["..."] here, made by `slapo stubs` from the installed plugins. Do not edit: run it again
# after installing or removing a plugin.
"""


def vocabulary_source(registry: Registry) -> tuple[str, tuple[str, ...]]:
    """Return the source of the stubs, and the reason for each primitive left out.

    Args:
        registry: the installed plugins; every primitive is imported, a broken one is left out.
    """
    left_out = [f"{each.label}: {each.state}: {each.reason}" for each in registry.plugins if not each.usable]
    bare = {name: registry.resolve("primitives", name).name for name in registry.bare_names("primitives")}
    writer = AnnotationWriter(taken=[*bare, *registry.namespaces(), *(full.split(".")[1] for full in bare.values())])
    methods: dict[str, tuple[str, str]] = {}  # full name -> arguments, documentation
    labels = set()
    for full in registry.names("primitives"):
        entry = registry.resolve("primitives", full)
        try:
            cls = registry.load(entry)
            summary = (inspect.getdoc(cls) or "").strip().partition("\n")[0]
            methods[full] = _method(_arguments(cls, writer), f"{summary} [{full}, {entry.label}]".strip())
            labels.add(entry.label)
        except PluginError as error:
            left_out.append(f"{full} of {entry.label}: {error.message}")
        except (TypeError, NameError, AttributeError) as error:  # annotations that cannot be evaluated
            left_out.append(f"{full} of {entry.label}: its signature cannot be read: {error}")
    lines = [*(f"# from {label}" for label in sorted(labels))]
    lines += [f"# left out: {' '.join(text.split())}" for text in left_out]
    lines += ["", "import typing as _t", *writer.imports, "", "from slapo_core.tree.node import Node as _Node", ""]
    lines += ['_Result = _t.TypeVar("_Result")', "", *_classes(methods, bare)]
    return _HEADER + "\n".join(lines) + "\n", tuple(left_out)


def _arguments(cls: type, writer: AnnotationWriter) -> str:
    from slapo_core.primitive import public_signature

    own_init = cls.__init__  # type: ignore[misc]  # a dataclass's is made from its fields, and may be overridden
    hints = {**typing.get_type_hints(cls), **typing.get_type_hints(own_init)}
    parameters = []
    for parameter in public_signature(cls).parameters.values():
        hint = hints.get(parameter.name, hints.get(f"{parameter.name}_", Any))
        changes: dict[str, Any] = {"annotation": Verbatim(writer.argument(hint))}
        if parameter.default is not inspect.Parameter.empty:
            changes["default"] = Verbatim(_default(parameter.default))
        parameters.append(parameter.replace(**changes))
    if any(parameter.name == "self" for parameter in parameters):
        raise TypeError("an argument is called 'self'")
    kinds = {parameter.kind for parameter in parameters} & {inspect.Parameter.POSITIONAL_ONLY}
    receiver = inspect.Parameter("self", *kinds or {inspect.Parameter.POSITIONAL_OR_KEYWORD})
    return str(inspect.Signature([receiver, *parameters]))


def _default(value: Any) -> str:
    """Format a default: a literal in full, anything else as ``...``."""
    return repr(value) if value is None or type(value) in (bool, int, float, str) else "..."


def _method(arguments: str, documentation: str) -> tuple[str, str]:
    is_plain = '"' not in documentation and "\\" not in documentation
    return arguments, f'"""{documentation}"""' if is_plain else repr(documentation)


def _classes(methods: Mapping[str, tuple[str, str]], bare: Mapping[str, str]) -> list[str]:
    """Format the classes of namespaces, nodes and schedules."""

    def define(name: str, full: str, result: str) -> list[str]:
        arguments, documentation = methods[full]
        return [f"    def {name}{arguments} -> {result}:", f"        {documentation}", "        ..."]

    usable = {name: full for name, full in bare.items() if full in methods}
    namespaces, lines = sorted({full.partition(".")[0] for full in methods} - set(usable)), []
    for namespace in namespaces:
        lines += ["", f"class _Namespace_{namespace}(_t.Generic[_Result]):", f'    """Primitives of {namespace}."""']
        for full in methods:
            if full.startswith(f"{namespace}."):
                lines += define(full.partition(".")[2], full, "_Result")
    for cls, result in (("NodePrimitives", "_t.Self"), ("SchedulePrimitives", "_Node")):
        lines += ["", f"class {cls}:", "    ..."]
        for namespace in namespaces:
            lines += ["    @property", f"    def {namespace}(self) -> _Namespace_{namespace}[{result}]: ..."]
        for name, full in usable.items():
            lines += define(name, full, result)
    return lines
