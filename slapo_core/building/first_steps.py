"""What the first steps of an engine compare over the ranks of a replica: the batch, and where random numbers stand.

The ranks that share a replica's layers (``tp``), or its stages (``pp``), compute one loss together. Those along ``tp``
draw the same random numbers too. Given other samples, or dropping other elements of
what they all hold, they go on without an error, and train something else. Only the first training step and the first
evaluation are watched: a later step costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import RankMismatchError
from slapo_core.ranks.facts import RankFact, describe, describe_tensor, first_difference
from slapo_core.ranks.random_states import OTHER, draw_alike, foreign_states, torch_states
from slapo_core.ranks.world import World

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh
    from slapo_core.weights.state import TensorState

__all__ = ["FirstSteps", "batch_facts"]

_SAME_BATCH = (
    "ranks of one replica (same place along 'dp') are given the same batch: seed the loader and its sampler alike, "
    'with num_replicas=mesh.size("dp") and rank=mesh.rank("dp")'
)


class FirstSteps:
    """Watches the calls of the model until the first training step, and the first evaluation, are over.

    Args:
        mesh: the schedule's.
        model: the scheduled one.
        state: it is told whether a training step draws random numbers.
    """

    def __init__(self, mesh: Mesh | None, model: nn.Module, state: TensorState) -> None:
        self._mesh, self._model, self._state = mesh, model, state
        watched = mesh is not None and not mesh.is_dry and mesh.size("tp") * mesh.size("pp") > 1
        self._training = self._evaluating = watched

    def training_is_over(self) -> None:
        """The first training step has come to its end: no call after it is watched."""
        self._training = False

    def end_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the first step of an optimizer be the end of the first training step."""
        if not self._training:
            return

        def over(*_: Any) -> None:
            self.training_is_over()
            handle.remove()

        handle = optimizer.register_step_post_hook(over)

    @contextlib.contextmanager
    def watched(self, batch: Any) -> Iterator[None]:
        """Around one call of the model; nothing where the first step is over.

        Raises:
            RankMismatchError: on every rank of a replica, before the model runs: they were given other batches; or
                after it: it draws from a generator that is not torch's, and stands elsewhere on each of them.
        """
        is_training = torch.is_grad_enabled()
        if not (self._training if is_training else self._evaluating):
            yield
            return
        with World(self._mesh, over=("pp", "tp")) as replica:
            self._compare(replica, batch, is_training=is_training)
            if not is_training:
                self._evaluating = False
                yield
                return
            has_stages = self._mesh is not None and self._mesh.size("pp") > 1
            with World(self._mesh, over="tp") if has_stages else contextlib.nullcontext(replica) as world:
                differing = draw_alike(world, "was changed after build(), to another one", stacklevel=7)
                before = {**torch_states(), **foreign_states()}
                yield  # a rank that raises leaves; what the others do then, only their groups know
                after = {**torch_states(), **foreign_states()}
                drew = {source for source, state in after.items() if before.get(source) != state}
                anywhere = set().union(*world.gather(drew))
        if anywhere - set(OTHER):
            self._state.draws = True
        for source in differing:
            if source in anywhere:
                raise RankMismatchError(
                    f"the model draws from {source}, which stands elsewhere on each of the ranks "
                    f"{', '.join(map(str, world.ranks))}: they do not do the same with what they all hold",
                    hint="random.seed(0) and numpy.random.seed(0) on every rank of a replica (same place along 'dp')",
                )

    def _compare(self, world: World, batch: Any, *, is_training: bool) -> None:
        with world.together("looking at the batch"):
            facts = [*batch_facts(batch), *(_mode_facts(self._model) if is_training else ())]
        by_rank = dict(zip(world.ranks, world.gather(facts), strict=True))
        message = first_difference(by_rank, {None: [world.ranks]})
        if message is not None:
            is_of_batch = "batch" in message.split("\n")[0]
            raise RankMismatchError(message, hint=_SAME_BATCH if is_of_batch else "set it alike on every rank")


def _mode_facts(model: nn.Module) -> Iterator[RankFact]:
    """Which modules train, and what is trained; after build() anybody can have changed either."""
    for what, names in (
        ("the modules in training mode", [name for name, module in model.named_modules() if module.training]),
        ("the parameters to train", [name for name, one in model.named_parameters() if one.requires_grad]),
    ):
        digest = hashlib.sha256(repr(names).encode()).hexdigest()[:8]
        yield RankFact(what, f"{len(names)} of them, their names with digest {digest}")


def batch_facts(batch: Any) -> Iterator[RankFact]:
    """The tensors and plain values in a batch of any form, by their places; the order of a mapping does not count."""
    yield from _facts("the batch", batch)


def _facts(place: str, value: Any) -> Iterator[RankFact]:
    if isinstance(value, torch.Tensor):
        yield RankFact(place, describe_tensor(value))
    elif isinstance(value, Mapping):
        yield RankFact(f"the names in {place}", ", ".join(sorted(map(repr, value))))
        for key in sorted(value, key=repr):
            yield from _facts(f"{place}[{key!r}]", value[key])
    elif isinstance(value, (tuple, list)):
        yield RankFact(f"the length of {place}", str(len(value)))
        for number, item in enumerate(value):
            yield from _facts(f"{place}[{number}]", item)
    else:
        yield RankFact(place, describe(value))
