"""``fully_shard``: which modules' parameters are gathered together, where replicas hold shards of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from slapo_core import BuildError, Edit, Equivalence, Node, Primitive, Schedule, Violation
from slapo_core.effects import Collective

if TYPE_CHECKING:
    from slapo_core.effects import Effect


@dataclass(frozen=True)
class FullyShard(Primitive):
    """Make the module a unit of fully sharded data parallelism: its parameters are gathered and freed together.

    It only marks the module. ``build(sch, target="torch")`` shards parameters, gradients and optimizer state over
    ``dp``, in a loop of your own :func:`slapo_core.fully_shard`; parameters outside of all units are the root's.

    Args:
        reshard_after_forward: whether the full parameters are freed after the forward and gathered again for the
            backward; an integer, a divisor of the ranks along ``dp``, keeps them sharded over so many ranks only.
            None: True, but for the root, whose parameters the backward needs first.
        offload: whether shards, gradients and optimizer state are kept in the memory of the CPU.

    Raises:
        PreconditionError: the module has no forward or no parameters, is a unit already, or shares a parameter with a
            module outside of it.

    rewrite:
        ``y = module(x)`` -> ``weights = all_gather(shards, "dp"); y = module(x)``, and in the backward
        ``shard.grad = reduce_scatter(weights.grad, "dp")``

    Source: ``torch/distributed/fsdp/_fully_shard``; ZeRO stage 3.
    """

    name = "torch.fully_shard"
    equivalence = Equivalence.EXACT
    targets = frozenset({"torch"})

    reshard_after_forward: bool | int | None = None
    offload: bool = False

    def preconditions(self, node: Node) -> Iterator[Violation]:
        module = node.module
        if not has_forward(module):
            yield Violation(
                f"{type(module).__name__} has no forward: it is never called",
                f"mark the modules that it holds: sch['{node.path}.*'].fully_shard()",
            )
        if not any(True for _ in module.parameters()):
            yield Violation("the module has no parameters", "mark a module with parameters")
        if node.path in marked_units(node.schedule):
            yield Violation("the module is a unit already", "remove this second call")
        names = tie(shared_names(node.schedule.model), node.path) if node.path else None
        if names is not None:
            yield Violation(
                f"'{names[0]}' is '{names[1]}', too, outside of the module: one unit holds a parameter",
                "leave the module out: the root's unit holds its parameters",
            )
        if not is_reshard(self.reshard_after_forward):
            yield Violation(
                "reshard_after_forward must be a bool, or a number of ranks from 2 "
                f"(got {self.reshard_after_forward!r})",
                "fully_shard(reshard_after_forward=True)",
            )

    def apply(self, node: Node, edit: Edit) -> None:
        edit.note("its parameters are gathered and freed together once replicas hold shards of them")

    def effects(self, node: Node) -> Iterator[Effect]:
        """Yield the gathering in its forward; a pipeline gathers before it, and one rank along ``dp`` has all."""
        mesh = node.mesh
        if mesh is None or mesh.size("dp") == 1 or mesh.size("pp") > 1:
            return
        inner = [path for path in marked_units(node.schedule) if path.startswith(f"{node.path}.".lstrip("."))]
        names = [f"{node.path}.{name}".lstrip(".") for name, _ in node.module.named_parameters()]
        if not all(any(name.startswith(f"{path}.") for path in inner if path) for name in names):
            yield Collective("all_gather", "dp", at=node.path)


def is_reshard(value: object) -> bool:
    """Return whether a value is one of ``reshard_after_forward``."""
    return value is None or type(value) is bool or (type(value) is int and value > 1)


def marked_units(schedule: Schedule) -> dict[str, FullyShard]:
    """Return the units that steps marked, by path."""
    return {one.path: one.primitive for one in schedule.records if isinstance(one.primitive, FullyShard)}


def units_of(schedule: Schedule, *, reshard_after_forward: bool | int | None = None) -> dict[str, FullyShard]:
    """Return all units but the root, by path in the model's order.

    Args:
        schedule: whose steps mark units; without any, the repeated blocks are units.
        reshard_after_forward: of units that say nothing else.

    Raises:
        BuildError: a later step took out a marked module, or tied a parameter of it to one outside.
    """
    modules = dict(schedule.model.named_modules())
    shared = shared_names(schedule.model)
    marked = marked_units(schedule)
    for path in marked:
        names = tie(shared, path) if path else None
        if path not in modules or names is not None:
            what = f"its parameter '{names[0]}' is '{names[1]}', too" if names else "a later step took it out"
            raise BuildError(f"'{path}' was marked by fully_shard, and {what}", hint=f"leave out '{path}'")
    units = marked or {path: FullyShard() for path in default_units(schedule.model)}
    default = FullyShard(reshard_after_forward)
    return {path: default if units[path] == FullyShard() else units[path] for path in modules if path in units}


def units_of_stages(schedule: Schedule, local: Iterable[str]) -> dict[str, FullyShard]:
    """Return the units of a pipeline rank: marked or default units, and the other modules that its stages call.

    Args:
        schedule: the schedule, whose model is cut.
        local: paths of the modules that a stage of this rank calls.

    Raises:
        BuildError: a marked module lies above a cut: stages spread its forward.
    """
    here = dict.fromkeys(local)
    outermost = [
        path for path in here if not any(f"{path}.".startswith(f"{other}.") for other in here if other != path)
    ]
    units = {path: unit for path, unit in units_of(schedule).items() if path}
    above = [path for path in units if path not in here and any(one.startswith(f"{path}.") for one in here)]
    if above:
        raise BuildError(
            f"'{above[0]}' was marked by fully_shard, and lies above a cut of the pipeline: stages spread its forward",
            hint=f"sch['{above[0]}.*'].fully_shard()",
        )
    shared = shared_names(schedule.model)
    modules = dict(schedule.model.named_modules())
    rest = {
        path: FullyShard()
        for path in outermost
        if path not in units
        and has_forward(modules[path])
        and any(True for _ in modules[path].parameters())
        and tie(shared, path) is None
    }
    return {path: unit for path, unit in units.items() if path in here} | rest


def called_paths(model: nn.Module, stages: Iterable[nn.Module]) -> list[str]:
    """Return the paths of the model's modules that are within stages."""
    called = {id(module) for stage in stages for module in stage.modules()}
    return [path for path, module in model.named_modules() if id(module) in called]


def default_units(model: nn.Module) -> list[str]:
    """The repeated blocks of a model that share no parameter with other modules."""
    shared = shared_names(model)
    return [path for path in repeated_blocks(model) if tie(shared, path) is None]


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def repeated_blocks(model: nn.Module) -> list[str]:
    """The paths of the elements of containers whose children are of one class; of nested ones the outermost."""
    found: list[str] = []
    for path, module in model.named_modules():
        children = list(module.named_children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        if len(children) < 2 or len({type(child) for _, child in children}) > 1 or not has_forward(children[0][1]):
            continue
        if not any(f"{path}.".startswith(f"{block}.") for block in found):  # experts: not every rank calls each
            found += [f"{path}.{name}".lstrip(".") for name, child in children if any(True for _ in child.parameters())]
    return found


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def tie(shared: Iterable[list[str]], path: str) -> tuple[str, str] | None:
    """The names, within the module at ``path`` and outside of it, of a parameter that has both; None without one."""
    for names in shared:
        own = [name for name in names if name.startswith(f"{path}.")]
        if 0 < len(own) < len(names):
            return own[0], next(name for name in names if name not in own)
    return None
