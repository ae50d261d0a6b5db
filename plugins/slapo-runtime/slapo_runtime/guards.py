"""Guards on a live split model: stop plain tools that would silently train, save or load it wrongly.

Two state-dict hooks and one forward hook are on the root while a tensor is split. In the first training forward it
checks wrappers over ranks with different shards, shards copied between ranks, changes outside of the schedule,
unfinished partial sums, and what the ranks of ``tp`` must share; in the first few, that no weight is read past its
module. Then it goes away. Where steps changed the root's forward it is there on one process too, for a forward that was
set past them. Optimizers that hold parameters of before a step are refused at their next step.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import MeshError, OptimizerError, RankMismatchError, WeightsError
from slapo_core.internals import Internals, journal, module_index
from slapo_runtime._skipped_forwards import ForwardWatch, warn_of_skipped_steps
from slapo_runtime.consistency import refuse_if_incomplete, synchronize_and_warn
from slapo_runtime.private import HOOK_TABLES, active_ddp, is_functorch_wrapped, pytree
from slapo_runtime.weights.optimizer import warn_of_lost_updates
from slapo_runtime.world import RankFact, World, checksum, describe_tensor

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.internals import Step
    from slapo_core.layout import Layout, Mesh

_NUMBERS = itertools.count()
_WATCHED = 3  # training forwards: what reads weights past their modules may come after a first one
_SAMPLE = 16  # shards that are compared: a tool that copies one rank's shards over the others copies them all
_OUT = "slapo_core.state_dict(sch), slapo_core.save_pretrained(sch, directory)"
_IN = "slapo_core.load_state_dict(sch, state)"
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


@dataclass(frozen=True)
class Shard:
    """The full tensor of one shard.

    Args:
        local: its own shape.
        full: the shape of the unsharded tensor.
        is_partial: whether the ranks' tensors add up to the unsharded one.
    """

    local: tuple[int, ...]
    full: tuple[int, ...]
    is_partial: bool


class Guards:
    """The hooks on the root of a live model; itself the one of the first training forward.

    Args:
        model: the root; it is not kept alive. None in a copy of the model, whose state-dict hooks go by ``names``.
        mesh: of the schedule.
        check: called in the first training forward: refuses a schedule or model that trains wrongly, and gives the
            tensors of which the ranks of ``tp`` hold replicas.
        names: the shards by full name.
        has_warned: whether ``state_dict()`` has warned.
        watch: called in the first training forwards: begins to watch which modules run.
    """

    name = "live"  # of the kind "guards"
    slapo_only_looks = True  # slapo_core.tree.node: only_looks

    def __init__(
        self,
        model: nn.Module | None,
        mesh: Mesh | None = None,
        check: Callable[[], dict[str, torch.Tensor]] = dict,
        names: dict[str, Shard] | None = None,
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
        self._splits = self._gathers = 0  # in force: edits that split, and steps that may gather parts of a batch
        self._is_due = True  # training forwards are to be checked
        self._passed = 0  # of them
        self._has_evaluated = self._was_traced = False
        self._number = str(next(_NUMBERS))
        self._placed = (False, False)  # the state-dict hooks, and that of the forward
        self._hooks: dict[str, int] = {}  # number of each, by its kind
        self._taken: dict[str, dict[str, journal.TakenHook]] = {}  # those that are not needed now

    @classmethod
    def of(cls, schedule: Schedule) -> Guards:
        """Make the guards of a live schedule, which is not kept alive."""
        return cls(schedule.model, schedule.mesh, _checked(schedule), watch=_watched(schedule))

    def follow(self, step: Step, *, undone: bool = False, is_new: bool = False) -> None:
        """Note a step that was applied or ``undone``; ``is_new`` unless it was redone."""
        model, change = self._model(), -1 if undone else 1
        if model is None:
            return
        self._gathers += change * _may_gather(model, step)
        for entry in step.entries:
            _EXCHANGES.note(model, entry, undone=undone)
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
        """End the checks of the forward: one passed, or a runtime took over."""
        self._is_due = False
        model = self._model()
        if model is not None:
            self._place_hooks(model)

    def _place_hooks(self, model: nn.Module) -> None:
        """Register or remove hooks as needed, each under its former number and position."""
        is_split = self._splits > 0
        is_due = self._is_due and ((is_split and self._has_ranks) or self._around > 0)
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
        """Note the shards that an edit makes; return whether it splits anything."""
        found = False
        for name, tensor, layout in _layouts(entry):
            dims = {d for d, p in layout.placements if not p.is_replicate() and self._mesh and self._mesh.size(d) > 1}
            if not dims:
                continue
            found = True
            self._dims |= dims
            shard = self._shards[tensor] = Shard(tuple(tensor.shape), tuple(layout.shape), bool(layout.partials()))
            if undone:
                self._names.pop(name, None)
            elif name:
                self._names[name] = shard
        return found

    def _find(self, model: nn.Module) -> dict[str, Shard]:
        """List the shards that ``model`` holds now, by full name.

        A tensor that took the place of one, in its shape (``load_state_dict(assign=True)``), counts as one.
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
        """Before ``model.state_dict()``: warn, once for each model."""
        shards = self._find(model)
        if not shards or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"state_dict() of this {type(model).__name__} gives what this rank holds, and that is a part of the "
            f"reference model only: {_described(shards)}; the reference model's names and shapes come from {_OUT}, or, "
            "of a built model, from engine.state_dict()",
            stacklevel=3,
        )

    def before_load(self, model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Before ``model.load_state_dict(state)``: name the call that loads full tensors; torch refuses them."""
        full = {
            name: shard
            for name, shard in self._find(model).items()
            if shard.local != shard.full and tuple(getattr(state.get(prefix + name), "shape", ())) == shard.full
        }
        if full:
            messages = rest[-1]  # torch's list of errors, the last argument
            messages.append(
                f"this {type(model).__name__} holds shards ({_described(full)}), and the state dict is the reference "
                f"model's: {_IN} gives every rank its own, or, of a built model, engine.load_state_dict(state)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild in a copy of the model: its state-dict hooks work by names."""
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
            if not all(map(_is_plain, tensors.values())):
                return
            mesh = self._mesh if self._has_ranks else None
            if torch.is_grad_enabled():
                if self._around and not self._passed:
                    warn_of_skipped_steps(model, self._own(), stacklevel=6)
                if mesh is not None and not self._passed:
                    self._look(model, tensors, mesh)
                self._follow_forward(model)
            elif mesh is not None:
                self._share_rng_state(model, mesh)

    @property
    def _has_ranks(self) -> bool:
        return self._mesh is not None and self._mesh.device_mesh is not None

    def _follow_forward(self, model: nn.Module) -> None:
        """Check what the model has run when its forward ends; the hooks go away after some that were right."""
        watch = self._watch()

        def end(_: nn.Module, args: Any, output: Any) -> None:
            handle.remove()
            if watch is not None:
                watch.close()
                if output is not None:  # else it raised
                    watch.check(output)
            self._passed += output is not None
            if self._passed == _WATCHED:
                self.hand_over()

        handle = model.register_forward_hook(end, always_call=True)

    def look_while_compiling(self, number: str) -> bool:
        """Run the checks while torch.compile traces the model, not in the compiled code: no graph break, no cost.

        The batch has no values then. The hook stays, because what was traced is held against it: by its ``number``, a
        text, because an integer that differs from model to model would become symbolic.
        """
        model = self._model()
        if model is not None and self._mesh is not None and not self._was_traced:
            self._look(model, {}, self._mesh)
            self._was_traced = True
        return True

    # What torch.compiler.assume_constant_result does; that imports torch's compiler, in 1.4 s, for every schedule.
    look_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def _look(self, model: nn.Module, tensors: dict[str, torch.Tensor], mesh: Mesh) -> None:
        self._find(model)
        dims = [name for name in mesh.sizes if name in self._dims]
        if not dims:
            return
        with World(mesh, over=dims) as world:
            for found in world.gather(_wrong_wrapper(model, self._names, dims, mesh)):
                if found is not None:
                    raise MeshError(found, hint=_right_wrapper(mesh, dims))
            replicas = self._check()
            _refuse_copies(model, self._names, world.gather(_checksums(model, self._names)), dims, mesh)
            if "tp" in dims:
                with World(mesh, over="tp") if len(dims) > 1 else contextlib.nullcontext(world) as replica:
                    self._compare_replicas(replica, replicas, tensors)

    def _compare_replicas(
        self, replica: World, replicas: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
    ) -> None:
        """Check that tp ranks share full tensors, RNG state, and batch."""
        own = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in replicas.items()}  # fully_shard's
        values = [RankFact(f"'{name}'", describe_tensor(tensor)) for name, tensor in own.items() if _is_plain(tensor)]
        replica.agree(values, hint=_SAME_VALUES)
        synchronize_and_warn(replica, "differs", stacklevel=9)
        try:
            batch = [RankFact(f"the batch: {name}", describe_tensor(tensor)) for name, tensor in tensors.items()]
            replica.agree(batch, hint=_SAME_BATCH)
        except RankMismatchError as error:
            if not self._gathers:
                raise
            warnings.warn(f"{error}\nThat is right only where each rank is given its own part.", stacklevel=8)

    def _share_rng_state(self, model: nn.Module, mesh: Mesh) -> None:
        """Check the RNG before the first evaluation, e.g. ``generate(do_sample=True)``."""
        self._find(model)
        if not self._has_evaluated and "tp" in self._dims:
            self._has_evaluated = True
            with World(mesh, over="tp") as replica:
                synchronize_and_warn(replica, "differs", stacklevel=7)


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
    """Return whether a step may gather its input, so that ranks may be given parts of a batch."""
    texts = {value for value in step.record.primitive.arguments().values() if isinstance(value, str)}
    if texts & {"fwd_post", "forward", "bwd_post", "backward"}:  # the modes of a sync behind a module
        return 0
    around_root = any(
        entry.module is model and entry.active and entry.kind == "forward_pre"
        for entry in step.entries
        if isinstance(entry, journal.AddHook)
    )
    return around_root or "all_gather" in texts


