"""Docstrings and signatures as Markdown, for the pages that generate_docs.py makes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

__all__ = ["sections", "signature", "tidy"]

_HEADINGS = ("Args:", "Attributes:", "Returns:", "Raises:", "rewrite:")


def tidy(lines: list[str]) -> str:
    """Markdown instead of reStructuredText, without double blank lines."""
    text = re.sub(r"(?<!`)``(?!`)", "`", "\n".join(lines).replace("::\n", ":\n"))
    text = re.sub(r":(?:class|func|meth|mod|data):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip("\n") + "\n"


def sections(documentation: str) -> list[str]:
    """A docstring as Markdown: ``Args:``, ``Raises:`` and ``rewrite:`` become lists under headings of their own."""
    lines: list[str] = []
    section = ""
    for line in documentation.splitlines():
        heading, _, remark = line.partition(": ")
        if line in _HEADINGS or (heading == "rewrite" and remark):
            section = line if line in _HEADINGS else "rewrite:"
            title = section.removesuffix(":").capitalize() + (f" {remark}" if remark else "")
            lines.append(f"**{title}**\n" if section != "Returns:" and not remark else "")
            if remark:
                lines.append(f"**Rewrite** {remark}\n")
            continue
        if section == "Returns:" and line.strip():
            line = f"**Returns** {line.strip()}" if not lines[-1].startswith("**Returns**") else line.strip()
        elif section in ("Args:", "Attributes:", "Raises:") and line.startswith("    "):
            text = line.removeprefix("    ")
            name, colon, rest = text.partition(": ")
            line = f"- `{name}`: {rest}" if colon and not text.startswith(" ") else f"  {text.strip()}"
        elif section == "rewrite:" and line.startswith("    "):
            starts = not lines[-1].strip() or lines[-1].endswith("**\n") or lines[-1].startswith("**Rewrite**")
            line = f"- {line.strip()}" if starts else f"  {line.strip()}"
        elif line and not line.startswith(" "):
            section = ""
            for start in ("What to do:", "First result:", "Source:"):
                line = line.replace(start, f"**{start.removesuffix(':')}**:", 1) if line.startswith(start) else line
        lines.append(line)
    return lines


def signature(name: str, function: Callable[..., Any], *, returns: bool = True) -> str:
    """A call as it is declared, e.g. ``def undo(*, to: Record | int | None = None) -> tuple[Record, ...]``.

    Args:
        name: what to call it.
        function: a function, or a class for its constructor.
        returns: whether to name the type of the result.
    """
    declared = inspect.signature(function)
    parameters = [item for item in declared.parameters.values() if item.name not in ("self", "cls")]
    shown: list[str] = []
    for item in parameters:
        if item.kind is item.KEYWORD_ONLY and not any(each.startswith("*") for each in shown):
            shown.append("*")
        shown.append(_parameter(item))
    result = declared.return_annotation
    after = f" -> {_annotation(result)}" if returns and result is not declared.empty else ""
    line = f"{name}({', '.join(shown)}){after}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){after}"])


def _parameter(item: inspect.Parameter) -> str:
    stars = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
    annotation = "" if item.annotation is item.empty else f": {_annotation(item.annotation)}"
    if item.default is item.empty:
        return f"{stars}{item.name}{annotation}"
    default = "..." if "<" in repr(item.default) else repr(item.default).replace("'", '"')
    return f"{item.name}{annotation} = {default}" if annotation else f"{item.name}={default}"


def _annotation(annotation: Any) -> str:
    return annotation.strip("'") if isinstance(annotation, str) else inspect.formatannotation(annotation)
