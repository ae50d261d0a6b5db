"""The script that starts ranks: every rank imports it before anything else."""

from __future__ import annotations

import multiprocessing
import os
import sys

from slapo_core.errors import LaunchError

__all__ = ["MAIN_HINT", "import_error", "is_importing_script", "require_importable_script"]

MAIN_HINT = (
    "write `if __name__ == '__main__':` above the call and indent the call, because every rank imports the script"
)


def is_importing_script() -> bool:
    """Whether this process is a rank that has not got further than the import of the script."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def require_importable_script() -> None:
    """Refuse a script from standard input: its ``__file__`` is ``<stdin>``, which no rank can import.

    Raises:
        LaunchError: there is no such file.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is not None and getattr(main, "__spec__", None) is None and not os.path.exists(file):
        raise LaunchError(
            f"every rank imports the script, and there is no file {os.path.basename(file)!r}",
            hint="save the script as a file, e.g. train.py, with the call under `if __name__ == '__main__':`, "
            "and run `python train.py`",
        )


def import_error() -> LaunchError:
    """What to raise when a rank has ended before it could read what it is to call."""
    script = getattr(sys.modules["__main__"], "__file__", None) or "of this process"
    return LaunchError(
        f"a rank ended while it imported the script {script}, as every rank does before the function is called",
        hint=MAIN_HINT,
    )
