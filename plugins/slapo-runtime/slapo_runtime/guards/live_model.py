"""The state-dict hooks and the forward hook on a live split model.

They are registered while a tensor is split. The first training forward checks wrappers over ranks with different
shards, shards copied between ranks, changes outside of the schedule, unreduced partial values, and the replicas of the
``tp`` ranks; the first few check that each weight is read through its module. Then the forward hook is removed. Where
steps changed the root's forward, or the head of a model of transformers, it is registered on one process, too, against
a forward that bypasses them.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import MeshError, RankMismatchError, warn_user
from slapo_core.internals import Internals, has_steps, journal, module_index
from slapo_runtime._skipped_forwards import ForwardWatch, OwnForward, head_of, warn_of_skipped_steps
from slapo_runtime.guards.stale_optimizers import EXCHANGED
from slapo_runtime.guards.wrappers import (
    ShardShape,
    checksums,
    described,
    is_plain,
    refuse_copies,
    refuse_unaware_host,
    right_wrapper,
    wrong_wrapper,
)
from slapo_runtime.private import HOOK_TABLES, pytree
from slapo_runtime.ranks.consistency import refuse_if_incomplete, synchronize_and_warn
from slapo_runtime.ranks.facts import RankFact, describe_tensor
from slapo_runtime.ranks.world import World

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.internals import Step
    from slapo_core.layout import Layout, Mesh

_NUMBERS = itertools.count()
_WATCHED = 3  # training forwards: weights may be read past their modules in a later one only
_OUT = "slapo.state_dict(sch), slapo.save_pretrained(sch, directory)"
_IN = "slapo.load_state_dict(sch, state)"
_SAME_BATCH = (
    "give the ranks of one replica (same dp rank) the same batch: DistributedSampler(dataset, "
    'num_replicas=sch.mesh.size("dp"), rank=sch.mesh.rank("dp")), with the same seed on every rank'
)
_SAME_VALUES = (
    "torch.manual_seed(seed) with the same seed on every rank before the model is made, or "
    "slapo.load_state_dict(sch, state) with the same state on every rank"
)


class Guards:
    """Hooks on the root of a live model, and the forward hook itself.

    Args:
        model: the root, as a weak reference. None in a copy of the model, whose state-dict hooks use ``names``.
        mesh: of the schedule.
        check: called in the first training forward: refuses a schedule or model that trains wrongly, and returns the
            tensors with replicas on the ranks of ``tp``.
        names: the shards by full name.
        has_warned: whether ``state_dict()`` has warned.
        watch: called in the first training forwards: records the modules that run.
    """

    name = "live"  # of the kind "guards"
    slapo_only_looks = True  # it changes nothing: stages of a pipeline may do without it

    def __init__(
        self,
        model: nn.Module | None,
        mesh: Mesh | None = None,
        check: Callable[[], dict[str, torch.Tensor]] = dict,
        names: dict[str, ShardShape] | None = None,
        has_warned: bool = False,
        watch: Callable[[], ForwardWatch | None] = lambda: None,
    ) -> None:
        self._model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else lambda: None
        self._mesh, self._check, self._watch = mesh, check, watch
        self._shards: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._names, self._has_warned = names or {}, has_warned
        self._dims: set[str] = set()  # of several ranks, along which tensors were split
        self._around = 0  # steps in force that changed the forward of the root
        self._own: Callable[[], Any] = lambda: None  # that forward
        self._splits = self._gathers = 0  # in force: edits that split, and steps that may gather shards of a batch
        self._is_due = True  # further training forwards are to be checked
        self._passed = 0  # checked training forwards
        self._has_evaluated = self._was_traced = False
        self._number = str(next(_NUMBERS))
        self._placed = (False, False)  # the state-dict hooks, and that of the forward
        self._hooks: dict[str, int] = {}  # number of each, by its kind
        self._taken: dict[str, dict[str, journal.TakenHook]] = {}  # hooks that are not needed now

    @classmethod
    def of(cls, schedule: Schedule) -> Guards:
        """Make the guards of a live schedule, as a weak reference."""
        return cls(schedule.model, schedule.mesh, _checked(schedule), watch=_watched(schedule))

    def follow(self, step: Step, *, undone: bool = False, is_new: bool = False) -> None:
        """Follow a step that was applied or ``undone``; ``is_new`` unless it was redone."""
        model, change = self._model(), -1 if undone else 1
        if model is None:
            return
        self._gathers += change * _may_gather(model, step)
        for entry in step.entries:
            EXCHANGED.note(model, entry, undone=undone)
            if _changed_forward(entry) is model:
                self._around += change
                self._own = weakref.ref(model.__dict__["forward"]) if "forward" in model.__dict__ else lambda: None
                if is_new:
                    self._is_due, self._passed = True, 0
            if self._note_layouts(entry, undone=undone):
                self._splits += change
                if is_new:
                    self._is_due, self._passed = True, 0
        self._place_hooks(model)

    def hand_over(self) -> None:
        """End the checks of the forward, e.g. when a runtime takes over."""
        self._is_due = False
        model = self._model()
        if model is not None:
            self._place_hooks(model)

    def _place_hooks(self, model: nn.Module) -> None:
        """Register or remove hooks as needed, each under its former number and position."""
        is_split = self._splits > 0
        head = head_of(model)
        is_around = self._around > 0 or (head is not None and has_steps(head))
        is_due = self._is_due and ((is_split and self._has_ranks) or is_around)
        if self._placed == (is_split, is_due):
            return
        self._placed = is_split, is_due
        for kind, is_wanted, register in (
            ("state_dict_pre", is_split, lambda: model.register_state_dict_pre_hook(self.before_state_dict)),
            ("load_state_dict_pre", is_split, lambda: model.register_load_state_dict_pre_hook(self.before_load)),
            ("forward_pre", is_due, lambda: model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)),
        ):
            hooks = {table: getattr(model, table) for table in HOOK_TABLES[kind]}
            if is_wanted:
                if kind not in self._hooks:
                    self._hooks[kind] = register().id
                for table, taken in self._taken.pop(kind, {}).items():
                    taken.put_back(hooks[table])
            elif kind in self._hooks and kind not in self._taken:
                own = self._hooks[kind]
                self._taken[kind] = {
                    table: journal.TakenHook(held, own) for table, held in hooks.items() if own in held
                }

    def _note_layouts(self, entry: journal.JournalEntry, *, undone: bool) -> bool:
        """Note the shards that an edit makes; return whether it splits a tensor."""
        found = False
        for name, tensor, layout in _layouts(entry):
            dims = {d for d, p in layout.placements if not p.is_replicate() and self._mesh and self._mesh.size(d) > 1}
            if not dims:
                continue
            found = True
            self._dims |= dims
            shard = self._shards[tensor] = ShardShape(tuple(tensor.shape), tuple(layout.shape), bool(layout.partials()))
            if undone:
                self._names.pop(name, None)
            elif name:
                self._names[name] = shard
        return found

    def _find(self, model: nn.Module) -> dict[str, ShardShape]:
        """List the present shards of ``model``, by full name.

        A tensor that replaced a shard, with its shape (``load_state_dict(assign=True)``), is a shard.
        """
        found = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            former = self._names.get(name)
            shard = self._shards.get(tensor, former if former and former.local == tuple(tensor.shape) else None)
            if shard is not None:
                found[name] = shard
        self._names.update(found)
        return found

    # -- state dicts ------------------------------------------------------------------------------------------

    def before_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Warn before ``model.state_dict()``, once for each model."""
        shards = self._find(model)
        if not shards or self._has_warned:
            return
        self._has_warned = True
        warn_user(
            f"state_dict() of this {type(model).__name__} gives this rank's shards, which are a part of the reference "
            f"model: {described(shards)}; full tensors under the reference model's names come from {_OUT}, or, of a "
            "built model, from engine.state_dict()",
        )

    def before_load(self, model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Name the call that loads full tensors before ``model.load_state_dict(state)``; torch refuses them."""
        full = {
            name: shard
            for name, shard in self._find(model).items()
            if shard.local != shard.full and tuple(getattr(state.get(prefix + name), "shape", ())) == shard.full
        }
        if full:
            messages = rest[-1]  # torch's list of errors, the last argument
            messages.append(
                f"this {type(model).__name__} holds shards ({described(full)}), but the state dict is the reference "
                f"model's: load it by {_IN}, or, into a built model, by engine.load_state_dict(state)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild in a copy of the model, whose state-dict hooks work by names."""
        model = self._model()
        return Guards, (
            None,
            None,
            dict,
            dict(self._find(model) if model is not None else self._names),
            self._has_warned,
        )

    # -- the first training forward ---------------------------------------------------------------------------

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self.look_while_compiling(self._number)
        elif self._model() is not model:  # of a copy, where it would stay
            tables = [getattr(model, table) for table in HOOK_TABLES["forward_pre"]]
            for key in [key for key, hook in tables[0].items() if hook is self]:
                for table in tables:
                    del table[key]
        elif not torch.jit.is_tracing():
            tensors = dict(_tensors((args, kwargs)))
            if not all(map(is_plain, tensors.values())):
                return
            mesh = self._mesh if self._has_ranks else None
            if torch.is_grad_enabled():
                if self._around and not self._passed:
                    warn_of_skipped_steps(model, self._own(), stacklevel=6)
                if mesh is not None and not self._passed:
                    self._check_ranks(model, tensors, mesh)
                self._follow_forward(model)
            elif mesh is not None:
                self._check_evaluation(model, tensors, mesh)

    @property
    def _has_ranks(self) -> bool:
        return self._mesh is not None and self._mesh.device_mesh is not None

    def _follow_forward(self, model: nn.Module) -> None:
        """Check the modules that ran; remove the hooks after some correct forwards."""
        watch, own = self._watch(), OwnForward(model, self._own() if self._around and not self._passed else None)

        def end(_: nn.Module, args: Any, output: Any) -> None:
            handle.remove()
            own.end(has_run=output is not None)
            if watch is not None:
                watch.close()
                if output is not None:  # the forward did not raise
                    watch.check(output)
            self._passed += output is not None
            if self._passed == _WATCHED:
                self.hand_over()

        handle = model.register_forward_hook(end, always_call=True)

    def look_while_compiling(self, number: str) -> bool:
        """Run the checks while torch.compile traces the model, without a graph break.

        The batch has no values then. The hook stays, because the trace is guarded by its ``number``: text, because an
        integer that differs from model to model would become symbolic.
        """
        model = self._model()
        if model is not None and self._mesh is not None and not self._was_traced:
            self._check_ranks(model, {}, self._mesh)
            self._was_traced = True
        return True

    # As by torch.compiler.assume_constant_result, which would import torch's compiler, in 1.4 s, for every schedule.
    look_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def _check_ranks(self, model: nn.Module, tensors: dict[str, torch.Tensor], mesh: Mesh) -> None:
        """Compare wrappers, shards and replicas across ranks: a collective."""
        self._find(model)
        dims = [name for name in mesh.sizes if name in self._dims]
        if not dims:
            return
        refuse_unaware_host(model, self._names, dims)
        with World(mesh, over=dims) as world:
            for found in world.gather(wrong_wrapper(model, self._names, dims, mesh)):
                if found is not None:
                    raise MeshError(found, hint=right_wrapper(mesh, dims))
            replicas = self._check()
            refuse_copies(model, self._names, world.gather(checksums(model, self._names)), dims, mesh)
            if "tp" in dims:
                with World(mesh, over="tp") if len(dims) > 1 else contextlib.nullcontext(world) as replica:
                    self._compare_replicas(replica, replicas, tensors)

    def _compare_replicas(
        self, replica: World, replicas: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
    ) -> None:
        """Check that tp ranks share full tensors, RNG state, and batch."""
        own = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in replicas.items()}  # fully_shard's
        values = [RankFact(f"'{name}'", describe_tensor(tensor)) for name, tensor in own.items() if is_plain(tensor)]
        replica.agree(values, hint=_SAME_VALUES)
        synchronize_and_warn(replica, "differs", stacklevel=9)
        self._compare_batch(replica, tensors)

    def _compare_batch(self, replica: World, tensors: dict[str, torch.Tensor]) -> None:
        try:
            batch = [RankFact(f"the batch: {name}", describe_tensor(tensor)) for name, tensor in tensors.items()]
            replica.agree(batch, hint=_SAME_BATCH)
        except RankMismatchError as error:
            if not self._gathers:
                raise
            warn_user(f"{error}\nThis is right only if each rank gets its own shard of the batch.")

    def _check_evaluation(self, model: nn.Module, tensors: dict[str, torch.Tensor], mesh: Mesh) -> None:
        """Check RNG and batch before the first evaluation, e.g. ``generate(do_sample=True)``."""
        self._find(model)
        if not self._has_evaluated and "tp" in self._dims:
            refuse_unaware_host(model, self._names, ["tp"])
            self._has_evaluated = True
            with World(mesh, over="tp") as replica:
                synchronize_and_warn(replica, "differs", stacklevel=7)
                self._compare_batch(replica, tensors)


