"""A study file, imported as a module: the processes of a trial import it by the same name."""

from __future__ import annotations

import importlib
import keyword
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from slapo_core import ArgumentError
from slapo_tune.study import Study

__all__ = ["load"]


def load(file: Path, *, log: Path | None = None, trials: int | None = None) -> Study:
    """The study of a file.

    Args:
        file: Python, with a :class:`slapo_tune.Study` named ``study`` at its top level; its directory is put first
            on ``sys.path``, as for ``python FILE``.
        log: replaces the study's own.
        trials: replaces the study's own.

    Raises:
        ArgumentError: there is no such file, it cannot be imported, or it has no such study.
    """
    study = _study(file)
    if log is not None:
        study = replace(study, log=log)
    return study if trials is None else replace(study, trials=trials)


def _study(file: Path) -> Study:
    path = file.absolute()
    if not path.is_file():
        raise ArgumentError(f"there is no study file {str(file)!r} (in {os.getcwd()})", hint=_other(path))
    name = path.stem
    if path.suffix != ".py" or not name.isidentifier() or keyword.iskeyword(name):
        raise ArgumentError(
            f"{file}: the processes of a trial import the study by its file's name, which {name + path.suffix!r} does "
            "not allow",
            hint=f"mv {file} {path.parent / 'study.py'}",
        )
    found = getattr(_imported(file, path, name), "study", None)
    if isinstance(found, Study):
        return found
    got = f"`study` there is of type {type(found).__name__}" if found is not None else "there is no `study` in it"
    raise ArgumentError(
        f"{file}: a study file needs a slapo_tune.Study named `study` at its top level; {got}",
        hint="study = slapo_tune.Study(make_model, space, schedule, ...)",
    )


def _imported(file: Path, path: Path, name: str) -> object:
    known = sys.modules.get(name)
    if known is not None:
        if _same(getattr(known, "__file__", None), path):
            return known
        raise _taken(file, path, name, known)
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise ArgumentError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{_line(error, path)}",
            hint=f"python {file} shows the whole traceback",
        ) from error
    if not _same(getattr(module, "__file__", None), path):
        raise _taken(file, path, name, module)
    return module


def _same(one: str | None, path: Path) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(path)


def _taken(file: Path, path: Path, name: str, module: object) -> ArgumentError:
    other = getattr(module, "__file__", None) or "a built-in module"
    return ArgumentError(
        f"{file}: the processes of a trial import the study as the module {name!r}, and that is {other}",
        hint=f"mv {file} {path.parent / f'tune_{name}.py'}",
    )


def _line(error: BaseException, path: Path) -> str:
    """The last line of the file that was at work, if any."""
    if isinstance(error, SyntaxError):
        return ""  # its message has it
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _same(frame.filename, path)]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _other(path: Path) -> str | None:
    """What may have been meant."""
    if path.is_dir():
        return f"slapo tune run {path / 'STUDY.py'}"
    beside = sorted(path.parent.glob("*.py")) if path.parent.is_dir() else []
    return f"{path.parent} has {', '.join(one.name for one in beside[:5])}" if beside else None
