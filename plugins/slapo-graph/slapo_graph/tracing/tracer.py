"""The tracer ``record``: one run on fake tensors."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn

from slapo_core.layout import fork_rng
from slapo_graph.arguments import call_of
from slapo_graph.effects import is_inert
from slapo_graph.private import DynamicOutputShapeException
from slapo_graph.protocol import Recorded, Tracer, Untraceable, check
from slapo_graph.tracing.diagnostics import first_line
from slapo_graph.tracing.fake import FakeMode, meta_device_of, with_own_values, without_values
from slapo_graph.tracing.reads import AttributeReads
from slapo_graph.tracing.recorder import NeedsValues, Recorder, autograd_functions, checkpointing_refused, module_calls
from slapo_graph.tracing.recording import Recording
from slapo_graph.tracing.repeated_calls import RepeatedCalls
from slapo_graph.tracing.session import caches_restored, generators, rng_restored, without_other_modes
from slapo_graph.tracing.writer import Notes, placeholder

# Unused nodes without effects, which are dropped.


def drop_unused(graph: fx.Graph) -> None:
    """Remove unused reads of sizes, parts and parameters, and unused arithmetic on sizes.

    Torch calls stay, used or not: they may use the RNG or write to a tensor.
    """
    for node in reversed(list(graph.nodes)):
        is_read = is_inert(node) and node.op not in ("placeholder", "output") and node.target is not check
        if not node.users and (is_read or node.target is operator.getitem):
            graph.erase_node(node)


T = TypeVar("T")

_RANDOM = "draw them with torch (torch.rand), or in a module below that stays a call"


class RecordTracer(Tracer):
    """Run the forward once on fake tensors, and record its torch calls.

    The default. Sizes stay symbolic; a decision on a size becomes a guard. Where shapes or called modules depend on
    values, it runs on real tensors, if there are any. Recorded code that reads values of tensors is refused.
    """

    name = "record"

    def trace(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        leaves: Callable[[nn.Module, str], bool],
    ) -> Recorded:
        return after_first_call(lambda: recorded(module, forward, arguments, leaves)[0])


def recorded(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    leaves: Callable[[nn.Module, str], bool],
    *,
    noted: bool = False,
    meta_device: torch.device | None = None,
) -> tuple[Recorded, Notes]:
    """Record on fake tensors; on real ones if the forward or modules below need values.

    Args:
        module: as of :func:`record`, like the others.
        noted: whether the notes are filled.
        meta_device: as of :func:`record`.

    Raises:
        Untraceable: it cannot be recorded.
    """
    notes = Notes()
    # In an empty context, whose collectors of module outputs must not see a recording's.
    run = contextvars.Context().run
    try:
        return run(
            record, module, forward, arguments, leaves, notes=notes if noted else None, meta_device=meta_device
        ), notes
    except (NeedsValues, RuntimeError, NotImplementedError) as fake_error:
        if isinstance(fake_error.__cause__, DynamicOutputShapeException):  # within a call, it may be the size of a part
            notes = Notes()
            with contextlib.suppress(Untraceable, RuntimeError, NotImplementedError):
                noting = notes if noted else None
                return run(
                    record, module, forward, arguments, leaves, notes=noting, meta_device=meta_device, sizes=True
                ), notes
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise
        notes, real = Notes(), with_own_values(dict(arguments))
        notes.needs_values = fake_error
        try:
            with fork_rng():
                return run(record, module, forward, real, leaves, fake=False, notes=notes if noted else None), notes
        except Untraceable:
            raise
        except Exception:  # noqa: BLE001 - whatever it is: a compiler's own, where it is asked to run in a recording
            raise fake_error from None


def after_first_call(recording: Callable[[], T]) -> T:
    """Record a later call if the first one sets state, e.g. the loss type by its labels.

    If the forward sets an attribute that was None to a string or a bool, or a missing one to True, that value is kept,
    as after a real call, with the hooks that the call registered until then. Setting it twice is an error, and so is a
    call that also changes something else.
    """
    settled: list[tuple[Any, str, bool, list[tuple[Any, dict[Any, Any]]]]] = []
    while True:
        try:
            return recording()
        except Untraceable as error:
            this, name, value = getattr(error, "settles", (None, "", None))
            hooks = getattr(error, "slapo_changes", None)
            if this is None or hooks is None or any(this is one and name == other for one, other, *_ in settled):
                for one, other, was_there, added in settled:
                    setattr(one, other, None) if was_there else delattr(one, other)
                    for table, own in added:
                        for key in own:
                            del table[key]
                raise
            settled.append((this, name, hasattr(this, name), hooks))
            setattr(this, name, value)
            for table, own in hooks:
                table.update(own)


def record(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    leaves: Callable[[nn.Module, str], bool],
    *,
    fake: bool = True,
    notes: Notes | None = None,
    meta_device: torch.device | None = None,
    sizes: bool = False,
) -> Recorded:
    """Run ``forward`` once on fake tensors like the arguments, and record it.

    Args:
        module: whose forward it is.
        forward: takes the module first.
        arguments: by parameter.
        leaves: which modules below stay calls.
        fake: False runs on real tensors, for operations without a fake implementation.
        notes: filled with the values and writes of the run.
        meta_device: the device that meta tensors represent; None: the arguments' device.
        sizes: whether inner tensors of calls may have sizes that depend on values; results may not.

    Raises:
        Untraceable: it cannot be recorded.
    """
    meta_device = (meta_device or meta_device_of(module, dict(arguments))) if fake else None
    recording = Recording(module, may_capture=fake, notes=notes, meta_device=meta_device)
    mode = FakeMode(meta_device, sizes=sizes) if fake else None
    recorder = Recorder(recording, mode.fake if mode is not None else None)
    recorder.is_in_root = not getattr(forward, "slapo_calls_module", False)
    reads = AttributeReads(recording.refusal, first_line(forward), lambda: recorder.is_paused)
    signature = inspect.signature(forward)
    given: dict[str, Any] = {}
    drawn = generators()
    with (
        without_other_modes(),
        rng_restored(),
        caches_restored(module),
        mode or contextlib.nullcontext(),
    ):
        own = without_values(mode, dict(arguments)) if mode else arguments
        for name, value in own.items():
            given[name] = recording.give(value, placeholder(recording.graph, name))
        args, kwargs = call_of(signature, given)
        with (
            reads.watching(module, leaves) as is_unchanged,
            module_calls(recorder, module, leaves),
            autograd_functions(recorder),
            checkpointing_refused(recorder),
            recorder,
        ):
            if fake and notes is not None:
                recorder.repeated_calls = RepeatedCalls(
                    reads, notes, lambda: is_unchanged() and not (recorder.given and recorder.given.is_changed())
                )
            try:
                with recorder.inside(""):
                    out = forward(module, *args, **kwargs)
            except Exception as error:
                error.slapo_read = reads.read  # type: ignore[attr-defined] # decides whether equal modules fail too
                raise
        if generators() != drawn:
            raise Untraceable("uses an RNG other than torch's", first_line(forward), _RANDOM)
        recorder.regions.finish()
        recording.graph.output(recording.node(out))
        if notes is not None:
            notes.note_storages(mode)
    graph = recording.graph
    reads.refuse_settings_of(str(node.target) for node in graph.nodes if node.op == "call_module")
    drop_unused(graph)
    graph.lint()
    return Recorded(graph, tuple(recording.guards), reads.guarded, tuple(recording.captured), reads.read)
