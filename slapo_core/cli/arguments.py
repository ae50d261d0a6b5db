"""Arguments that commands share: functions by name, meshes, batches; and progress on stderr."""

from __future__ import annotations

import importlib
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core.errors import ArgumentError, SlapoError

if TYPE_CHECKING:
    import torch

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, keys sorted.")]
MeshSizes = Annotated[
    str | None, typer.Option("--mesh", metavar="SIZES", help="Declared sizes, outermost first: dp=8,tp=8.")
]


def batch_option(what: str, more: str, example: str = "input_ids=4x512:int64") -> Any:
    """Return the option ``--batch``, for ``Annotated[list[str] | None, batch_option(...)]``.

    Args:
        what: the batch in words.
        more: further sentences of the help.
        example: of a tensor.
    """
    text = f"{what}: a function that returns it; or its tensors, repeated: {example}. SHAPE:DTYPE without a name is "
    return typer.Option("--batch", metavar="MODULE:FN|NAME=SHAPE:DTYPE", help=f"{text}positional. {more}".rstrip())


StepsBatch = Annotated[
    list[str] | None,
    batch_option(
        "Example inputs for steps that run the model", "Default: made from the model's configuration or first layer."
    ),
]

_FUNCTION = re.compile(r"(?P<place>[^:]+\.py|[^\W\d][\w.]*):(?P<name>[^\W\d]\w*)")
_TENSOR = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*):(\w+)", re.ASCII)


def is_function_name(text: str) -> bool:
    """Return whether a text is ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``."""
    return _FUNCTION.fullmatch(text) is not None


def find_function(name: str, option: str) -> Callable[..., Any]:
    """Import a function; modules are found from the current directory, too.

    Args:
        name: ``"module:function"`` or ``"path/file.py:function"``, whose directory is put on ``sys.path``.
        option: of the command line, for messages.

    Raises:
        BadParameter: not such a name, or neither module nor function exists.
        ArgumentError: the import raised.
    """
    match = _FUNCTION.fullmatch(name)
    if match is None:
        raise typer.BadParameter(f"must be MODULE:FUNCTION or FILE.py:FUNCTION (got {name!r})", param_hint=option)
    place, own = match["place"], match["name"]
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise typer.BadParameter(f"no file {place!r}", param_hint=option)
    directory, module = (Path.cwd(), place) if file is None else (file.parent, file.stem)
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _raised(f"the import of {place}", error) from error
        raise typer.BadParameter(f"module {error.name!r} not found", param_hint=option) from error
    except SlapoError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(f"the import of {place}", error) from error
    if file is not None and Path(imported.__file__ or "").resolve() != file:
        there = imported.__file__ or "part of Python"
        raise typer.BadParameter(f"{place} has the name of another module ({there}): rename it", param_hint=option)
    found = getattr(imported, own, None)
    if not callable(found):
        raise typer.BadParameter(f"module {module!r} has no function {own!r}", param_hint=option)
    function: Callable[..., Any] = found
    return function


def call_function(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user.

    Args:
        function: to call.
        name: of the function, for messages.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        SlapoError: the function raised it.
        ArgumentError: the function raised something else; its line is named.
    """
    try:
        return function(*args, **kwargs)
    except SlapoError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(name, error) from error


def _raised(what: str, error: BaseException) -> ArgumentError:
    """Describe an exception of the user's code in a line, with the last line outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "site-packages" not in frame.filename and "importlib" not in frame.filename]
    at = "" if not frames else " ({0.filename}:{0.lineno})".format((own or frames)[-1])
    if isinstance(error, SyntaxError):
        at = f" ({error.filename}:{error.lineno})"
    text = " ".join(str(error).split())
    return ArgumentError(f"{what} raised {type(error).__name__}{': ' if text else ''}{text}{at}")


def mesh_of(text: str | None) -> dict[str, int] | None:
    """Parse sizes, e.g. ``"dp=8,tp=8"``.

    Raises:
        BadParameter: they are malformed.
    """
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        mesh_dim, equals, size = part.strip().partition("=")
        if not equals or not size.isascii() or not size.isdecimal() or mesh_dim in sizes or int(size) < 1:
            raise typer.BadParameter(f"must be sizes, e.g. dp=8,tp=8 (got {text!r})", param_hint="--mesh")
        sizes[mesh_dim] = int(size)
    return sizes


def batch_of(words: Sequence[str], make: Callable[[str, Sequence[int], torch.dtype], Any] | None = None) -> Any:
    """Make the batch: by a function, or as a dictionary or tuple of tensors.

    Args:
        words: ``["MODULE:FUNCTION"]``, or of each tensor ``"NAME=SHAPE:DTYPE"`` or ``"SHAPE:DTYPE"``.
        make: makes a tensor of its name, shape and dtype; default: floats on the meta device, integers as zeros, or as
            ones if the name contains "mask".

    Raises:
        BadParameter: they are malformed, or the function returned None.
        ArgumentError: the function raised.
    """
    if len(words) == 1 and is_function_name(words[0]):
        made = call_function(find_function(words[0], "--batch"), words[0])
        if made is None:
            raise typer.BadParameter(f"{words[0]} must return a batch (got None)", param_hint="--batch")
        return made
    import torch

    named: dict[str, Any] = {}
    positional: list[Any] = []
    for word in words:
        match = _TENSOR.fullmatch(word)
        if match is None:
            raise typer.BadParameter(
                f"must be MODULE:FUNCTION or e.g. input_ids=4x512:int64 (got {word!r})", param_hint="--batch"
            )
        dtype = getattr(torch, match[3], None)
        if not isinstance(dtype, torch.dtype):
            raise typer.BadParameter(f"torch has no dtype {match[3]!r}", param_hint="--batch")
        tensor = (make or _tensor)(match[1] or "", [int(size) for size in match[2].split("x")], dtype)
        if match[1] is None:
            positional.append(tensor)
        elif match[1] in named:
            raise typer.BadParameter(f"{match[1]!r} is given twice", param_hint="--batch")
        else:
            named[match[1]] = tensor
    if named and positional:
        raise typer.BadParameter("give all tensors a name, or none", param_hint="--batch")
    return named or tuple(positional)


@dataclass(frozen=True)
class ExampleBatch:
    """A batch on which the reference model runs.

    Args:
        inputs: as for :func:`slapo_core.verify`.
        how: in words, of what it was made.
    """

    inputs: Any
    how: str


_KNOWN = 2**22  # elements of an integer tensor with values


def _tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor; integers have values, because models read masks."""
    import torch

    if dtype.is_floating_point or dtype.is_complex or math.prod(shape) > _KNOWN:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.full(shape, int("mask" in name), dtype=dtype)


@contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: a bar on a terminal, otherwise a line for each part.

    Args:
        total: number of parts; None if unknown.
        what: title of the progress.
    """
    if not sys.stderr.isatty():
        yield lambda text: print(f"{what}: {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        begun = False

        def tell(text: str) -> None:
            nonlocal begun
            bar.update(task, advance=1 if begun and total is not None else 0, description=f"{what}: {text}")
            begun = True

        yield tell
