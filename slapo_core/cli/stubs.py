"""``slapo stubs``: write typed stubs of the installed primitives for mypy, pyright and editors."""

from __future__ import annotations

import base64
import difflib
import hashlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core.errors import PluginError

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the command of this file."""
    root.command("stubs")(stubs)


def stubs(
    install: Annotated[bool, typer.Option("--install", help="Write into this environment's site-packages.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 and show the diff if out of date.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Write into (or check) this directory.")] = None,
) -> None:
    """Make typed stubs of the installed primitives; without an option, print them. Imports every primitive.

    mypy reads stubs from site-packages only: use --install. pyright also reads them from its stubPath:
    --output typings.
    """
    from slapo_core.plugins import current_registry
    from slapo_core.plugins.metadata import core_version

    if install and output is not None:
        raise typer.BadParameter("choose one of --install and --output", param_hint="--output")
    package = make_stubs(current_registry())
    for item in package.omissions:
        print(f"left out: {item.what}: {item.reason}", file=sys.stderr)
    if check:
        _check(package.difference, output)
    elif install:
        written = package.install(_site_packages(), core_version() or "0")
        print(f"wrote {written}; to remove it: pip uninstall slapo-core-stubs")
    elif output is not None:
        print(f"wrote {package.write(output)}")
    else:
        print(package.vocabulary, end="")


def _check(difference: Callable[[Path], str], output: Path | None) -> None:
    directory = output if output is not None else _site_packages()
    command = f"slapo stubs --output {output}" if output is not None else "slapo stubs --install"
    place = directory / STUB_PACKAGE
    if not place.is_dir():
        print(f"error: no stubs found at {place}\n  hint: {command}", file=sys.stderr)
        raise typer.Exit(1)
    diff = difference(directory)
    if diff:
        print(diff, end="")
        print(f"error: the stubs at {place} are out of date\n  hint: {command}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"the stubs at {place} are up to date")


def _site_packages() -> Path:
    import sysconfig

    return Path(sysconfig.get_path("purelib"))


class AnnotationWriter:
    """Writes types as source, and remembers the imports that the source needs.

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
        """The type to accept for a field declared as ``hint``.

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
    """Return the stub of every usable primitive, and the omissions.

    Args:
        registry: the installed plugins; every primitive is imported, a broken one is an omission.
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
    from slapo_core.primitive import public_signature

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
    lines += ["", "import typing as _t", *writer.imports, "", "from slapo_core.tree.node import Node as _Node", ""]
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


STUB_PACKAGE = "slapo_core-stubs"
"""The directory that type checkers look for (PEP 561)."""


@dataclass(frozen=True)
class StubPackage:
    """The files of the stub package, by path below it."""

    files: Mapping[str, str]
    omissions: tuple[Omission, ...]

    @property
    def vocabulary(self) -> str:
        """The file that depends on the installed plugins."""
        return self.files["_vocabulary.pyi"]

    def write(self, directory: Path) -> Path:
        """Write the package into ``directory``; returns its own directory.

        Files of an earlier one are replaced.
        """
        package = directory / STUB_PACKAGE
        for name, text in self.files.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        return package

    def install(self, site_packages: Path, version: str) -> Path:
        """Write the package with its metadata, so that ``pip uninstall slapo-core-stubs`` removes it."""
        for old in site_packages.glob("slapo_core_stubs-*.dist-info"):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        package = self.write(site_packages)
        info = site_packages / f"slapo_core_stubs-{version}.dist-info"
        info.mkdir()
        summary = "Types of the slapo schedule language as installed here, made by `slapo stubs`"
        metadata = f"Metadata-Version: 2.1\nName: slapo-core-stubs\nVersion: {version}\nSummary: {summary}\n"
        (info / "METADATA").write_text(metadata, "utf-8")
        (info / "INSTALLER").write_text("slapo\n", "utf-8")
        written = [*(package / name for name in self.files), info / "METADATA", info / "INSTALLER"]
        rows = [_record_row(path, site_packages) for path in written]
        (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,", ""]), "utf-8")
        return package

    def difference(self, directory: Path) -> str:
        """A unified diff from the package in ``directory`` to this one; empty if they are the same."""
        package = directory / STUB_PACKAGE
        diff: list[str] = []
        for name, text in self.files.items():
            path = package / name
            old = path.read_text("utf-8") if path.exists() else ""
            diff += difflib.unified_diff(
                old.splitlines(keepends=True), text.splitlines(keepends=True), f"{path}", f"{name} as installed now"
            )
        return "".join(diff)


def make_stubs(registry: Registry) -> StubPackage:
    """Make the stubs of the installed primitives, importing each.

    Args:
        registry: the installed plugins.
    """
    vocabulary, omissions = vocabulary_source(registry)
    return StubPackage({"py.typed": "partial\n", "_vocabulary.pyi": vocabulary}, omissions)


def _record_row(path: Path, root: Path) -> str:
    content = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path.relative_to(root).as_posix()},sha256={digest},{len(content)}"
