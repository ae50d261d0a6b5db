"""The errors, one small class per mistake, and the words that their messages share.

This module imports nothing of slapo, so that every layer may raise from it. `docs/reference/errors.md` is generated
from the docstrings below: the first paragraph says *when*, the paragraph starting with "What to do:" says what
to do.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

if TYPE_CHECKING:
    from slapo_core.primitive import Violation

__all__ = [
    "ApplyError",
    "ArgumentError",
    "BuildError",
    "EstimateError",
    "FitError",
    "GuardError",
    "HookError",
    "InputError",
    "LaunchError",
    "MeshError",
    "OptimizerError",
    "PathError",
    "PluginError",
    "PostconditionError",
    "PreconditionError",
    "RankFailedError",
    "RankMismatchError",
    "ReceiptError",
    "ReplayError",
    "ReplicaError",
    "SealedError",
    "SerializationError",
    "SlapoError",
    "StaleError",
    "TraceError",
    "UndoError",
    "UnknownNameError",
    "UnusablePluginError",
    "VerifyError",
    "WeightsError",
]


class _Context(TypedDict, total=False):
    """The keyword arguments of every error: see `SlapoError`."""

    path: str | None
    plugin: str | None
    hint: str | None


class SlapoError(Exception):
    """The base of every error that slapo raises on purpose.

    What to do: catch a subclass; this one is for "anything slapo refused".

    Args:
        message: the mistake, its place, the required and the given value.
        path: the node of the schedule tree concerned, e.g. ``"encoder.layer.0.attention"``.
        plugin: the distribution concerned, e.g. ``"acme-slapo 1.0"``.
        hint: the corrected call or command.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        plugin: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.path = path
        self.plugin = plugin
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (rank launcher): rebuild without calling subclasses' own __init__.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(cls: type[SlapoError], args: tuple[object, ...], state: dict[str, object]) -> SlapoError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


# -- the tree -------------------------------------------------------------------------------------------------


class PathError(SlapoError, LookupError):
    """A path or glob names no module of the model.

    What to do: use one of the close matches in the message, or ``print(sch)`` to see the tree.
    """


class StaleError(SlapoError, LookupError):
    """A node or a match is used after a later step removed or moved it.

    What to do: the message names that step; undo it, address the new module by its path, or find the pattern again.
    """


# -- applying -------------------------------------------------------------------------------------------------


class ArgumentError(SlapoError, TypeError):
    """The arguments of a primitive or function of slapo do not fit its signature.

    What to do: the message shows the signature, and the type required and got.
    """


class InputError(ArgumentError):
    """The inputs or the output of a module do not fit a step there.

    What to do: follow the call in the message; ``verify`` raises this error as it is.
    """


class PreconditionError(SlapoError):
    """A primitive was refused before anything was touched; ``violations`` holds every reason.

    What to do: write the corrected call given with each violation.
    """

    def __init__(self, message: str, *, violations: Sequence[Violation] = (), **context: Unpack[_Context]) -> None:
        self.violations = tuple(violations)
        super().__init__(message, **context)


class ApplyError(SlapoError):
    """A primitive raised while it was applied; the model was rolled back.

    What to do: read the chained error; if it comes from a plugin, report it to that distribution.
    """


class PostconditionError(SlapoError):
    """A primitive ran but did not take effect; the model was rolled back.

    What to do: this is a fault of the primitive, not of the schedule: report it to the distribution named.
    """

    def __init__(self, message: str, *, violations: Sequence[Violation] = (), **context: Unpack[_Context]) -> None:
        self.violations = tuple(violations)
        super().__init__(message, **context)


class UndoError(SlapoError):
    """``undo`` was given an unknown step, or an edit cannot be undone.

    What to do: ``sch.records`` lists the steps that are in force; the message says what state the model is in.
    """


class SealedError(SlapoError):
    """The schedule was changed, undone or verified after ``build()`` or ``seal()``.

    What to do: apply every primitive before ``build``; to start again, create a new schedule.
    """


class MeshError(SlapoError):
    """A mesh has an unknown dimension or a bad size, or does not fit the processes or a wrapper.

    What to do: declare the mesh given in the message, launch as many processes as it needs, or wrap the model over the
    ranks that hold the same shards.
    """


# -- records --------------------------------------------------------------------------------------------------


class SerializationError(SlapoError):
    """A record has a value that is not JSON-serializable: a lambda, a live module.

    What to do: give that primitive a value by name, or keep the schedule as a Python function.
    """


class ReplayError(SlapoError):
    """A saved schedule is malformed or of a newer format, or a step was refused.

    What to do: the message names the step; the chained error says why it was refused.
    """


