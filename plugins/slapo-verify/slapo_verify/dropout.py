"""Switch dropout off or on while verifying, record it, and compare it."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from slapo_runtime.ranks.trial_groups import module_of

_DROPOUT = {
    F.alpha_dropout,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.feature_alpha_dropout,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.dropout,
    torch.dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
}
_TRAINING_BY_DEFAULT = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # their one float argument is dropout's, before it the layers
_SDPA_DROPOUT_POSITION = 4  # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)


@dataclass(frozen=True)
class Draw:
    """Describe one dropout call of a forward pass.

    Args:
        path: the module that calls it; "" if none does.
        function: e.g. ``"dropout"``.
        p: the probability, above 0.
        shape: of the tensor that it is given.
        order: the axes of that tensor by stride, in which random numbers are assigned.
        state: a hash of the RNG state before it; 0 while dropout is off.
    """

    path: str
    function: str
    p: float
    shape: tuple[int, ...]
    order: tuple[int, ...]
    state: int = 0

    @property
    def stream(self) -> tuple[Any, ...]:
        """Return the properties that, with the RNG state, determine the random numbers."""
        return self.function, self.p, self.shape, self.order


class DropoutMode(TorchFunctionMode):
    """Record every dropout call, by whatever function; switch dropout off.

    Args:
        paths: id of a module -> its path.
        is_on: whether dropout is left as the model has it.

    Attributes:
        draws: dropout calls of the forward, in order.
        recomputed: dropout calls of the backward, which may run parts of the forward again.
        in_backward: to be set to True before backward.
        slapo_notes: of steps on what they did not do, for the report.
    """

    def __init__(self, paths: Mapping[int, str] | None = None, *, is_on: bool = False) -> None:
        super().__init__()
        self._paths = paths or {}
        self._is_on = is_on
        self.draws: list[Draw] = []
        self.recomputed: list[Draw] = []
        self.in_backward = False
        self.slapo_switches_dropout_off = not is_on  # for slapo_core.observers, as the next
        self.slapo_notes: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT or func is torch.native_dropout:
            source = args[0] if args else kwargs["input"]
            p, training = _probability(func, args, kwargs)
            self._keep(func, source, p if training else 0.0)
            if not self._is_on:
                has_mask = func is torch.native_dropout
                return (source, torch.ones_like(source, dtype=torch.bool)) if has_mask else source
        elif func is F.scaled_dot_product_attention:
            position = _SDPA_DROPOUT_POSITION
            p = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
            self._keep(func, args[0] if args else kwargs["query"], p)
            if not self._is_on:
                args = (*args[:position], *((0.0,) if len(args) > position else ()), *args[position + 1 :])
                kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        elif func is F.multi_head_attention_forward:
            call = inspect.signature(func).bind(*args, **kwargs)
            call.apply_defaults()
            self._keep(func, call.arguments["query"], call.arguments["dropout_p"] * call.arguments["training"])
            if not self._is_on:
                call.arguments["dropout_p"] = 0.0
                args, kwargs = call.args, call.kwargs
        elif getattr(func, "__name__", "") in _RECURRENT:
            args = self._recurrent(func, args)
        return func(*args, **kwargs)

    def _recurrent(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        position = next((number for number, value in enumerate(args) if type(value) is float), None)
        if position is None:
            return args
        layers, p, training = args[position - 1 : position + 2]
        self._keep(func, args[0], p if training and layers > 1 else 0.0)
        return args if self._is_on else (*args[:position], 0.0, *args[position + 1 :])

    def _keep(self, func: Callable[..., Any], source: torch.Tensor, p: float) -> None:
        if not p:
            return
        strides = source.stride()
        axes = [axis for axis in range(source.dim()) if source.shape[axis] > 1]
        order = tuple(sorted(axes, key=lambda axis: (-strides[axis], axis)))
        name = func.__name__.rstrip("_")
        draw = Draw(self._caller(), name, float(p), tuple(source.shape), order, _state(source) if self._is_on else 0)
        (self.recomputed if self.in_backward else self.draws).append(draw)

    def _caller(self) -> str:
        """Return the path of the innermost module on the call stack."""
        frame: Any = sys._getframe(2)
        while frame is not None and self._paths:
            if (path := module_of(frame, self._paths)) is not None:
                return path
            frame = frame.f_back
        return ""


def _state(source: torch.Tensor) -> int:
    module = torch.get_device_module(source.device)
    state = torch.get_rng_state() if source.device.type == "cpu" else module.get_rng_state(source.device)
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest())  # the same on all ranks


def _probability(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[float, bool]:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    default = kwargs.get("training", kwargs.get("train", func in _TRAINING_BY_DEFAULT))
    training = args[2] if len(args) > 2 else default
    return float(p), training is None or bool(training)


@dataclass(frozen=True)
class DropoutComparison:
    """Describe the comparison of two runs' dropout.

    Args:
        wrong: the mistake of the scheduled model; None for none.
        path: the module where it is wrong.
        other_stream: why the two rightly use different RNG streams; None if they use the same.
    """

    wrong: str | None = None
    path: str = ""
    other_stream: str | None = None


def compare_draws(
    expected: Sequence[Draw],
    got: Sequence[Draw],
    *,
    is_random: bool,
    is_split: Callable[[str], bool],
    is_local: Callable[[str], bool] = lambda path: True,
) -> DropoutComparison:
    """Compare the dropout of one forward of each model.

    How often each module drops, and with which probability, must be as in the reference model whatever the steps
    promise: RANDOM means other numbers, and nothing else.

    Args:
        expected: by the reference model.
        got: by the scheduled model.
        is_random: whether a step promises no more than the same distribution.
        is_split: whether steps split tensors around a module, so that it may drop shards.
        is_local: whether this rank has a module of that path.
    """
    wrong = _wrong(expected, got, is_split, is_local)
    if wrong is not None:
        return wrong
    if is_random:
        return DropoutComparison(other_stream="a step promises the same distribution only (RANDOM)")
    if Counter(draw.p for draw in expected) != Counter(draw.p for draw in got):
        path = _differing(expected, got)[0]
        theirs, ours = _at(path, expected), _at(path, got)
        return DropoutComparison(other_stream=f"'{path}' drops {_times(len(ours))}, not {_times(len(theirs))}")
    for before, after in zip(expected, got, strict=True):
        if before.stream != after.stream:
            return DropoutComparison(other_stream=_other_stream(before, after))
    return DropoutComparison()


def _wrong(
    expected: Sequence[Draw], got: Sequence[Draw], is_split: Callable[[str], bool], is_local: Callable[[str], bool]
) -> DropoutComparison | None:
    """Find the first module whose dropout differs, except on shards or moved calls."""
    left: dict[str, tuple[list[float], list[float]]] = {}
    unsplit: dict[str, tuple[list[float], list[float]]] = {}  # fewer or more calls, of tensors of the same shapes
    for path in _differing(expected, got):
        theirs, ours = _at(path, expected), _at(path, got)
        values = [draw.p for draw in theirs], [draw.p for draw in ours]
        if not (is_split(path) and _is_for_shards(theirs, ours, is_local=is_local(path))):
            left[path] = values
        elif {draw.shape for draw in theirs} == {draw.shape for draw in ours}:
            unsplit[path] = values
    if _are_moved(left) or _are_moved({**left, **unsplit}):
        return None
    path, (before, after) = next(iter(left.items()))
    return DropoutComparison(_problem(before, after), path)


def _are_moved(calls: Mapping[str, tuple[list[float], list[float]]]) -> bool:
    """Return whether calls that are missing at some modules are all made at others."""
    missing, added = (Counter(p for both in calls.values() for p in both[side]) for side in (0, 1))
    return missing == added


def _is_for_shards(theirs: Sequence[Draw], ours: Sequence[Draw], *, is_local: bool) -> bool:
    """Return whether the number of dropout calls differs because of shards."""
    if not ours or not theirs:
        return not ours and not is_local
    if {draw.p for draw in theirs} != {draw.p for draw in ours}:
        return False
    return len(theirs) % len(ours) == 0 or {draw.shape for draw in theirs}.isdisjoint(draw.shape for draw in ours)


def _problem(theirs: list[float], ours: list[float]) -> str:
    if not ours:
        return f"it drops nothing, the reference model drops with p={_probabilities(theirs)}"
    if not theirs:
        return f"it drops with p={_probabilities(ours)}, the reference model drops nothing"
    if set(theirs) == set(ours):
        return f"it drops {_times(len(ours))}, not {_times(len(theirs))}, with p={_probabilities(ours)}"
    return f"it drops with p={_probabilities(ours)}, not p={_probabilities(theirs)}"


def _differing(expected: Sequence[Draw], got: Sequence[Draw]) -> list[str]:
    """List modules whose dropout calls or probabilities differ between the models."""
    counts = [Counter((draw.path, draw.p) for draw in draws) for draws in (expected, got)]
    places = dict.fromkeys((draw.path, draw.p) for draw in (*expected, *got))
    return list(dict.fromkeys(place[0] for place in places if counts[0][place] != counts[1][place]))


def _other_stream(before: Draw, after: Draw) -> str:
    where = f"'{after.path}'" if after.path else "the model itself"
    if before.shape != after.shape:
        return f"{where} drops {after.shape}, the reference model {before.shape}"
    if before.function != after.function:
        return f"{where} calls {after.function}, the reference model {before.function}"
    return f"{where} drops in another memory order than the reference model"


def _at(path: str, draws: Sequence[Draw]) -> list[Draw]:
    return [draw for draw in draws if draw.path == path]


def _probabilities(values: list[float]) -> str:
    return " and ".join(f"{value:g}" for value in dict.fromkeys(values))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
