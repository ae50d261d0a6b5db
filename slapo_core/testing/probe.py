"""Import modules in a fresh process and report what that brought along, did and changed."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["HEAVY", "MODULE_LIMIT", "ImportProbe", "probe"]

MODULE_LIMIT = 500
"""Modules that an import may bring along beyond torch and slapo themselves."""

HEAVY = (
    "accelerate",
    "apex",
    "datasets",
    "deepspeed",
    "flash_attn",
    "jax",
    "matplotlib",
    "megatron",
    "pandas",
    "scipy",
    "sklearn",
    "tensorflow",
    "transformer_engine",
    "transformers",
    "vllm",
    "xformers",
)
"""Packages that a plugin must import inside the functions that use them."""

_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class ImportProbe:
    """What importing modules in a fresh process did.

    Args:
        modules: the number of modules imported beyond torch and slapo; None if the process did not live to tell.
        violations: what is wrong with it, in words; empty for a light import.
        usable: whether the modules could be imported and left torch's layers and functions alone, so that this process
            may import them too.
        traceback: of an import that raised.
    """

    modules: int | None
    violations: tuple[str, ...]
    usable: bool
    traceback: str = ""


def probe(*modules: str) -> ImportProbe:
    """Import ``modules`` in a fresh process in which torch and slapo are imported already; the result is kept.

    Args:
        modules: dotted names; modules of this process that lie outside of ``sys.path`` are imported from their files.
    """
    named = []
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        named.append((name, os.path.abspath(file) if file else None))
    return _probe(tuple(named), tuple(map(str, sys.path)))


@functools.lru_cache(maxsize=256)
def _probe(modules: tuple[tuple[str, str | None], ...], path: tuple[str, ...]) -> ImportProbe:
    facts = _server().ask(
        {"modules": modules, "path": path, "heavy": HEAVY, "environ": dict(os.environ), "timeout": _TIMEOUT}
    )
    if facts.get("timed_out"):
        return ImportProbe(None, (f"the import did not end within {_TIMEOUT:g} s",), usable=False)
    if "modules" not in facts:
        last = (facts["output"].strip().splitlines() or ["no output"])[-1]
        ended = f"the importing process ended with {facts['ended']}: {last}"
        return ImportProbe(None, (ended,), usable=False, traceback=facts["output"])
    if facts["failure"]:
        return ImportProbe(None, (f"the import raised {facts['failure']}",), usable=False, traceback=facts["traceback"])
    patches_torch = any(change.startswith("torch.nn.") for change in facts["changed"])
    return ImportProbe(facts["modules"], tuple(_violations(facts)), usable=not patches_torch)


def _violations(facts: dict[str, Any]) -> list[str]:
    violations = []
    output = facts["output"].strip()
    if output:
        violations.append(f"it prints {output[:200]!r}")
    if facts["heavy"]:
        violations.append(f"it imports {', '.join(facts['heavy'])}")
    if facts["modules"] > MODULE_LIMIT:
        violations.append(f"it imports {facts['modules']} modules beyond torch")
    return violations + facts["done"] + [f"it changes {change}" for change in facts["changed"]]


class _Server:
    """A process that has imported torch once and forks a fresh one for every request."""

    def __init__(self) -> None:
        # Without the caller's directory on its path, and without what a plugin may have put into the environment.
        own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slapo_core.testing._probe_process"],
            env={**os.environ, "PYTHONPATH": own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that imports modules ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()