def _layouts(entry: journal.JournalEntry) -> Iterator[tuple[str, torch.Tensor, Layout]]:
    """Yield each tensor whose layout an edit sets, with its full name where known."""
    if isinstance(entry, journal.SetTensor):
        if entry.new is not None and entry.layout is not None:
            yield module_index.full_name(*entry.sites[0]), entry.new, entry.layout
    elif isinstance(entry, journal.ReplaceModule):
        yield from (("", tensor, layout) for tensor, layout in entry.assigned)
    elif isinstance(entry, journal.SetLayout):
        yield "", entry.tensor, entry.layout


def _changed_forward(entry: journal.JournalEntry) -> nn.Module | None:
    """Return the module whose forward an edit changed on this mesh."""
    if isinstance(entry, journal.WrapForward):
        return entry.module if entry.active else None
    return entry.module if isinstance(entry, journal.SetForward) else None


def _may_gather(model: nn.Module, step: Step) -> int:
    """Return whether a step may gather its input, sharded over ranks."""
    texts = {value for value in step.record.primitive.arguments().values() if isinstance(value, str)}
    if texts & {"fwd_post", "forward", "bwd_post", "backward"}:  # the modes of a sync after a module
        return 0
    around_root = any(
        entry.module is model and entry.active and entry.kind == "forward_pre"
        for entry in step.entries
        if isinstance(entry, journal.AddHook)
    )
    return around_root or "all_gather" in texts


def _tensors(inputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call's arguments with names: ``"args[0]"``, ``"input_ids"``."""
    args, kwargs = inputs
    for tree, start in ((args, "args"), (kwargs, "")):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                name = start + pytree.keystr(path)
                yield name if start else name.removeprefix("['").replace("']", "", 1), leaf


def _watched(schedule: Schedule) -> Callable[[], ForwardWatch | None]:
    """Return a function that begins to watch a training forward."""
    reference = weakref.ref(schedule)

    def begin() -> ForwardWatch | None:
        live = reference()
        return ForwardWatch(live) if live is not None and not Internals(live).is_rewound else None

    return begin


def _checked(schedule: Schedule) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a check of the first training forward, which gives ``tp`` replicas."""
    reference = weakref.ref(schedule)

    def check() -> dict[str, torch.Tensor]:
        live = reference()
        if live is None or Internals(live).is_rewound:
            return {}
        Internals(live).tree.tensors.check_unchanged()
        refuse_if_incomplete(live)
        return Internals(live).tree.tensors.replicated("tp")

    return check
