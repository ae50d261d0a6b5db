"""Parse and format sizes in bytes, with units."""

from __future__ import annotations

import re
from fractions import Fraction

from slapo_core.errors import ArgumentError

_LETTERS = "kMGTP"
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{f"{letter.upper()}iB": 1024**power for power, letter in enumerate(_LETTERS, 1)},
    "KB": 1000,
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([A-Za-z]*)", re.ASCII)


def parse_bytes(size: int | str, *, name: str = "memory") -> int:
    """Return a size in bytes.

    Args:
        size: bytes, or a text: a number with one of the units B, kB, MB, GB, TB, PB (powers of 1000), KiB, MiB, GiB,
            TiB, PiB (powers of 1024), or without unit. Capital letters count: ``"Gb"`` would be bits.
        name: of the argument, for the message.

    Returns:
        at least 1; a fraction of a byte is dropped.

    Raises:
        ArgumentError: any other size; with the corrected call.
    """
    if type(size) is int:
        bytes_ = size
    elif isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None or match[2] not in _UNITS:
            raise _refusal(size, name, _corrected(match))
        bytes_ = int(Fraction(match[1]) * _UNITS[match[2]])
    else:
        integer = int(size) if isinstance(size, float) and size >= 1 and size % 1 == 0 else None
        raise _refusal(size, name, '"70GiB"' if integer is None else str(integer))
    if bytes_ < 1:
        raise ArgumentError(f"{name} must be at least 1 byte (got {size!r})", hint=f'{name}="70GiB"')
    return bytes_


def format_bytes(size: float) -> str:
    """Format a size: ``"70GiB"``, ``"105.33MiB"``, ``"12B"``.

    Sizes with at most two decimals are restored by :func:`parse_bytes`.

    Args:
        size: bytes; a negative one, e.g. a difference, keeps its sign.
    """
    sign, amount = ("-" if size < 0 else ""), float(abs(size))
    unit = "B"
    for letter in _LETTERS.upper():
        if round(amount, 2) < 1024:
            break
        amount, unit = amount / 1024, f"{letter}iB"
    text = f"{amount:.2f}".rstrip("0").rstrip(".") if unit != "B" else f"{amount:.0f}"
    return f"{sign}{text}{unit}"


def _corrected(match: re.Match[str] | None) -> str:
    """Suggest a correction: ``"70GiB"`` for ``"70G"`` and ``"70gib"``."""
    if match is not None:
        unit = match[2].lower()
        for known in ("GiB", "MiB", "KiB", "TiB", "PiB", "GB", "MB", "kB", "TB", "PB"):
            if unit in (known.lower(), known[0].lower() if known.endswith("iB") else ""):
                return f'"{match[1]}{known}"'
    return '"70GiB"'


def _refusal(size: object, name: str, corrected: str) -> ArgumentError:
    return ArgumentError(
        f'{name} must be a number of bytes or text like "70GiB", "500MB" (got {size!r})',
        hint=f"{name}={corrected}",
    )
