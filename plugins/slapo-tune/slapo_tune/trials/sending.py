"""A study's functions on their way to other processes: by name, from whatever file they are in."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import pickle
import runpy
import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from slapo_tune.errors import StudyError

__all__ = ["NAME_IN_CHILD", "opened", "packed"]

NAME_IN_CHILD = "__mp_main__"
"""The name under which the script runs in other processes, as with multiprocessing: not ``"__main__"``."""


def packed(values: Mapping[str, Any]) -> bytes:
    """What :func:`opened` makes the values of again, in another process.

    Args:
        values: by the name of a study's argument: functions, or what holds some.

    Raises:
        StudyError: a function has no name by which another process could find it; the argument is named.
    """
    modules: dict[str, str | None] = {}
    data = {}
    for name, value in values.items():
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, modules).dump(value)
        except Exception as error:  # pickle raises several kinds, and whatever __reduce__ raises
            what = getattr(value, "__qualname__", type(value).__name__)
            raise StudyError(
                f"{name}={what} cannot be sent to the processes of a trial: {error}",
                hint=f"define it at the top level of a module, def {name}(...), and give it by that name",
            ) from error
        data[name] = buffer.getvalue()
    return pickle.dumps((_main(modules), modules, list(sys.path), os.getcwd(), data))


def opened(payload: bytes) -> dict[str, Any]:
    """The values that :func:`packed` was given; imports their modules.

    Args:
        payload: of a process that started this one.
    """
    main, modules, path, directory, data = pickle.loads(payload)
    sys.path[:] = path
    os.chdir(directory)
    if main is not None:
        _run_main(*main)
    for name, file in modules.items():
        if name != "__main__":
            _import(name, file)
    return {name: pickle.loads(value) for name, value in data.items()}


class _Pickler(pickle.Pickler):
    """Functions by name, those too that are known by another name than their own, as a lambda is."""

    def __init__(self, buffer: io.BytesIO, modules: dict[str, str | None]) -> None:
        super().__init__(buffer)
        self._modules = modules

    def reducer_override(self, value: Any) -> Any:
        name = getattr(value, "__module__", None) if isinstance(value, (FunctionType, type)) else type(value).__module__
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None:
            return NotImplemented
        file = getattr(module, "__file__", None)
        self._modules[module.__name__] = None if file is None else os.path.abspath(file)
        if isinstance(value, FunctionType) and not _is_at(module, value.__qualname__, value):
            where = _found(module, value)
            if where is None:
                raise pickle.PicklingError(f"no name in the module {name!r} leads to it")
            return _at, (name, where)
        return NotImplemented


def _is_at(module: ModuleType, name: str, value: object) -> bool:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _found(module: ModuleType, value: object) -> tuple[str, ...] | None:
    """The path of attributes to a function: a name of the module, or an argument of a study there."""
    from slapo_tune.study import Study

    for name, own in vars(module).items():
        if own is value:
            return (name,)
        if isinstance(own, Study):
            for argument in own.functions():
                if getattr(own, argument) is value:
                    return (name, argument)
    return None


def _at(module: str, path: tuple[str, ...]) -> Any:
    found: Any = sys.modules[module]
    for name in path:
        found = getattr(found, name)
    return found


def _main(modules: Mapping[str, str | None]) -> tuple[str | None, str] | None:
    """How to run the script again: the name of its module, if it has one, and its file."""
    if "__main__" not in modules:
        return None
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or not os.path.exists(file):
        raise StudyError(
            "the study is in a session that is typed in, or read from standard input: other processes cannot import it",
            hint="save it as a file, e.g. study.py, and run `python study.py`",
        )
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec is not None and not spec.name.endswith("__main__") else None
    return name, os.path.abspath(file)


def _run_main(name: str | None, file: str) -> None:
    """Run the script, unless multiprocessing has."""
    now = getattr(sys.modules.get("__main__"), "__file__", None)
    if NAME_IN_CHILD in sys.modules and now is not None and os.path.abspath(now) == file:
        return
    main = ModuleType(NAME_IN_CHILD)
    main.__file__ = file
    sys.modules["__main__"] = sys.modules[NAME_IN_CHILD] = main
    if name is not None:
        ran = runpy.run_module(name, run_name=NAME_IN_CHILD, alter_sys=True)
    else:
        ran = runpy.run_path(file, run_name=NAME_IN_CHILD)
    vars(main).update(ran)


def _import(name: str, file: str | None) -> None:
    """Import a module by its name or, where that finds nothing or another file, from its file."""
    try:
        found = getattr(importlib.import_module(name), "__file__", None)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
    else:
        if file is None or (found is not None and os.path.abspath(found) == file):
            return
    if file is None:
        raise ImportError(f"there is no module {name!r}")
    parent = name.rpartition(".")[0]
    while parent:  # unpickling imports every parent of a dotted name
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(parent)
        sys.modules.setdefault(parent, ModuleType(parent))
        parent = parent.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name!r} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
