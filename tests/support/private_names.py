"""Private names of torch in a package: imports, attribute chains, and attributes of torch's objects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_ATTRIBUTES = re.findall(
    r"\w+",
    """
    _active_ddp_module _apply _backward_fn _backward_hooks _backward_pre_hooks _buffers _call_impl _cdata
    _check_input_dim _compiled_call_impl _conv_forward _erased _forward_hooks _forward_hooks_always_called
    _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs _indices _init_flat_weights
    _initialize_stage _initialize_stages _is_full_backward_hook _is_view _load_state_dict_post_hooks
    _load_state_dict_pre_hooks _modules _non_persistent_buffers_set _orig_mod _overloadpacket _parameters
    _post_accumulate_grad_hooks _qualified_op_name _schema _sequence_nr _state_dict_hooks _state_dict_pre_hooks
    _values _version
    """,
)
"""Private attributes of tensors, storages, modules, operators, graphs, autograd nodes and pipeline schedules."""


def private_names(package: Path) -> list[str]:
    """Return the private names of torch that a module, or the modules of a package, use outside of ``private.py``.

    Attributes of ``self`` and ``cls`` are the package's own; a string that is the name of an attribute counts.
    """
    files = [package] if package.is_file() else sorted(package.rglob("*.py"))
    files = [file for file in files if file.name != "private.py"]
    return [f"{file.name}: {name}" for file in files for name in _names(ast.parse(file.read_text()))]


def _names(tree: ast.AST) -> Iterator[str]:
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in _ATTRIBUTES and id(node) not in parts:
                yield repr(node.value)
        elif isinstance(node, ast.ImportFrom):
            yield from filter(_is_private, (f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from filter(_is_private, (alias.name for alias in node.names))
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            name = ast.unparse(node)
            if (node.attr in _ATTRIBUTES and not is_own) or _is_private(name):
                yield name


def _is_private(name: str) -> bool:
    """Return whether a dotted name that begins with a module of torch has a private part."""
    return re.fullmatch(r"(torch|aten|dist|fx|nn)(\.\w+)*\._(?!_)\w+(\.\w+)*", name) is not None