def _described(shards: dict[str, Shard]) -> str:
    """``"12 tensors, e.g. 'fc1.weight', here (8, 6) of (16, 6)"``."""
    name, shard = next(iter(shards.items()))
    kind = "a partial value of shape" if shard.is_partial else "here"
    example = f"'{name}', {kind} {shard.local} of {shard.full}"
    return example if len(shards) == 1 else f"{len(shards)} tensors, e.g. {example}"


def _tensors(inputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call's arguments with names: ``"args[0]"``, ``"input_ids"``."""
    args, kwargs = inputs
    for tree, start in ((args, "args"), (kwargs, "")):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                name = start + pytree.keystr(path)
                yield name if start else name.removeprefix("['").replace("']", "", 1), leaf


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be read: not fake, batched or of a subclass."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not is_functorch_wrapped(tensor)


# -- wrappers -------------------------------------------------------------------------------------------------


def _wrong_wrapper(model: nn.Module, shards: dict[str, Shard], dims: list[str], mesh: Mesh) -> str | None:
    """Return the wrapper that takes shards for replicas; None if there is none."""
    if getattr(model, "_is_replica", False):
        return f"DataParallel copies this {type(model).__name__} in one process, and its collectives would meet"
    assert mesh.device_mesh is not None
    place = tuple(mesh.rank(name) if name in dims else slice(None) for name in mesh.sizes)
    equal = frozenset(mesh.device_mesh.mesh[place].flatten().tolist())  # the ranks that hold the same shards
    for kind, start, ranks, ignored in _wrappers(model):
        inside = {name: shard for name, shard in shards.items() if name.startswith(start)}
        leaves_alone = len(equal) == 1 and inside.keys() <= ignored
        if inside and not ranks <= equal and not leaves_alone:
            return (
                f"{kind} takes the tensors of this {type(model).__name__} for the same on the ranks "
                f"{', '.join(map(str, sorted(ranks)))}, but they hold different shards along "
                f"{', '.join(map(repr, dims))}: {_described(inside)}; it has mixed them up, or would do so with their "
                "gradients"
            )
    return None


def _wrappers(model: nn.Module) -> Iterator[tuple[str, str, set[int], set[str]]]:
    """Return a wrapper's kind, name prefix, global ranks, and the names it ignores.

    FullyShardedDataParallel around the model, and ``fully_shard`` once it has gathered the parameters, leave no trace
    of their ranks: :func:`_refuse_copies` sees what they gathered.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    active = active_ddp()
    if active is not None and any(module is model for module in active.modules()):
        ignored = set(active.parameters_to_ignore) if active.module is model else set()
        yield "DistributedDataParallel", "", set(dist.get_process_group_ranks(active.process_group)), ignored
    for path, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            ranks = set(dist.get_process_group_ranks(module.process_group))  # type: ignore[arg-type]
            yield type(module).__name__, f"{path}." if path else "", ranks, set()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield "fully_shard", name, set(parameter.device_mesh.mesh.flatten().tolist()), set()


def _right_wrapper(mesh: Mesh, dims: list[str]) -> str:
    others = [name for name, size in mesh.sizes.items() if size > 1 and name not in dims]
    if len(others) == 1:
        right = f'DistributedDataParallel(model, process_group=sch.mesh.group("{others[0]}"))'
    elif others:
        right = f"DistributedDataParallel(model, process_group=...) over the mesh dimensions {', '.join(others)}"
    else:
        right = "no wrapper, because nothing is replicated here"
    return f"make a fresh model, schedule it, and use {right}; {_OWN_LOOP}"


def _checksums(model: nn.Module, shards: dict[str, Shard]) -> dict[str, tuple[int, bool]]:
    """Return the checksum of some shards, and whether all elements are equal."""
    found: dict[str, tuple[int, bool]] = {}
    for name in shards:
        try:
            tensor = operator.attrgetter(name)(model)
        except AttributeError:  # it is not in the model any more
            continue
        if shards[name].is_partial or not _is_plain(tensor) or not tensor.is_floating_point():
            continue
        has_values = not tensor.is_meta and tensor.untyped_storage().size() > 0  # FullyShardedDataParallel frees them
        if has_values and tensor.numel() > 1 and len(found) < _SAMPLE:
            found[name] = (checksum(tensor), bool((tensor == tensor.flatten()[0]).all()))
    return found


def _refuse_copies(
    model: nn.Module, shards: dict[str, Shard], by_rank: list[dict[str, tuple[int, bool]]], dims: list[str], mesh: Mesh
) -> None:
    """Refuse shards that are the same on all ranks, where these must hold different ones."""
    same = {}
    for name in by_rank[0]:
        sums = [sums[name] for sums in by_rank if name in sums]
        if not all(is_constant for _, is_constant in sums):
            if len(set(sums)) > 1:
                return
            same[name] = shards[name]
    if not same:
        return
    what = (
        f"all ranks along {', '.join(map(repr, dims))} hold the same shards of this {type(model).__name__}, bit by "
        f"bit, where they must hold different ones: {_described(same)}"
    )
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules()):
        raise MeshError(
            f"FullyShardedDataParallel, or fully_shard, mixed up the ranks: {what}", hint=_right_wrapper(mesh, dims)
        )
    raise WeightsError(
        f"{what}; a tool copied one rank's tensors over the others (DistributedDataParallel, or "
        "deepspeed.initialize over all ranks), or every rank initialized the same values",
        hint="make a fresh model, schedule it, and do not change its shards: slapo_core.build(sch, optimizer=...) "
        "wraps and initializes it; slapo_core.load_state_dict(sch, state) gives each rank its own",
    )


# -- stale optimizers -----------------------------------------------------------------------------------------


class _Exchanges:
    """Parameters that the steps of live schedules exchanged: held weakly.

    Attributes:
        taken: parameter -> its model (weakly) and full name.
        put: parameter -> whether it has another shape than the one that it came for.
        checked: optimizer -> what ``count`` and the number of its groups were when it was checked.
    """

    _BY_FULL_TENSORS = ("Adafactor", "LBFGS", "Muon")
    """torch's own optimizers that are not element-wise: updating a shard differs from sharding the update."""

    def __init__(self) -> None:
        self.taken: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.put: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.count = 0

    def note(self, model: nn.Module, entry: journal.JournalEntry, *, undone: bool) -> None:
        """Note which parameters an edit of ``model`` exchanged, when it is made (again) or undone."""
        for name, old, new in _exchanged(entry):
            out, into = (new, old) if undone else (old, new)
            if not self.count:
                from torch.optim.optimizer import register_optimizer_step_pre_hook

                register_optimizer_step_pre_hook(self.before_step)  # for good: torch iterates over these hooks
            self.count += 1
            if into is not None:
                self.taken.pop(into, None)
                self.put[into] = not undone and old is not None and old.shape != into.shape
            if out is not None:
                self.put.pop(out, None)
                self.taken[out] = (weakref.ref(model), name)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Look at an optimizer before its first step, and again when steps came or went, or it got another group."""
        if torch.compiler.is_compiling() or not self.taken:
            return
        now = (self.count, len(optimizer.param_groups))
        if self.checked.get(optimizer) == now:
            return
        kind, held = type(optimizer).__name__, [p for group in optimizer.param_groups for p in group["params"]]
        taken: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for parameter in held:
            reference, name = self.taken.get(parameter, (None, ""))
            model = reference() if reference is not None else None
            if model is not None:
                taken.setdefault(model, {})[name] = parameter
        for model, found in taken.items():
            self._refuse_stale(kind, held, model, found)
        if kind in self._BY_FULL_TENSORS and type(optimizer).__module__.startswith("torch.optim"):
            shards = [p for p in held if self.put.get(p)]
            if shards:
                warnings.warn(
                    f"{kind} computes its steps from full tensors, and {len(shards)} of its parameters are shards, "
                    f"e.g. of shape {tuple(shards[0].shape)}: training differs from the reference model; element-wise "
                    "optimizers (AdamW, SGD) do not have this problem",
                    stacklevel=4,
                )
        if any(self.put.get(p) for p in held) and optimizer not in self.checked:
            optimizer.register_state_dict_pre_hook(_warn_of_shards)
        warn_of_lost_updates(optimizer, stacklevel=4)
        self.checked[optimizer] = now

    def _refuse_stale(
        self, kind: str, held: list[nn.Parameter], model: nn.Module, taken: dict[str, nn.Parameter]
    ) -> None:
        present, own = dict(model.named_parameters()), {id(p) for p in held}
        live = {id(p) for p in present.values()}
        gone = {name: p for name, p in taken.items() if id(p) not in live}  # a step may have moved it within the model
        missing = {n: p for n, p in present.items() if p.requires_grad and id(p) not in own and p in self.put}
        if not gone or not missing:
            return
        name = next((name for name in gone if name in missing), next(iter(gone)))
        there = f"of shape {tuple(missing[name].shape)} " if name in missing else ""
        raise OptimizerError(
            f"this {kind} holds {len(gone)} parameters that are no longer in the {type(model).__name__}: '{name}' of "
            f"shape {tuple(gone[name].shape)} was replaced by a step or by undo, and the parameter in its place {there}"
            "is not in the optimizer: it would never change",
            hint=f"make the optimizer after the last step: torch.optim.{kind}(sch.model.parameters(), ...); or pass a "
            f"factory: slapo_core.build(sch, optimizer=lambda params: torch.optim.{kind}(params, ...))",
        )


def _warn_of_shards(optimizer: torch.optim.Optimizer) -> None:
    """Before ``optimizer.state_dict()``: warn that it gives shards."""
    warnings.warn(
        f"state_dict() of this {type(optimizer).__name__} gives the state of this rank's shards, which no other rank "
        "or mesh can load; slapo_core.optimizer_state_dict(sch, optimizer) gives full tensors by the reference model's "
        "names, or, of a built model, engine.save(directory)",
        stacklevel=4,
    )


def _exchanged(entry: journal.JournalEntry) -> list[tuple[str, nn.Parameter | None, nn.Parameter | None]]:
    """Yield ``(full name, old, new)`` of each exchanged parameter."""
    if isinstance(entry, journal.SetTensor):
        old, new = (tensor if isinstance(tensor, nn.Parameter) else None for tensor in (entry.old, entry.new))
        return [(module_index.full_name(*entry.sites[0]), old, new)]
    if not isinstance(entry, journal.ReplaceModule):
        return []
    before, after = dict(entry.old.named_parameters()), dict(entry.new.named_parameters())
    kept = {id(p) for p in before.values()} & {id(p) for p in after.values()}
    out = [(module_index.full_name(entry.path, name), p, None) for name, p in before.items() if id(p) not in kept]
    return [
        *out,
        *((module_index.full_name(entry.path, name), None, p) for name, p in after.items() if id(p) not in kept),
    ]


# About models and not about plugins or settings: an entry goes with its model, so nothing leaks from test to test.
_EXCHANGES = _Exchanges()


def _watched(schedule: Schedule) -> Callable[[], ForwardWatch | None]:
    """Return what begins to watch a training forward of a schedule, which is held weakly."""
    reference = weakref.ref(schedule)

    def begin() -> ForwardWatch | None:
        live = reference()
        return ForwardWatch(live) if live is not None and not Internals(live).is_rewound else None

    return begin


def _checked(schedule: Schedule) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a weak check for the first training forward: what tp ranks must share."""
    reference = weakref.ref(schedule)

    def check() -> dict[str, torch.Tensor]:
        live = reference()
        if live is None or Internals(live).is_rewound:
            return {}
        Internals(live).tree.tensors.check_unchanged()
        refuse_if_incomplete(live)
        return Internals(live).tree.tensors.replicated("tp")

    return check
