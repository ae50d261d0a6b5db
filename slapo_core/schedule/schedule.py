"""`Schedule`: the steps that say how a model runs, applied to the live model and kept as data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from slapo_core._vocabulary import SchedulePrimitives
from slapo_core.errors import ArgumentError
from slapo_core.layout import Mesh
from slapo_core.primitive import Primitive, Record
from slapo_core.schedule.core import ScheduleCore
from slapo_core.schedule.records import dump_records, fingerprint
from slapo_core.tree.render import explain_records, render_tree

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry
    from slapo_core.tree.node import Node
    from slapo_core.tree.selection import NodeOrGroup


class Schedule(SchedulePrimitives):
    """How one model runs; made by :func:`slapo_core.create_schedule`.

    ``sch["encoder.layer.0"]`` is a node, ``sch["encoder.layer.*"]`` a group; primitives are applied there and change
    the model at once. Attributes that are not listed here are primitives applied at the root.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: Mesh | None = None,
        plugins: Sequence[str] = (),
        example_inputs: Any = None,
        registry: Registry | None = None,
        guarded: bool = False,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.example_inputs = example_inputs
        self._core = ScheduleCore(self, plugins, registry)
        self._core.start(guarded=guarded)

    # -- the tree ---------------------------------------------------------------------------------------------

    def __getitem__(self, path: str) -> NodeOrGroup:
        """The node at a path, or the group that a glob selects.

        Args:
            path: as of ``model.get_submodule``, e.g. ``"encoder.layer.0"``. ``*`` matches anything within one level,
                ``**`` for any number of levels, ``?`` for one character and ``[03]`` for one of these; for a range of
                numbers take a slice, ``sch["encoder.layer.*"][4:12]``.

        Raises:
            PathError: nothing is there; close matches are named.
            ArgumentError: the path is not a string.
        """
        if not isinstance(path, str):
            raise ArgumentError(f"a path must be a string (got {path!r})", hint='sch["encoder.layer.0"]')
        return self._core.tree.find(path)  # type: ignore[return-value]

    def __contains__(self, path: str) -> bool:
        """Whether ``sch[path]`` is there: a module at the path, or one that the glob matches."""
        return self._core.tree.has(path)

    def __iter__(self) -> NoReturn:
        raise ArgumentError("a schedule is not iterable", hint="for node in sch.root.walk(): ...")

    def _ipython_key_completions_(self) -> list[str]:
        return [path for path in self._core.tree.index.modules if path]

    @property
    def root(self) -> Node:
        """The node of the model itself, whose path is ``""``."""
        return self._core.tree.node("")

    if not TYPE_CHECKING:  # checkers see SchedulePrimitives

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("_") or "_core" not in self.__dict__:  # in the middle of __init__, or before it
                raise AttributeError(name)
            return self._core.member_named(name, self.root, "")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._core.member_names()]

    def __str__(self) -> str:
        """Draw the module tree, repeated layers folded, with the steps at each module."""
        return render_tree(self._core.tree, self.records)

    def __repr__(self) -> str:
        mesh = f", mesh={self.mesh}" if self.mesh else ""
        return f"<Schedule of {type(self.model).__name__}: {len(self._core.history)} steps{mesh}>"

    def _repr_html_(self) -> str | None:
        """Draw the schedule in a notebook by the query ``picture``; None where it is not installed."""
        if not self._core.registry.has("queries", "picture"):
            return None
        html: str = self._core.member_named("picture", self.root, "")()._repr_html_()
        return html

    # -- the steps --------------------------------------------------------------------------------------------

    def apply(self, primitive: Primitive) -> Node:
        """Apply a primitive at the root of the model: ``sch.root.apply``."""
        return self.root.apply(primitive)

    @property
    def records(self) -> tuple[Record, ...]:
        """The applied steps, oldest first."""
        return self._core.records

    def undo(self, *, to: Record | int | None = None) -> tuple[Record, ...]:
        """Undo the last step, or every step after ``to``.

        Args:
            to: the record (or its index) that remains the last; 0 takes everything back.

        Returns:
            the records taken back, latest first.

        Raises:
            UndoError: the schedule has no such step.
            SealedError: the originals were dropped by ``build`` or ``seal``.
        """
        return self._core.undo(to)

    def seal(self, by: str = "seal()", *, hands_over: bool = False) -> None:
        """End the schedule: no more steps, no undo; the originals that undo needed are dropped.

        Args:
            by: the caller, for later refusals.
            hands_over: whether an engine checks the training from now on, and no longer the schedule's own guards.
        """
        if not self.is_sealed:
            self._core.check_open("seal")
        self._core.sealed_by = self._core.sealed_by or by
        if hands_over:
            for guards in self._core.history.guards:
                guards.hand_over()
        self._core.history.drop_originals()
        self._core.tree.tensors.seal()
        self._core.tree.attributes.clear()

    @property
    def is_sealed(self) -> bool:
        """Whether ``build`` or ``seal`` ended the schedule."""
        return self._core.sealed_by is not None

    @property
    def is_verified(self) -> bool:
        """Whether :func:`verify` has passed these steps on this mesh; a further step or ``undo`` resets it.

        A saved schedule keeps it. :func:`replay` restores it where the class of the model, the mesh sizes and the
        versions of slapo-core and of the plugins are the same.
        """
        return bool(self._core.history.cache.get("verified"))

    @contextlib.contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The model as it was before the first step, for the duration of a ``with`` block.

        The very same objects come back, in both directions; copy the model to keep it.

        Raises:
            SealedError: the originals were dropped.
        """
        with self.rewound(0) as model:
            yield model

    @contextlib.contextmanager
    def rewound(self, to: Record | int) -> Iterator[nn.Module]:
        """The model as it was just after step ``to`` (0: before the first), for the duration of a ``with`` block.

        Args:
            to: the step, or its index.

        Raises:
            UndoError: the schedule has no such step.
            SealedError: the originals were dropped.
            ArgumentError: the model, without steps of this schedule, carries steps of another one.
        """
        with self._core.rewound(to) as model:
            yield model

    # -- as data ----------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """The schedule as plain data, which :func:`replay` takes; see :meth:`to_json`.

        ``"verified"`` is in it where ``is_verified`` is true.
        """
        document = dump_records(
            self.records,
            model=self.model,
            mesh=self.mesh.sizes if self.mesh else None,
            registry=self._core.registry,
        )
        return {**document, "verified": fingerprint(document)} if self.is_verified else document

    def to_json(self) -> str:
        """The schedule as JSON, for :func:`replay`.

        Raises:
            SerializationError: a step holds a lambda or a live object.
        """
        return json.dumps(self.document(), indent=2)

    def explain(self) -> str:
        """What each step changed, steps that did the same in repeated layers folded."""
        from slapo_core.schedule.mesh_dims import unused_mesh_dims

        unused = [
            f"mesh_dim '{mesh_dim}' ({self.mesh.size(mesh_dim)} ranks) is used by no step: its ranks do the same work"
            for mesh_dim in unused_mesh_dims(self)
            if self.mesh is not None
        ]
        return "\n".join([explain_records(self.records), *unused])
