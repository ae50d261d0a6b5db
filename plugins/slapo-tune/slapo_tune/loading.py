"""`load_study`: the study of a file."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path

from slapo_tune.errors import StudyError
from slapo_tune.study import Study

__all__ = ["load_study"]


def load_study(path: str | os.PathLike[str], name: str = "study") -> Study:
    """The study that a Python file has at its top level; the file is imported.

    Args:
        path: of the file. In a package, i.e. beside an ``__init__.py``, it is imported as a part of it; elsewhere its
            directory is searched for what it imports, as with ``python STUDY.py``.
        name: of the study.

    Raises:
        StudyError: there is no such file, it has no such study, or it raises.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise StudyError(f"there is no file {path}", hint="slapo tune run STUDY.py")
    if file.suffix != ".py":
        raise StudyError(f"{path} is no Python file", hint="slapo tune run STUDY.py")
    module = _imported(file)
    study = getattr(module, name, None)
    if study is None:
        others = [other for other, value in vars(module).items() if isinstance(value, Study)]
        hint = f"{name} = {others[0]}" if others else f"{name} = slapo_tune.Study(make_model, space, schedule, ...)"
        raise StudyError(f"{path} has no {name!r} at its top level", hint=hint)
    if not isinstance(study, Study):
        raise StudyError(
            f"{name!r} of {path} is no slapo_tune.Study (got {type(study).__name__})",
            hint=f"{name} = slapo_tune.Study(make_model, space, schedule, ...)",
        )
    return study


def _imported(file: Path) -> object:
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(parts)
    found = None
    with contextlib.suppress(ImportError, ValueError):  # a parent that cannot be imported says so below
        found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not os.path.samefile(found.origin, file):
        name = f"slapo_tune_study_{file.stem}"  # the name means another module
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    try:
        if "." in name:
            return importlib.import_module(name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file, which may end with sys.exit()
        sys.modules.pop(name, None)
        raise StudyError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{_line(error, file)}",
            hint=f"python {file} shows the whole traceback",
        ) from error
    return module


def _line(error: BaseException, file: Path) -> str:
    """The last line of the file that was at work, where the message does not have it."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