# -- verifying and building -----------------------------------------------------------------------------------


class VerifyError(SlapoError):
    """The scheduled model differs from the reference model beyond the tolerance.

    What to do: look at the tensor named first; ``sch.undo(to=...)`` and verify again to find the step.

    Args:
        tensor: what differs first, e.g. ``"gradient of encoder.layer.0.output.dense.bias"``.
        difference: the largest absolute difference found in it.
        tolerance: the largest absolute difference allowed.
        rank: the rank that found it; None when only one process ran.
        steps: the steps that did it, as in the message, e.g. ``("#3 sync('bwd_post', op='all_reduce') at 'fc1'",)``.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str | None = None,
        difference: float | None = None,
        tolerance: float | None = None,
        rank: int | None = None,
        steps: Sequence[str] = (),
        **context: Unpack[_Context],
    ) -> None:
        self.tensor = tensor
        self.difference = difference
        self.tolerance = tolerance
        self.rank = rank
        self.steps = tuple(steps)
        super().__init__(message, **context)


class FitError(SlapoError):
    """No choice of activation checkpointing keeps a training step within the memory given to `fit`.

    What to do: the message says what holds the least peak: more ranks of ``tp`` or ``pp`` for parameters and optimizer,
    a smaller batch or more micro-batches for activations.

    Args:
        target: bytes that were allowed.
        least: bytes of the least peak that was found.
    """

    def __init__(self, message: str, *, target: int, least: int, **context: Unpack[_Context]) -> None:
        self.target = target
        self.least = least
        super().__init__(message, **context)


class TraceError(SlapoError):
    """A module's forward cannot be expressed by a static graph.

    What to do: trace a narrower node, or name the module at fault in `leaves=`, so that it stays a call; the
    message names the line of the model.

    Args:
        location: file and line of the model; None if it is not known.
    """

    def __init__(self, message: str, *, location: tuple[str, int] | None = None, **context: Unpack[_Context]) -> None:
        super().__init__(_with_line(message, location), **context)
        self.location = location


class GuardError(TraceError):
    """A traced module is called outside of its graph's guards.

    What to do: call it as it was recorded, or trace only what lies below the decision that the message names.
    """


class BuildError(SlapoError):
    """The target cannot take the schedule: wrong launch, unknown target, no loss in the output.

    What to do: follow the call or launch command in the message.
    """


class WeightsError(BuildError):
    """Weights are missing, unexpected, of another shape, or cannot be initialized.

    What to do: the message lists the names; pass ``weights=`` that holds them.
    """


class OptimizerError(BuildError):
    """The optimizer was made before ``build`` or before the steps, of other parameters.

    What to do: pass a factory, ``build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))``; without
    ``build``, make it after the last step.
    """


class RankMismatchError(SlapoError):
    """Ranks disagree: on steps, plugins, versions, arguments, weights, RNG states, batches, or replicas.

    What to do: make every rank run the same script on the same installation; the first difference is named.
    """


class ReplicaError(RankMismatchError):
    """Replicas of a tensor differ between ranks: they have diverged.

    What to do: ``slapo.verify`` finds a reduction that the schedule lacks; else give the ranks the same batches and
    seeds. Nothing is lost: a save has written the values of the first rank, ``state_dict`` attaches its own.

    Args:
        tensor: the first that differs, e.g. ``"encoder.layer.0.output.LayerNorm.weight"``.
        ranks: that hold it, e.g. ``(0, 1)``.
        within_rounding: whether all that differs does so by a few roundings of its type.
        directory: where the values of the first rank were written; None where nothing was.

    Attributes:
        state_dict: what ``state_dict`` would have returned: full tensors, of this rank's replicas.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str,
        ranks: Sequence[int] = (),
        within_rounding: bool = False,
        directory: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.tensor, self.ranks, self.within_rounding, self.directory = tensor, tuple(ranks), within_rounding, directory
        self.state_dict: dict[str, Any] | None = None
        super().__init__(message, path=tensor.partition("::")[0].rpartition(".")[0] or None, hint=hint)


class EstimateError(SlapoError):
    """A training step cannot be estimated: it depends on values of tensors, or raises.

    What to do: give a batch that has values, or a model that does not decide by them; the message names the module and
    the line of the model.

    Args:
        location: file and line of the model, or of the function that failed; None if it is not known.
    """

    def __init__(self, message: str, *, location: tuple[str, int] | None = None, **context: Unpack[_Context]) -> None:
        super().__init__(_with_line(message, location), **context)
        self.location = location


# -- processes ------------------------------------------------------------------------------------------------


