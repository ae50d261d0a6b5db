"""A split model's first training forward: what would train it wrongly, without a word, is found there and refused."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from slapo_core.errors import MeshError, RankMismatchError, WeightsError
from slapo_core.ranks.checksum import checksum
from slapo_core.ranks.facts import RankFact, describe_tensor
from slapo_core.ranks.random_states import draw_alike
from slapo_core.ranks.world import World
from slapo_core.schedule.watching.foreign_wrappers import equal_ranks, wrappers
from slapo_core.schedule.watching.pieces import Piece, Pieces, described
from slapo_core.spec.mesh import declare_mesh

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.spec.mesh import Mesh

__all__ = ["FirstForward"]

_SAMPLE = 16  # pieces that are compared: who copies one rank's pieces over the others copies them all
_OWN_LOOP = (
    "transformers' Trainer and accelerate's prepare() make such wrappers under torchrun: "
    "slapo_core.build(sch, optimizer=...), or a loop of your own, trains it"
)


_SAME_BATCH = (
    "the ranks of one replica (same dp rank) take the same batch: DistributedSampler(dataset, "
    'num_replicas=sch.mesh.size("dp"), rank=sch.mesh.rank("dp")), with the same seed on every rank'
)
_SAME_VALUES = (
    "torch.manual_seed(seed) with the same seed on every rank before the model is made, or "
    "slapo_core.load_state_dict(sch, state) with the same state on every rank"
)
_NUMBERS = itertools.count()
_BY_NUMBER: weakref.WeakValueDictionary[str, FirstForward] = weakref.WeakValueDictionary()
"""What is compiled can ask for nothing but constants while it is traced; see :func:`_look_while_compiling`.

The numbers are text: an integer that differs from one model to the next would become symbolic, and be no constant."""


class FirstForward:
    """A forward pre-hook on the root of a split model, which goes away when it found nothing.

    Args:
        pieces: of the schedule.
        mesh: of the schedule, with its processes; None in a copy of the model, where it only goes away.
        model: the root; it is not kept alive.
        passed: called when it found nothing.
        check: refuses what is wrong on every rank, and gives the tensors of which ``tp`` ranks hold replicas.
    """

    slapo_only_looks = True  # spec/node.py: only_looks
    __slots__ = (
        "__weakref__",
        "_check",
        "_evaluated",
        "_is_traced",
        "_mesh",
        "_model",
        "_number",
        "_passed",
        "_pieces",
        "may_be_given_parts",
    )

    def __init__(
        self,
        pieces: Pieces | None = None,
        mesh: Mesh | None = None,
        model: nn.Module | None = None,
        passed: Callable[[], None] | None = None,
        check: Callable[[], dict[str, torch.Tensor]] | None = None,
    ) -> None:
        self._pieces, self._mesh, self._passed, self._check = pieces, mesh, passed, check
        self._model = weakref.ref(model) if model is not None else None
        self._evaluated = False
        self._is_traced = False  # looked at while it was compiled
        self._number = str(next(_NUMBERS))
        _BY_NUMBER[self._number] = self
        self.may_be_given_parts = False
        """Whether steps may put together what each rank is given: then a rank may be given its part of a batch."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                _look_while_compiling(self._number)
            return
        if torch.jit.is_tracing():
            return
        if self._mesh is None or self._pieces is None:
            self._leave(model)
            return
        leaves = dict(_tensors((args, kwargs)))
        if not all(_is_plain(tensor) for tensor in leaves.values()):
            return
        if not torch.is_grad_enabled():
            self._draw_alike(model, self._pieces, self._mesh)
            return
        with torch.no_grad():
            self._look(model, self._pieces, leaves, self._mesh)
        if self._passed is not None:
            self._passed()

    @torch.no_grad()
    def look_without_batch(self) -> None:
        """While the model is compiled: the batch has no values then, and the code that comes of it looks at nothing.

        The hook stays where it is, because what was traced is held against it.
        """
        model = self._model() if self._model is not None else None
        if model is not None and self._pieces is not None and self._mesh is not None and not self._is_traced:
            self._look(model, self._pieces, {}, self._mesh)
            self._is_traced = True

    def _look(self, model: nn.Module, known: Pieces, leaves: dict[str, torch.Tensor], mesh: Mesh) -> None:
        pieces = known.find(model)
        dims = [name for name in mesh.sizes if name in known.dims]
        device_mesh = mesh.device_mesh
        if not dims or device_mesh is None:
            return
        part = declare_mesh(device_mesh[tuple(dims)])
        with World(part) as world:
            found = [text for text in world.gather(_misled(model, known.names, dims, mesh)) if text is not None]
            if found:
                raise MeshError(found[0], hint=_way_out(mesh, dims))
            replicas = self._check() if self._check is not None else {}
            places = tuple(mesh.rank(name) for name in dims)
            _refuse_copies(pieces, world.gather((places, _samples(model, pieces))), dims, type(model).__name__)
            if "tp" in dims:
                values = [RankFact(f"'{name}'", describe_tensor(t), over="tp") for name, t in _local(replicas)]
                world.agree(values, hint=_SAME_VALUES)
                with World(part, over="tp") if dims != ["tp"] else contextlib.nullcontext(world) as replica:
                    draw_alike(replica, "is another one", stacklevel=8)
                facts = [RankFact(f"the batch: {name}", describe_tensor(t), over="tp") for name, t in leaves.items()]
                try:
                    world.agree(facts, hint=_SAME_BATCH)
                except RankMismatchError as error:
                    if not self.may_be_given_parts:
                        raise
                    warnings.warn(f"{error}\nThat is right only where each rank is given its own part.", stacklevel=7)

    def _draw_alike(self, model: nn.Module, known: Pieces, mesh: Mesh) -> None:
        """Before the first evaluation, such as ``generate(do_sample=True)``: one RNG state for the ranks of ``tp``."""
        known.find(model)
        if not self._evaluated and "tp" in known.dims and mesh.device_mesh is not None:
            self._evaluated = True
            with World(mesh, over="tp") as replica:
                draw_alike(replica, "is another one", stacklevel=7)

    def _leave(self, model: nn.Module) -> None:
        """Of a copy: it has not been registered by anybody who would take it away."""
        for key in [key for key, hook in model._forward_pre_hooks.items() if hook is self]:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstForward:
        copied = memo[id(self)] = FirstForward()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return FirstForward, ()


