"""Which blocks a node holds: the list of modules that ``pipeline_split(stages=N)`` cuts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from slapo_core import Node, Violation

__all__ = ["find_blocks", "lists_of_blocks"]


def find_blocks(node: Node, stages: int) -> tuple[tuple[str, ...], Violation | None]:
    """The blocks at a node, as paths relative to it in the order of the list; or why it is not known which they are.

    They are the children of the node, where it is a ModuleList or a Sequential; else those of the only such list below
    it that is long enough, or, of several, the only one with as many blocks that have parameters. Lists inside of the
    blocks of another one do not count.
    """
    found = list(lists_of_blocks(node.module))
    enough = [(path, names) for path, names in found if len(names) >= stages]
    if len(enough) > 1:  # a classifier of Flatten, Dropout and Linear is no rival of the blocks
        real = [(path, names) for path, names in enough if _with_parameters(node.module, path, names) >= stages]
        enough = real if len(real) == 1 else enough
    if len(enough) == 1:
        path, names = enough[0]
        return tuple(f"{path}.{name}" if path else name for name in names), None
    call = f"pipeline_split(stages={stages})"
    if len(enough) > 1:
        full = [_joined(node.path, path) for path, _ in enough]
        shown = ", ".join(f"'{path}' ({len(names)})" for path, (_, names) in zip(full, enough, strict=True))
        return (), Violation(
            f"there are {len(enough)} lists of at least {stages} blocks here, and one is needed: {shown}",
            f"sch[{full[0]!r}].{call}",
        )
    if not found:
        return (), Violation(
            f"{type(node.module).__name__} holds no list of blocks: no ModuleList and no Sequential",
            'cut after single modules: sch["encoder.layer.5"].pipeline_split()',
        )
    path, names = max(found, key=lambda each: len(each[1]))
    return (), Violation(
        f"{len(names)} {'block' if len(names) == 1 else 'blocks'} in '{_joined(node.path, path)}' cannot make "
        f"{stages} stages",
        f"at most pipeline_split(stages={len(names)}); a stage has one block or more",
    )


def lists_of_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each ModuleList and Sequential at or below a module with the names of its children, the outermost ones only."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        yield path, tuple(name for name, child in module.named_children())
        return
    for name, child in module.named_children():
        yield from lists_of_blocks(child, f"{path}.{name}" if path else name)


def _with_parameters(module: nn.Module, path: str, names: tuple[str, ...]) -> int:
    holder = module.get_submodule(path)
    return sum(next(holder.get_submodule(name).parameters(), None) is not None for name in names)


def _joined(path: str, below: str) -> str:
    return f"{path}.{below}" if path and below else path or below
