"""Run the tests of slapo-transformers and slapo-lightning with other versions of their hosts; keep what came out.

python tools/host_versions.py oldest     # the lower bounds that the two distributions require
python tools/host_versions.py newest     # what pip takes within them
python tools/host_versions.py            # write docs/results/host_versions.md again, from the .json

An environment has the hosts and what they require, over the packages of the one that runs this, and is removed. All
tests run, breadth included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.torch_versions import ROOT, Row, call, run_tests

ROWS = ROOT / "docs" / "results" / "host_versions.json"
PAGE = ROOT / "docs" / "results" / "host_versions.md"
SUITE = ("plugins/slapo-transformers/tests", "plugins/slapo-lightning/tests")
HOSTS = ("transformers", "accelerate", "trl", "peft", "lightning")
_FACTS = """
import importlib.metadata as metadata, json, platform, sys
print(json.dumps({"python": platform.python_version(), **{name: metadata.version(name) for name in sys.argv[1:]}}))
"""


def main() -> int:
    """Run what the command line asks for; give 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=["oldest", "newest"], help="without it, only the page is written")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that run tests at once (default: 1)")
    options = parser.parse_args()
    rows: dict[str, Row] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    row = _run(options.which, options.processes) if options.which else None
    if row is not None:
        rows[options.which] = row
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(rows))
    if row is not None:
        print(
            f"{row['passed']} passed, {row['skipped']} skipped, {len(row['failed'])} failed", *row["failed"], sep="\n  "
        )
    return 1 if row is not None and row["failed"] else 0


def required() -> dict[str, Requirement]:
    """What the two distributions and their tests require of each host."""
    found = {}
    for plugin in ("slapo-transformers", "slapo-lightning"):
        project = tomllib.loads((ROOT / "plugins" / plugin / "pyproject.toml").read_text())["project"]
        for one in map(Requirement, project["dependencies"] + project["optional-dependencies"]["test"]):
            found[one.name] = one
    return {name: found[name] for name in HOSTS}


def oldest(requirement: Requirement) -> str:
    """The lower bound of a requirement."""
    return next(one.version for one in requirement.specifier if one.operator == ">=")


def _run(which: str, processes: int) -> Row:
    wanted = required().values()
    versions = [f"{one.name}=={oldest(one)}" if which == "oldest" else str(one) for one in wanted]
    directory = Path(tempfile.mkdtemp(prefix="hosts-"))
    python = directory / "bin" / "python"
    try:
        call([sys.executable, "-m", "venv", str(directory)])
        own, parent = (sysconfig.get_path("purelib", vars={"base": str(one)}) for one in (directory, sys.prefix))
        Path(own, "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")
        pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "-q", "--upgrade"]
        call([*pip, *versions, f"torch=={_facts(python, 'torch')['torch']}"])
        return {**_facts(python, "torch", *HOSTS), **run_tests(python, SUITE, processes, SLAPO_TEST_WHOLE="1")}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _facts(python: Path, *names: str) -> dict[str, str]:
    facts: dict[str, str] = json.loads(subprocess.check_output([str(python), "-c", _FACTS, *names], text=True, cwd="/"))
    return facts


def page(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, as Markdown."""
    introduction = (
        "What the tests of slapo-transformers and slapo-lightning gave with the oldest and the newest version of each "
        "host, by `python tools/host_versions.py oldest` and `newest`. The oldest ones are the lower bounds that the "
        "distributions require."
    )
    columns = ("python", "torch", *HOSTS, "passed", "skipped")
    lines = ["# Versions of hosts", "", *textwrap.wrap(introduction, 120, break_on_hyphens=False), ""]
    lines += [_line("", *("Python" if one == "python" else one for one in columns), "failed")]
    lines += [_line(*["---"] * (len(columns) + 2)).replace(" ", "")]
    lines += [_line(name, *(row[one] for one in columns), len(row["failed"])) for name, row in rows.items()]
    failed: Sequence[str] = [f"- {name}: `{test}`" for name, row in rows.items() for test in row["failed"]]
    if failed:
        lines += ["", "## What failed", "", *failed]
    return "\n".join(lines) + "\n"


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
