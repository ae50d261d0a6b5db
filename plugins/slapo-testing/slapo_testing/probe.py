"""Import modules in a new process, and report the effects."""

from __future__ import annotations

import builtins
import functools
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from slapo_runtime.rank_process import make_importable

MODULE_LIMIT = 500
"""Maximum number of modules that an import may load beyond torch and slapo."""

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
"""Packages that a plugin must import inside functions."""

_TIMEOUT = 60.0  # seconds
_EVENTS = {
    "it starts a process": (
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.exec",
        "os.system",
        "subprocess.Popen",
    ),
    "it uses the network": ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname"),
    "it calls": ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"),
}
"""Audit events of the interpreter that an import must not raise, with their meanings."""


@dataclass(frozen=True)
class ImportProbe:
    """The effects of importing modules in a new process.

    Args:
        modules: number of modules imported beyond torch and slapo; None if the process ended early.
        violations: broken rules, in words; empty for a light import.
        usable: whether the import succeeded and did not patch torch or slapo, so that this process may import them,
        too.
        traceback: traceback of a failed import.
    """

    modules: int | None
    violations: tuple[str, ...]
    usable: bool
    traceback: str = ""


def probe(*modules: str) -> ImportProbe:
    """Import modules in a new process that has imported torch and slapo; the result is cached.

    Args:
        modules: dotted names; modules of this process outside of ``sys.path`` are imported from their files.
    """
    named = []
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        named.append((name, os.path.abspath(file) if file else None))
    return _probe(tuple(named), tuple(map(str, sys.path)))


@functools.lru_cache(maxsize=256)
def _probe(modules: tuple[tuple[str, str | None], ...], path: tuple[str, ...]) -> ImportProbe:
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        request = json.dumps([modules, path, answer.name])
        code = "import json, sys; from slapo_testing.probe import _import; _import(*json.loads(sys.argv[1]))"
        own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {own!r}); {code}", request]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ImportProbe(None, (f"the import did not end within {_TIMEOUT:g} s",), usable=False)
        output, content = done.stdout.decode(errors="replace").strip(), answer.read()
    if not content:
        last = (output.splitlines() or ["no output"])[-1]
        ended = f"exit code {done.returncode}" if done.returncode >= 0 else signal.Signals(-done.returncode).name
        return ImportProbe(None, (f"the importing process ended with {ended}: {last}",), usable=False, traceback=output)
    facts: dict[str, Any] = json.loads(content)
    if facts["failure"]:
        return ImportProbe(None, (f"the import raised {facts['failure']}",), usable=False, traceback=facts["traceback"])
    heavy = [name for name in HEAVY if name in facts["packages"]]
    violations = [
        *([f"it prints {output[:200]!r}"] if output else []),
        *([f"it imports {', '.join(heavy)}"] if heavy else []),
        *([f"it imports {facts['modules']} modules beyond torch"] if facts["modules"] > MODULE_LIMIT else []),
        *facts["done"],
        *(f"it changes {change}" for change in facts["changed"]),
    ]
    patches = any(change.startswith(("torch.nn.", "slapo_core.", "builtins.")) for change in facts["changed"])
    return ImportProbe(facts["modules"], tuple(violations), usable=not patches)


# -- in the importing process -----------------------------------------------------------------------------------------


def _import(modules: list[tuple[str, str | None]], path: list[str], answer: str) -> None:
    """Import the modules, and write the effects to a file."""
    import slapo_core.internals  # noqa: F401 - with torch

    sys.path[:] = path
    before, own, loaded = _global_state(), _own_code(), set(sys.modules)
    failure, trace = "", ""
    done = _noted_events()
    try:
        for name, file in modules:
            if file is None:
                importlib.import_module(name)
            else:
                make_importable(name, file)
    except BaseException as error:  # noqa: BLE001 - SystemExit is a result, too
        failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    noted, after, own_after, new = list(done), _global_state(), _own_code(), set(sys.modules) - loaded
    changed = [
        f"{what} ({before[what]} -> {after[what]})" for what in {**before, **after} if before[what] != after[what]
    ]
    changed += [f"{what} (replaced)" for what, code in own.items() if own_after.get(what) is not code]
    facts = {
        "modules": len(new),
        "packages": sorted({name.partition(".")[0] for name in new}),
        "done": noted,
        "changed": changed,
        "failure": failure,
        "traceback": trace,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    with open(answer, "w") as file_:
        json.dump(facts, file_)
    os._exit(0)  # without exit handlers


def _noted_events() -> dict[str, None]:
    """Record written files, started processes and connections from now on."""
    noted: dict[str, None] = {}
    kinds = {event: kind for kind, events in _EVENTS.items() for event in events}
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:  # a thread has no audit event before Python 3.12
        noted.setdefault(f"it starts a thread ({thread.name})")
        start(thread)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _writes(*arguments):
            noted.setdefault(f"it writes {os.fspath(arguments[0])!r}")
        elif kinds.get(event) == "it calls":
            if not _is_bytecode(arguments[0]):
                noted.setdefault(f"it calls {event}({arguments[0]!r})")
        elif event in kinds:
            noted.setdefault(f"{kinds[event]} ({event})")

    threading.Thread.start = started  # type: ignore[method-assign, assignment]
    sys.addaudithook(audit)
    return noted


def _writes(path: Any, mode: Any, flags: int) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) and path != os.devnull and not _is_bytecode(path)


def _is_bytecode(path: Any) -> bool:
    """Return whether the path is a bytecode file; a number is an open file."""
    return isinstance(path, int) or "__pycache__" in os.path.normpath(os.fsdecode(path)).split(os.sep)


def _global_state() -> defaultdict[str, str]:
    """Return the global state that an import must not change, as text."""
    import torch

    state = {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's random state": hash(bytes(torch.get_rng_state().tolist())),
        "torch's number of threads": torch.get_num_threads(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's float32 matmul precision": torch.get_float32_matmul_precision(),
        "torch's anomaly detection": torch.is_anomaly_enabled(),
        "the handlers of the root logger": logging.getLogger().handlers,
        "the level of the root logger": logging.getLogger().level,
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the working directory": os.getcwd(),
        "whether CUDA is initialized": torch.cuda.is_initialized(),
        "sys.excepthook": sys.excepthook,
    }
    functions = {name: value for name, value in vars(torch.nn.functional).items() if name != "__builtins__"}
    state |= {f"torch.nn.functional.{name}": value for name, value in functions.items()}
    for name, layer in vars(torch.nn).items():
        if isinstance(layer, type):
            own = vars(layer) if layer is torch.nn.Module else {"forward": vars(layer).get("forward")}
            state |= {f"torch.nn.{name}.{attribute}": value for attribute, value in own.items()}
    state |= {f"builtins.{name}": value for name, value in vars(builtins).items() if not name.startswith("_")}
    state |= {f"the environment variable {name}": value for name, value in os.environ.items()}
    return defaultdict(lambda: "unset", {what: repr(value) for what, value in state.items()})


def _own_code() -> dict[str, Any]:
    """Return functions, classes and methods of the imported slapo modules."""
    found: dict[str, Any] = {}
    for module, content in [(name, vars(each)) for name, each in sys.modules.items() if name.startswith("slapo_")]:
        for name, value in content.items():
            if getattr(value, "__module__", None) == module and hasattr(value, "__qualname__"):
                found[f"{module}.{name}"] = value
                methods = vars(value).items() if isinstance(value, type) else ()
                found |= {f"{module}.{name}.{method}": code for method, code in methods if callable(code)}
    return found
