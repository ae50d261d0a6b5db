"""The interface of nodes, the modules of the scheduled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.edit import Forward, HookKind
    from slapo_core.layout import Layout
    from slapo_core.mesh import Mesh
    from slapo_core.primitive import Primitive, Record
    from slapo_graph.match import Graph, Match

__all__ = ["Node", "only_looks"]


class Node(Protocol):
    """One module of the model, addressed by its path.

    ``sch["encoder.layer.0"]`` and ``model.get_submodule("encoder.layer.0")`` are the same place, before and after any
    primitive. Reading is free; changing goes through ``apply``, or inside a primitive through its ``edit``.
    """

    @property
    def path(self) -> str:
        """The path from the root, e.g. ``"encoder.layer.0"``; ``""`` for the root."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other paths under which the same module is reachable."""
        ...

    @property
    def module(self) -> nn.Module:
        """The live module.

        Raises:
            StaleError: a later step removed it; the message names the step.
        """
        ...

    @property
    def parent(self) -> Node | None:
        """The node one level up; None for the root."""
        ...

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes one level down, in the order of registration."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The module's own parameters by name, without its children's."""
        ...

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The module's own buffers by name, without its children's."""
        ...

    @property
    def wrappers(self) -> tuple[Callable[[Forward], Forward], ...]:
        """What steps wrapped around the module's forward, innermost first, the same on a mesh of any size.

        Inactive ones, which have nothing to do on this mesh, are among them; a forward that the user set is not.
        """
        ...

    @property
    def hooks(self) -> tuple[tuple[HookKind, Callable[..., Any]], ...]:
        """The module's hooks that steps registered, those of one kind in the order in which they run.

        Inactive ones, which have nothing to do on this mesh, are among them; hooks of the user are not, unless a step
        carried them here from a module that it replaced.
        """
        ...

    @property
    def graph(self) -> Graph | None:
        """The static graph that runs as the module's forward; None if the module is not traced."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the schedule was made for; None without one."""
        ...

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of the steps applied exactly here, oldest first."""
        ...

    def records_below(self) -> tuple[Record, ...]:
        """The records of the steps applied here or at any descendant, oldest first."""
        ...

    @property
    def changed_attributes(self) -> frozenset[str]:
        """The plain attributes of the module that stands here now which steps have set, e.g. ``{"num_heads"}``."""
        ...

    def layout(self, name: str) -> Layout:
        """The layout of an own parameter or buffer; a replica of itself where no step changed it.

        Args:
            name: e.g. ``"weight"``.

        Raises:
            PathError: the module has none of that name.
        """
        ...

    def ties(self, name: str) -> tuple[str, ...]:
        """Full names of every place that holds the same parameter object, this one included.

        Args:
            name: of an own parameter or buffer, e.g. ``"weight"``.

        Raises:
            PathError: the module has none of that name.
        """
        ...

    def example_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that the module is called with when the model runs on the schedule's example inputs.

        They are tensors without values, from a run of the whole model on such; of several calls, those of the first.

        Raises:
            TraceError: the model cannot run without values, or does not call this module.
            ArgumentError: the schedule has no example inputs.
        """
        ...

    def example_calls(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Candidates for the arguments of the module, for a primitive that tries them until one fits.

        That of the reference model, as :meth:`example_call` gives it, and that of the model as the steps have made it
        so far, where blocks may hand on shards. A run of the scheduled model takes place only if it is asked for, and
        serves the modules after it, too.

        Raises:
            TraceError: neither run calls this module.
            ArgumentError: the schedule has no example inputs.
        """
        ...

    def reference(self, to: int = 0) -> AbstractContextManager[nn.Module]:
        """The module that stood here before the first step, for the duration of a ``with`` block: see Schedule.

        Args:
            to: or the one that stood here just after this many steps.

        Raises:
            PathError: a step brought the place.
            SealedError: the originals were dropped.
        """
        ...

    def plugin(self, kind: str, name: str) -> Any:
        """What a plugin provides under a name: the class, as the schedule's registry finds and checks it.

        Args:
            kind: e.g. ``"tracers"``.
            name: e.g. ``"record"``.

        Raises:
            PluginError: nothing that is installed and usable provides it; the message says what to do.
        """
        ...

    def find(self, pattern: Any) -> list[Match]:
        """Every place at or below this node where the graph of a traced module has ``pattern``.

        ``dense.find(lambda x, bias: F.gelu(x + bias))`` gives a :class:`~slapo_graph.match.Match` for each.

        Args:
            pattern: a function of the values that go in, which computes what is looked for; a module; the name of a
                pattern of a plugin, e.g. ``"fusion.sdpa"``; a glob or regular expression over what calls are named in
                ``print(node.graph)``; ``where(predicate)`` or ``any_of(...)`` of :mod:`slapo_graph.patterns`.

        Returns:
            the matches in the order of the model, none of which shares a graph node with another; its attribute
            ``untraced`` has the paths of modules that were not searched because they are not traced.

        Raises:
            TraceError: nothing at or below this node is traced.
            ArgumentError: it is not a pattern, or one that cannot be traced.
        """
        ...

    def walk(self) -> Iterator[Node]:
        """This node and all its descendants, parents first."""
        ...

    def apply(self, primitive: Primitive) -> Node:
        """Apply a primitive here; the returned node is the one on which a chained call continues.

        ``node.shard("weight", axis=0)`` is short for ``node.apply(Shard("weight", axis=0))``.

        Raises:
            PreconditionError: a rule is broken; the model is reference.
            ApplyError: the step failed halfway; the model is as it was before.
            PostconditionError: it took no effect, and was taken back.
            SealedError: the schedule was built or sealed.
        """
        ...

    def __getitem__(self, path: str) -> Any:
        """The node at ``path`` below this one, or the group of nodes that a glob selects."""
        ...


def only_looks(hook: object) -> bool:
    """Return whether a hook is slapo-core's own and changes nothing."""
    return getattr(type(hook), "slapo_only_looks", False) is True