class ReceiptError(SlapoError):
    """Effects of steps, or of the runtime, were missing in the first training step.

    What to do: look at the step named first; ``observe(engine, batch)`` shows what a training step does.

    Args:
        record: the step, as in ``str(record)``, or ``"target 'torch'"``; empty for what nothing explains.
        location: ``file:line`` of the step.
        expected: in words.
        seen: in words.
    """

    def __init__(
        self,
        message: str,
        *,
        record: str,
        location: str,
        expected: str,
        seen: str,
        **context: Unpack[_Context],
    ) -> None:
        self.record = record
        self.location = location
        self.expected = expected
        self.seen = seen
        super().__init__(message, **context)


class LaunchError(SlapoError):
    """Rank processes cannot be started: an unpicklable object, an import that fails, a bad world size.

    What to do: pass functions defined at the top level of a module, and call under ``if __name__ == "__main__":``.
    """


class RankFailedError(SlapoError):
    """A rank process raised, died, or did not end within the timeout.

    What to do: read the traceback of the rank that failed first; its exception is chained if it could be sent. After a
    timeout (``first`` is None), look for a collective that not every rank reaches, or raise ``timeout``.

    Args:
        failures: traceback or exit of every rank that failed, e.g. ``{1: "Traceback ..."}``.
        ended: traceback of every rank that was ended after a failure of another rank or at the timeout.
        first: the rank that failed first; None after a timeout.
        causes: exception of every rank that raised one, if it could be sent.
        codes: exit code, or minus the signal number, of every rank that died.
    """

    def __init__(
        self,
        message: str,
        *,
        failures: Mapping[int, str] | None = None,
        ended: Mapping[int, str] | None = None,
        first: int | None = None,
        causes: Mapping[int, BaseException] | None = None,
        codes: Mapping[int, int] | None = None,
        hint: str | None = None,
    ) -> None:
        self.failures = dict(failures or {})
        self.ended = dict(ended or {})
        self.first = first
        self.causes = dict(causes or {})
        self.codes = dict(codes or {})
        super().__init__(message, hint=hint)


# -- plugins --------------------------------------------------------------------------------------------------


class PluginError(SlapoError):
    """The base of errors of plugins, of their names, and of ``SLAPO_DISABLE_PLUGINS``.

    What to do: ``slapo plugins list`` shows the state and reason of every plugin.
    """


class UnknownNameError(PluginError, AttributeError):
    """No installed plugin provides that name (a primitive, a dialect, ...).

    What to do: use a close match from the message, or install the distribution it names.
    """


class UnusablePluginError(PluginError, AttributeError):
    """An installed plugin cannot be used, or several provide a bare name.

    What to do: follow the hint; ``slapo plugins list`` shows the state and reason of every plugin.

    Args:
        state: ``"unusable"`` (it cannot be imported, needs another slapo-core, or breaks a rule), ``"conflict"`` (two
            distributions provide the name), or ``"disabled"`` (by ``SLAPO_DISABLE_PLUGINS``).
    """

    def __init__(self, message: str, *, state: str = "unusable", **context: Unpack[_Context]) -> None:
        self.state = state
        super().__init__(message, **context)


class HookError(PluginError):
    """A hook implementation is misspelt, raised, or one of two answers.

    What to do: the message names the hook and the distribution.
    """


# -- words of messages ----------------------------------------------------------------------------------------


def place(path: str) -> str:
    """Format the path of a module: ``"'encoder.layer.0'"``, or ``"the root"``."""
    return f"'{path}'" if path else "the root"


def listed(names: Sequence[str], *, limit: int = 8) -> str:
    """Join names by commas; of many the first three, the last, and their number."""
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, ..., {names[-1]} ({len(names)} in all)"


class Verbatim(str):
    """Text without quotes in ``repr``, for annotations and defaults of printed signatures."""

    __slots__ = ()
    __repr__ = str.__str__


def _with_line(message: str, location: tuple[str, int] | None) -> str:
    """Append the line of the model, unless the message has it."""
    at = f"\n  at {location[0]}:{location[1]}" if location is not None else ""
    return message if at in message else message + at


def user_frame(*inside: str) -> FrameType:
    """Find the nearest frame outside of slapo_core, contextlib and further packages.

    Args:
        inside: the further packages, e.g. ``"acme_slapo"``.
    """
    packages = ("slapo_core", "contextlib", *inside)
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages:
        frame = frame.f_back
    return frame


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of user code that called slapo, at any depth."""
    import slapo_core

    frame = user_frame("torch", *(name.replace("-", "_") for name in slapo_core.DISTRIBUTIONS))
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
