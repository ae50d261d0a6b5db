"""Importing slapo and listing plugins is light: neither imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "torch._dynamo", "transformers", "numpy")


def heavy_modules_after(code: str) -> list[str]:
    """The heavy packages that a fresh interpreter holds after running ``code``."""
    report = f"import sys; print('heavy:', *(name for name in {HEAVY!r} if name in sys.modules))"
    program = f"{code}\n{report}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def slapo(*arguments: str) -> str:
    """Code that runs the console command in the same interpreter and insists on its success."""
    return (
        f"import sys; sys.argv = ['slapo', *{list(arguments)!r}]\n"
        "from slapo_core.cli.main import main\n"
        "try:\n"
        "    code = main()\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        "assert not code, code\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import slapo_core", id="import slapo_core"),
        pytest.param("import slapo_core; dir(slapo_core)", id="dir(slapo_core)"),
        pytest.param("import slapo_tp", id="import slapo_tp"),
        pytest.param("import slapo_runtime.launcher", id="import slapo_runtime.launcher"),
        pytest.param(slapo("plugins", "list"), id="slapo plugins list"),
        pytest.param(slapo("plugins", "list", "--json"), id="slapo plugins list --json"),
        pytest.param(slapo("--help"), id="slapo --help"),
        pytest.param(slapo("estimate", "--help"), id="slapo estimate --help"),
        pytest.param(slapo("device", "show", "h100"), id="slapo device show"),
        pytest.param(slapo("models", "list"), id="slapo models list"),
    ],
)
def test_commands_import_no_heavy_library(code: str) -> None:
    assert heavy_modules_after(code) == []


@pytest.mark.slow
def test_only_who_compiles_or_trains_imports_the_compiler() -> None:
    names = "slapo_core.create_schedule, slapo_core.verify, slapo_core.build"
    assert heavy_modules_after(f"import slapo_core; {names}") == ["torch", "numpy"]  # and so are public names lazy
    trained = "import torch; torch.optim.SGD([torch.ones(1)]).step"
    assert {"torch", "torch._dynamo"} <= {*heavy_modules_after(trained)}, "the detector sees both"
