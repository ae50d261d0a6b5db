"""``slapo plugins new``: write a package from ``slapo_testing/template``."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from slapo_core import Command
from slapo_core.errors import ArgumentError
from slapo_core.plugins import CORE_DISTRIBUTION, FIRST_PARTY, Entry, core_version, is_identifier, name_violation


class NewCommand(Command):
    """Write the files of a new plugin, with tests."""

    name = "plugins.new"

    def app(self) -> typer.Typer:
        app = typer.Typer()
        app.command()(new)
        return app


def new(
    name: Annotated[str, typer.Argument(help="Name of the distribution, as in pip install NAME, e.g. acme-slapo.")],
    directory: Annotated[Path | None, typer.Option("--directory", help="Directory to create; default: ./NAME.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="First part of its primitives' names; default: from NAME.")
    ] = None,
    primitive: Annotated[
        str | None, typer.Option("--primitive", help="Name of a primitive to write; default: the example offload.")
    ] = None,
) -> None:
    """Write a new plugin package: one primitive, tests on the kit, README, CI workflow."""

    project = Project.named(name, namespace=namespace, primitive=primitive)
    target = directory if directory is not None else Path(project.name)
    for path in render(project, target):
        print(f"wrote {path}")
    print(
        f"\nnext:\n"
        f"    cd {target}\n"
        f"    pip install -e '.[test]'\n"
        f"    pytest\n"
        f"    slapo plugins list\n"
        f"\nthen write your primitive in {target / 'src' / project.package / project.primitive}.py"
    )


_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")  # the core metadata specification
_PLACEHOLDER = re.compile(r"<<(\w+)>>")
_SUFFIX = ".tmpl"
_EXAMPLE = "offload"


@dataclass(frozen=True)
class Project:
    """A new plugin package.

    Args:
        name: the distribution, canonical, e.g. ``"acme-slapo"``.
        package: the import package, e.g. ``"acme_slapo"``.
        namespace: the first part of its primitives' names, e.g. ``"acme"``.
        primitive: the name of its primitive.
    """

    name: str
    package: str
    namespace: str
    primitive: str = _EXAMPLE

    @classmethod
    def named(cls, name: str, *, namespace: str | None = None, primitive: str | None = None) -> Project:
        """Make the project of a distribution name.

        Args:
            name: as for ``pip install``.
            namespace: default: the name without ``slapo``, e.g. ``"acme"`` for ``"acme-slapo"``.
            primitive: e.g. ``"rms_norm"``; default: the example.

        Raises:
            ArgumentError: an invalid name; with a valid one.
        """
        if not _NAME.match(name):
            raise ArgumentError(
                f"{name!r} is not a distribution name: letters, digits, '-', '_' and '.', "
                "beginning and ending with a letter or digit",
                hint="slapo plugins new acme-slapo",
            )
        canonical = canonicalize_name(name)
        if canonical in FIRST_PARTY:
            raise ArgumentError(f"'{canonical}' is a distribution of the slapo project", hint="choose another name")
        package = canonical.replace("-", "_")
        if not is_identifier(package) or package in sys.stdlib_module_names or package in ("torch", "slapo_core"):
            raise ArgumentError(
                f"'{canonical}' has the package name '{package}', which is reserved or not importable",
                hint=f"slapo plugins new slapo-{canonical}",
            )
        parts = [part for part in canonical.split("-") if part != "slapo"]
        chosen = namespace if namespace is not None else "_".join(parts)
        cls._check_namespace(chosen, canonical)
        if primitive is not None and (not is_identifier(primitive) or hides_member(primitive)):
            raise ArgumentError(
                f"primitive {primitive!r} must be a lowercase identifier, and not a member of nodes or schedules",
                hint=f"slapo plugins new {canonical} --primitive rms_norm",
            )
        return cls(canonical, package, chosen, primitive or _EXAMPLE)

    def values(self) -> dict[str, str]:
        """Return the values of the template's placeholders."""
        is_example = self.primitive == _EXAMPLE
        return {
            **asdict(self),
            "class": "".join(part.capitalize() for part in self.primitive.split("_")),
            "arguments": "min_bytes=1 << 20" if is_example else "",
            "summary": "keep activations in host memory" if is_example else self.primitive,
            "core_requirement": _core_requirement(),
            "year": str(datetime.datetime.now(tz=datetime.UTC).year),
        }

    @staticmethod
    def _check_namespace(namespace: str, name: str) -> None:
        hint = f"slapo plugins new {name} --namespace acme"
        if not is_identifier(namespace):
            raise ArgumentError(f"namespace {namespace!r} must be a lowercase identifier", hint=hint)
        if hides_member(namespace):
            raise ArgumentError(f"namespace '{namespace}' is a member of nodes or schedules", hint=hint)
        entry = Entry("primitives", f"{namespace}.{_EXAMPLE}", "", name, "0.1.0")
        violation = name_violation(entry)
        if violation is not None:
            raise ArgumentError(violation.replace(f" of primitive '{entry.name}'", ""), hint=hint)


def hides_member(name: str) -> bool:
    """Return whether schedules, nodes or groups have a member of that name, which hides a primitive."""
    from torch import nn

    from slapo_core import create_schedule

    schedule = create_schedule(nn.Sequential(nn.Identity()))
    targets = (schedule, schedule["0"], schedule["*"])
    return any(hasattr(type(each), name) or name in getattr(each, "__dict__", ()) for each in targets)


def render(project: Project, target: Path) -> tuple[Path, ...]:
    """Write the package.

    Args:
        project: the package.
        target: the directory, which must not exist.

    Returns:
        the written files, sorted.

    Raises:
        ArgumentError: ``target`` exists.
    """
    if target.exists():
        raise ArgumentError(
            f"{target} already exists; nothing was written", hint=f"slapo plugins new {project.name} --directory OTHER"
        )
    values = project.values()
    others = "__primitive__" if project.primitive == _EXAMPLE else _EXAMPLE
    texts = {
        target / _output_path(path, values): _PLACEHOLDER.sub(lambda match: values[match[1]], source.read_text("utf-8"))
        for path, source in _template_files(files("slapo_testing").joinpath("template"), PurePosixPath())
        if others not in path.name
    }
    for path, text in texts.items():  # all are rendered before the first is written
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tuple(sorted(texts))


def _template_files(folder: Traversable, below: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _template_files(item, below / item.name)
        elif item.name.endswith(_SUFFIX):
            yield below / item.name, item


def _output_path(path: PurePosixPath, values: Mapping[str, str]) -> PurePosixPath:
    """Convert ``_github/x.yml.tmpl`` to ``.github/x.yml``, ``src/__package__`` to ``src/acme_slapo``."""
    parts = []
    for part in path.parts:
        part = (
            part.removesuffix(_SUFFIX)
            .replace("__package__", values["package"])
            .replace("__primitive__", values["primitive"])
        )
        is_dunder = part.startswith("__")
        parts.append(f".{part[1:]}" if part.startswith("_") and not is_dunder else part)
    return PurePosixPath(*parts)


def _core_requirement() -> str:
    """Return the requirement of the running slapo-core, below its next incompatible version."""
    version = core_version()
    if version is None:
        return CORE_DISTRIBUTION
    from packaging.version import Version

    release = Version(version)
    following = f"{release.major}.{release.minor + 1}" if release.major == 0 else f"{release.major + 1}"
    first = version if release.is_prerelease else f"{release.major}.{release.minor}"
    return f"{CORE_DISTRIBUTION}>={first},<{following}"
