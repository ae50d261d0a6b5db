"""Run the unit tests of each distribution in an environment that holds what it declares, and nothing else.

python tools/alone.py                      # every distribution
python tools/alone.py slapo-tp --json tp.json

Of each, the wheel with its extra "test" is installed; other packages are linked from this environment, as the wheels
require them. The tests run in a copy of the test folders that they may use: their own, and the shared helpers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.clean import CleanEnvironment, build_wheels  # noqa: E402
from tools.distributions import CORE, distributions  # noqa: E402

SHARED = ("conftest.py", "pyproject.toml", "README.md", "docs/*/*.md", "tests/*.py", "tests/*.json", "tests/*.txt")


@dataclass(frozen=True)
class Result:
    """What the tests of a distribution gave.

    Attributes:
        installed: the distributions of this repository that were there.
        failures: names of tests, and what pytest says where it could not run them.
    """

    name: str
    installed: list[str]
    passed: int
    skipped: int
    failures: list[str]
    seconds: float

    @property
    def is_ok(self) -> bool:
        return self.passed > 0 and not self.failures


def run_alone(name: str, wheels: tuple[Path, ...], directory: Path) -> Result:
    """Install a distribution in a directory of its own, and run its unit tests there.

    Args:
        name: e.g. ``"slapo-tp"``.
        wheels: of every distribution of this repository.
        directory: empty.
    """
    environment = CleanEnvironment(wheels, directory, f"{name}[test]")
    tests = copy_tests(name, directory / "tree")
    report = directory / "report.xml"
    command = [str(environment.bin / "python"), "-m", "pytest", "-q", "-m", "not ranks and not slow", "--tb=short"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--junit-xml={report}", tests],
        cwd=directory / "tree",
        env=environment.variables(),
        capture_output=True,
        text=True,
    )
    installed = sorted(environment.own)
    if not report.exists():
        return Result(name, installed, 0, 0, [(done.stdout + done.stderr)[-2000:]], 0.0)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    cases = list(suite.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = int(suite.get("skipped", 0))
    names = [f"{case.get('classname')}::{case.get('name')}: {_reason(case)}" for case in failed]
    if done.returncode not in (0, 1) and not names:
        names = [(done.stdout + done.stderr)[-2000:]]
    return Result(name, installed, len(cases) - len(failed) - skipped, skipped, names, float(suite.get("time", 0)))


def _reason(case: ElementTree.Element) -> str:
    found = next(part for kind in ("failure", "error") if (part := case.find(kind)) is not None)
    said = found.get("message", "")
    return (found.text or said).strip().rpartition("\n")[2] if said == "collection failure" else said.partition("\n")[0]


def copy_tests(name: str, directory: Path) -> str:
    """Copy what the tests of a distribution may use; returns their folder, relative to the directory."""
    tests = "tests/core" if name == CORE else f"plugins/{name}/tests"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    shared = (*SHARED, "tests/support", "tests/dists", f"{tests.removesuffix('tests')}README.md")
    files = subprocess.check_output([*command, *shared, tests], cwd=ROOT, text=True).splitlines()
    others = ("tests/core/", "tests/ecosystem/", "tests/integration/", "tests/architecture/", "tests/gpu/")
    for file in files:
        if (ROOT / file).exists() and (file.startswith(f"{tests}/") or not file.startswith(others)):
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, directory / file)
    return tests


def run_all(names: list[str], processes: int) -> list[Result]:
    """Run the tests of some distributions, several at a time."""
    with tempfile.TemporaryDirectory(prefix="slapo-alone-", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        projects = [ROOT, *(project.parent for project in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
        (directory / "wheels").mkdir()
        wheels = build_wheels(projects, directory / "wheels")
        for name in names:
            (directory / name).mkdir()
        with ThreadPoolExecutor(processes) as pool:
            return list(pool.map(lambda name: run_alone(name, wheels, directory / name), names))


def table(results: list[Result]) -> str:
    """One row for each distribution."""
    rows = []
    for one in results:
        counts = f"{one.passed} | {one.skipped} | {len(one.failures)} | {one.seconds:.0f}"
        rows.append(f"| {one.name} | {', '.join(one.installed)} | {counts} |")
    head = ["| distribution | with | passed | skipped | failed | seconds |", "|---|---|--:|--:|--:|--:|"]
    return "\n".join([*head, *rows])


def main() -> int:
    """Print a table, and what failed."""
    known = list(distributions())
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="DIST", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--processes", type=int, default=2, help="distributions at a time (default: 2)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"no distribution {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = run_all(options.names or known, options.processes)
    print(table(results))
    for one in results:
        print(*(f"{one.name}: {failure}" for failure in one.failures), sep="\n", end="\n" if one.failures else "")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.is_ok for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
