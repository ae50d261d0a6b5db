"""Run a program of a page, or a script, in processes that have imported torch and the model libraries already.

A program that is started by itself imports for five seconds what the tests' server of processes has at hand. Where the
start is not what is tested, it is run from there: as the main program, in a folder of its own, with what torchrun would
set in its environment.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from slapo_testing import run_ranks

__all__ = ["run_program"]


def run_program(script: Path, *arguments: str, processes: int | None = None, timeout: float = 600.0) -> str:
    """What ``python script arguments`` prints, run in the folder of the script.

    Args:
        script: a file.
        arguments: of the command line.
        processes: as many as torchrun starts, which the program connects; None for a program by itself.
        timeout: seconds.

    Raises:
        RankFailedError: the program raised, or ended with another status than 0; with its traceback.
    """
    run = run_ranks(_as_main, str(script), arguments, processes is not None, world_size=processes or 1, timeout=timeout)
    return "".join(run)


def _as_main(script: str, arguments: Sequence[str], together: bool) -> str:
    import torch.distributed as dist

    port = [_free_port()]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()  # the program makes its own
    if together:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    os.chdir(Path(script).parent)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{script} ended with status {end.code}; it printed\n{printed.getvalue()}") from end
    return printed.getvalue()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
