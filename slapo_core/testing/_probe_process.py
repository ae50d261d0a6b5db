"""The process behind `slapo_core.testing.probe`: a JSON request a line on stdin, an answer a line on stdout.

Every request is served by a forked process of its own, in which nothing but torch and slapo has been imported.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

from slapo_core.ranks.process import make_importable
from slapo_core.testing._watching import Watch

__all__ = ["main"]


def main() -> None:
    """Serve requests until stdin is closed."""
    import torch  # noqa: F401 - imported once, for all that are forked

    import slapo_core.schedule.schedule  # noqa: F401

    for line in sys.stdin:
        answer = _serve(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Import in a forked process; what it prints, by whatever means, lands in a file."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as printed:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the real one carries requests: an import may ask for input
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - and what was read ahead of it is not for the import
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            _import(request, writing)
        os.close(writing)
        content, timed_out = _read(reading, request["timeout"])
        os.close(reading)
        if timed_out:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    facts: dict[str, Any] = json.loads(content) if content and not timed_out else {}
    ended = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return {**facts, "output": output, "timed_out": timed_out, "ended": ended}


def _read(descriptor: int, timeout: float) -> tuple[bytes, bool]:
    content, deadline = b"", time.monotonic() + timeout
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, 1 << 16)
        if not part:
            return content, False
        content += part
    return content, True


def _import(request: dict[str, Any], writing: int) -> None:
    import torch

    from slapo_core.plugins.tampering import ImportGuard

    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(request["environ"])
    before, guard, loaded = _global_state(torch), ImportGuard(), set(sys.modules)
    failure, trace = "", ""
    watch = Watch()
    try:
        for name, file in request["modules"]:
            if file is None:
                importlib.import_module(name)
            else:
                make_importable(name, file)
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like are answers here
        failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    watch.end()
    after, new = _global_state(torch), set(sys.modules) - loaded
    packages = {name.partition(".")[0] for name in new}
    changes = [
        f"{what} ({before[what]} -> {after[what]})" for what in {**before, **after} if before[what] != after[what]
    ]
    answer = {
        "modules": len(new),
        "heavy": sorted(packages & set(request["heavy"])),
        "done": watch.seen,
        "changed": [*changes, *guard.restore()],
        "failure": failure,
        "traceback": trace,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)


def _global_state(torch: Any) -> dict[str, str]:
    """What an import must leave alone, as text."""
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
        "whether CUDA is initialised": torch.cuda.is_initialized(),
        "sys.excepthook": sys.excepthook,
    }
    functional = {f"torch.nn.functional.{name}": value for name, value in vars(torch.nn.functional).items()}
    forwards = {
        f"torch.nn.{name}.forward": vars(value)["forward"]
        for name, value in vars(torch.nn).items()
        if isinstance(value, type) and value is not torch.nn.Module and "forward" in vars(value)
    }
    code = {what: value for what, value in (functional | forwards).items() if callable(value) or value is None}
    variables = {f"the environment variable {name}": value for name, value in os.environ.items()}
    return _WithDefault({what: repr(value) for what, value in (state | code | variables).items()})


class _WithDefault(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "unset"


if __name__ == "__main__":
    main()
