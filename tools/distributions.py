"""Say which tests belong to a distribution, or to what has changed.

python tools/distributions.py slapo-tp            # its directories of tests
python tools/distributions.py --since HEAD~1      # those of what has changed since, and of what needs it
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = "slapo-core"
CORE_TESTS = ("tests/architecture", "tests/core", "tests/ecosystem")


def distributions() -> dict[str, set[str]]:
    """Each distribution with those of this repository that it requires."""
    found = {CORE: set[str]()}
    for project in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        required = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
        found[project.parent.name] = {re.split(r"[^\w-]", requirement)[0] for requirement in required}
    return {name: required & found.keys() for name, required in found.items()}


def tests_of(name: str) -> list[str]:
    """The directories of tests of a distribution."""
    return list(CORE_TESTS) if name == CORE else [f"plugins/{name}/tests"]


def changed_since(base: str) -> list[str]:
    """Changed files: committed since ``base``, not committed, and not known to git yet."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    lines = [subprocess.check_output(["git", *command], cwd=ROOT, text=True).splitlines() for command in commands]
    return sorted({line for printed in lines for line in printed})


def affected(files: Iterable[str], required: Mapping[str, set[str]]) -> list[str]:
    """The distributions that some files belong to, and those that require one whose sources are among them."""
    tested, changed = set(), set()
    for file in files:
        parts = file.split("/")
        if parts[0] == "plugins":
            (tested if parts[2] == "tests" else changed).add(parts[1])
        elif parts[0] == "tests" or file == "conftest.py":
            tested.add(CORE)
        elif parts[0] == "slapo_core" or file == "pyproject.toml":
            changed.add(CORE)
    while more := {name for name, needs in required.items() if needs & changed} - changed:
        changed |= more
    return [name for name in required if name in tested | changed]


def main() -> int:
    """Print directories of tests, one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", help="a distribution, e.g. slapo-tp")
    parser.add_argument("--since", metavar="BASE", help="the distributions changed since this commit instead")
    options = parser.parse_args()
    known = distributions()
    if options.since is None and options.name not in known:
        parser.error(f"no distribution {options.name!r}; there are {', '.join(known)}")
    names = [options.name] if options.since is None else affected(changed_since(options.since), known)
    print(*(directory for name in names for directory in tests_of(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
