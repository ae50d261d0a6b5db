"""Set the version of every distribution and their requirements of each other, and build what is uploaded.

python tools/release.py --check                # versions, requirements and CHANGELOG.md agree; sdists hold the tests
python tools/release.py 0.2.0                  # show what would change
python tools/release.py 0.2.0 --write          # change it
python tools/release.py --build dist           # wheels and sdists
python tools/release.py --build dist slapo-tp  # of one distribution

A requirement is the range in which a schedule and a plugin stay valid: >=0.2,<0.3 for 0.2.x, >=1.4,<2 for 1.4.x.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = "CHANGELOG.md"

_VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
_REQUIREMENT = re.compile(r"\b(slapo-[a-z]+)((?:\[[\w,]+\])?)(>=[\w.]+,<[\w.]+)")
_RELEASE = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")


def projects(root: Path) -> dict[str, Path]:
    """Find the pyproject.toml of every distribution: ``{"slapo-core": pyproject.toml, "slapo-tp": ...}``."""
    plugins = sorted(root.glob("plugins/*/pyproject.toml"))
    return {"slapo-core": root / "pyproject.toml", **{file.parent.name: file for file in plugins}}


def texts(root: Path) -> list[Path]:
    """Find every file that requires distributions by a range: also the examples, and pages that show one."""
    found = [*projects(root).values(), *root.glob("examples/*/pyproject.toml"), *root.glob("docs/**/*.md")]
    return sorted(file for file in found if file in projects(root).values() or _REQUIREMENT.search(file.read_text()))


def range_of(version: str) -> str:
    """Return the range that a requirement of a version has: ``"0.2.3"`` as ``">=0.2,<0.3"``."""
    parts = _RELEASE.fullmatch(version)
    if parts is None:
        raise ValueError(f"version must be MAJOR.MINOR.PATCH (got {version!r})")
    major, minor = int(parts[1]), int(parts[2])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def versioned(file: Path, version: str, root: Path) -> str:
    """Return the text of a file at a version."""
    own, allowed = projects(root), range_of(version)
    text = file.read_text(encoding="utf-8")
    if file in own.values():
        text, count = _VERSION.subn(f'version = "{version}"', text)
        if count != 1:
            raise ValueError(f"{file} must have one line 'version = \"...\"' (got {count})")
    return _REQUIREMENT.sub(lambda found: found[0] if found[1] not in own else found[1] + found[2] + allowed, text)


def current_version(root: Path) -> str:
    """Return the version of slapo-core, which is that of all."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def problems(root: Path) -> list[str]:
    """Say what does not agree with the version of slapo-core."""
    version = current_version(root)
    hint = f"\n  hint: python tools/release.py {version} --write"
    found = []
    for file in texts(root):
        old, new = file.read_text(encoding="utf-8"), versioned(file, version, root)
        for line, wanted in zip(old.splitlines(), new.splitlines(), strict=True):
            if line != wanted:
                found.append(f"{file.relative_to(root)}: {line.strip()}: must be {wanted.strip()}{hint}")
    for name, file in projects(root).items():
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        if settings["project"]["name"] != name:
            found.append(f"{file.relative_to(root)}: name must be {name!r} (got {settings['project']['name']!r})")
        if "tests" not in settings["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]:
            found.append(
                f'{file.relative_to(root)}: the sdist must hold the tests\n  hint: only-include = [..., "tests"]'
            )
    changelog = root / CHANGELOG
    if not changelog.exists() or f"\n## [{version}]" not in changelog.read_text(encoding="utf-8"):
        found.append(f"{CHANGELOG} has no section for {version}\n  hint: rename '## [Unreleased]' to '## [{version}]'")
    return found


def write(root: Path, version: str, *, dry: bool) -> None:
    """Change every file to a version; print the differences."""
    for file in texts(root):
        old, new = file.read_text(encoding="utf-8"), versioned(file, version, root)
        name = str(file.relative_to(root))
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, name, n=0))
        if not dry:
            file.write_text(new, encoding="utf-8")


def build(root: Path, directory: Path, names: list[str]) -> None:
    """Build the wheel and the sdist of some distributions."""
    for name in names:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(directory)]
        subprocess.run(command, cwd=projects(root)[name].parent, check=True)


def main(arguments: list[str] | None = None) -> int:
    """Check, change or build."""
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="VERSION | DIST", help="the new version; with --build: what to build"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where something disagrees")
    parser.add_argument("--write", action="store_true", help="change the files; without it they are only shown")
    parser.add_argument("--build", type=Path, metavar="DIR", help="build wheels and sdists there")
    parser.add_argument("--root", type=Path, default=ROOT, help="the work tree (default: that of this file)")
    options = parser.parse_args(arguments)
    root, names = options.root.resolve(), options.names
    if not options.check and options.build is None:
        if len(names) != 1 or _RELEASE.fullmatch(names[0]) is None:
            parser.error(f"VERSION must be MAJOR.MINOR.PATCH (got {' '.join(names) or 'nothing'})")
        write(root, names[0], dry=not options.write)
        if not options.write:
            print("\nnothing was changed; --write changes the files", file=sys.stderr)
        return 0
    found = problems(root)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if found or options.build is None:
        return 1 if found else 0
    if unknown := sorted(set(names) - projects(root).keys()):
        parser.error(f"no distribution {', '.join(unknown)}; there are {', '.join(projects(root))}")
    build(root, options.build.resolve(), names or list(projects(root)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
