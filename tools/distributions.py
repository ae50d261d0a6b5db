"""Say which tests belong to a distribution, or to what has changed.

python tools/distributions.py slapo-tp            # its directories of tests
python tools/distributions.py --since HEAD~1      # those of what has changed since, and a sample of what requires it
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = "slapo-core"
CORE_TESTS = ("tests/architecture", "tests/core", "tests/ecosystem")
DURATIONS = ROOT / "tests" / "durations.json"


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


def affected(files: Iterable[str], required: Mapping[str, set[str]]) -> tuple[list[str], list[str]]:
    """The distributions that some files belong to, and further ones that require one whose sources are among them."""
    tested, sources = set(), set()
    for file in files:
        parts = file.split("/")
        if parts[0] == "plugins":
            (tested if parts[2] == "tests" else sources).add(parts[1])
        elif parts[0] == "tests" or file == "conftest.py":
            tested.add(CORE)
        elif parts[0] == "slapo_core" or file == "pyproject.toml":
            sources.add(CORE)
    changed, reached = tested | sources, set(sources)
    while more := {name for name, needs in required.items() if needs & reached} - reached:
        reached |= more
    return [name for name in required if name in changed], [name for name in required if name in reached - changed]


def sample(names: Iterable[str], seconds: float) -> list[str]:
    """The test files of some distributions whose unit tests take the least, as many as fit into ``seconds``."""
    recorded: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))["unit"]
    places = tuple(f"{directory}/" for name in names for directory in tests_of(name))
    found = []
    for file in sorted(filter(lambda file: file.startswith(places), recorded), key=lambda file: (recorded[file], file)):
        seconds -= recorded[file]
        if seconds < 0:
            break
        found.append(file)
    return [file for file in found if (ROOT / file).exists()]


def main() -> int:
    """Print directories and files of tests, one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", help="a distribution, e.g. slapo-tp")
    parser.add_argument("--since", metavar="BASE", help="the distributions changed since this commit instead")
    parser.add_argument("--sample", type=float, default=0.0, metavar="SECONDS", help="of those that require them")
    options = parser.parse_args()
    known = distributions()
    if options.since is None and options.name not in known:
        parser.error(f"no distribution {options.name!r}; there are {', '.join(known)}")
    names, others = ([options.name], []) if options.since is None else affected(changed_since(options.since), known)
    print(*(directory for name in names for directory in tests_of(name)), *sample(others, options.sample))
    return 0


if __name__ == "__main__":
    sys.exit(main())