def _look_while_compiling(number: str) -> bool:
    """Called while torch.compile traces the model, and not by the code that it makes: no graph break, no cost."""
    hook = _BY_NUMBER.get(number)
    if hook is not None:
        hook.look_without_batch()
    return True


# What torch.compiler.assume_constant_result does; that would import torch's compiler, in 1.4 s, for every schedule.
_look_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _misled(model: nn.Module, pieces: dict[str, Piece], dims: list[str], mesh: Mesh) -> str | None:
    """What wraps the model, or a part of it, and takes pieces for replicas; None if nothing does."""
    if getattr(model, "_is_replica", False):
        return f"DataParallel copies this {type(model).__name__} in one process, and its collectives would meet"
    equal = equal_ranks(mesh, dims)
    for wrapper in wrappers(model):
        start = f"{wrapper.path}." if wrapper.path else ""
        inside = {name: piece for name, piece in pieces.items() if name.startswith(start)}
        leaves_alone = len(equal) == 1 and inside.keys() <= wrapper.ignored
        if not inside or (wrapper.ranks is not None and (wrapper.ranks <= equal or leaves_alone)):
            continue
        over = f"the ranks {', '.join(map(str, sorted(wrapper.ranks)))}" if wrapper.ranks is not None else "its ranks"
        return (
            f"{wrapper.kind} takes the tensors of this {type(model).__name__} for the same on {over}, but they hold "
            f"different pieces along {', '.join(map(repr, dims))}: {described(inside)}; it has mixed them up, or would "
            "do so with their gradients"
        )
    return None


def _way_out(mesh: Mesh, dims: list[str]) -> str:
    others = [name for name, size in mesh.sizes.items() if size > 1 and name not in dims]
    if len(others) == 1:
        right = f'DistributedDataParallel(model, process_group=sch.mesh.group("{others[0]}"))'
    elif others:
        right = f"DistributedDataParallel(model, process_group=...) over the mesh dimensions {', '.join(others)}"
    else:
        right = "no wrapper, because nothing is replicated here"
    return f"make a fresh model, schedule it, and use {right}; {_OWN_LOOP}"


def _samples(model: nn.Module, pieces: dict[str, Piece]) -> dict[str, tuple[int, bool]]:
    """Checksum of some pieces, and whether all of their elements are the same."""
    found = {}
    for name in sorted(pieces):
        tensor = _tensor_at(model, name)
        if tensor is None or pieces[name].is_summand or not tensor.is_floating_point() or not _is_plain(tensor):
            continue
        if tensor.numel() > 1 and not tensor.is_meta:
            found[name] = (checksum(tensor), bool((tensor == tensor.flatten()[0]).all()))
        if len(found) == _SAMPLE:
            break
    return found


def _refuse_copies(
    pieces: dict[str, Piece],
    by_rank: list[tuple[tuple[int, ...], dict[str, tuple[int, bool]]]],
    dims: list[str],
    kind: str,
) -> None:
    """Refuse pieces that are all alike on ranks that must hold different ones."""
    alike = []
    for name, piece in pieces.items():
        groups: dict[tuple[int, ...], set[int]] = {}
        is_constant = True
        for places, samples in by_rank:
            if name in samples:
                own, constant = samples[name]
                rest = tuple(at for at, mesh_dim in zip(places, dims, strict=True) if mesh_dim not in piece.dims)
                groups.setdefault(rest, set()).add(own)
                is_constant = is_constant and constant
        if groups and not is_constant:
            if any(len(found) > 1 for found in groups.values()):
                return
            alike.append(name)
    if alike:
        raise WeightsError(
            f"all ranks along {', '.join(map(repr, dims))} hold the same pieces of this {kind}, bit by bit, where they "
            f"must hold different ones: {described({name: pieces[name] for name in alike})}; something copied one "
            "rank's tensors over the others (such as DistributedDataParallel or deepspeed.initialize over all ranks), "
            "or every rank initialised them alike",
            hint="make a fresh model, schedule it, and leave its pieces alone: slapo_core.build(sch, optimizer=...) "
            "wraps and initialises it; slapo_core.load_state_dict(sch, state) gives each rank its own",
        )


def _tensor_at(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters.get(own, module._buffers.get(own))


def _tensors(inputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a call's arguments, each with a name: ``"args[0]"``, ``"input_ids"``."""
    args, kwargs = inputs
    for tree, start in ((args, "args"), (kwargs, "")):
        for path, leaf in _pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                name = start + _pytree.keystr(path)
                yield name if start else name.removeprefix("['").replace("']", "", 1), leaf


def _local(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that have values here; of a DTensor (fully_shard over dp) this rank's shard."""
    for name, tensor in tensors.items():
        own = getattr(tensor, "_local_tensor", tensor)
        if _is_plain(own):
            yield name, own


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it holds values that can be read here: it is not fake, batched or of a subclass."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not functorch.is_functorch_wrapped_tensor(tensor)
