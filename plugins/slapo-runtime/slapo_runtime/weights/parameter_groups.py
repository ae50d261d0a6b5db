"""Divide the parameters of a scheduled model into groups of an optimizer, by patterns of reference names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import OptimizerError

if TYPE_CHECKING:
    from slapo_runtime.correspondence.storage import LiveTensor
    from slapo_runtime.weights.state import ModelState


_DECAY = "weight_decay"
_CALL = 'no_decay=("*.bias", "*norm*"), param_groups={"lm_head.*": {"lr": 1e-5}}'
_NOTHING = object()

_Key = tuple[bool, tuple[int, ...]]  # without decay; the patterns of `param_groups` with a setting in effect


class ParameterGroups:
    """Divide parameters into groups; each group has the settings of the patterns that its parameters match.

    Patterns of :mod:`fnmatch` are matched with all names of a tensor in the reference model; a parameter that a
    step added is matched with its name in the scheduled model. Groups depend on these names only: they are the same,
    in the same order, on every rank and under every mesh. First come the parameters that match nothing.

    Args:
        state: of the model; also after :func:`slapo_torch.fully_shard`.
        no_decay: patterns of the parameters with ``weight_decay=0.0``.
        settings: by pattern, the settings of its parameters; for one setting, the first matching pattern counts.

    Raises:
        OptimizerError: a pattern matches no parameter, or has no effect after earlier ones; two arguments contradict
            each other; or a parameter holds several reference tensors with different settings.
    """

    def __init__(
        self, state: ModelState, no_decay: Sequence[str] | str, settings: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        check_patterns(no_decay, settings)
        self._state = state
        self._no_decay = (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
        self._patterns = list((settings or {}).items())
        self._names: dict[str, list[str]] = {}
        for name, first in state.correspondence.survey.origins.items():
            self._names.setdefault(first, []).append(name)
        parameters = [live for live in state.tensors() if live.is_parameter]
        self._refuse_unmatched(parameters)
        self._group_of = {live.name: self._key(live) for live in parameters}
        self._keys = sorted(set(self._group_of.values()), key=lambda key: (key[1], key[0]))
        for number, (pattern, _) in enumerate(self._patterns):
            if not any(number in numbers for _, numbers in self._keys):
                raise OptimizerError(
                    f"'{pattern}' of param_groups has no effect: earlier patterns give all of its parameters the same "
                    "settings",
                    hint="put the narrower pattern first, or leave one out",
                )

    def of(self, parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Return the groups of parameters, as ``torch.optim`` takes them; a group may be empty on a pipeline rank.

        Raises:
            OptimizerError: one of them is not a parameter of the model.
        """
        names = {id(live.tensor): live.name for live in self._state.tensors()}
        groups: dict[_Key, list[torch.nn.Parameter]] = {key: [] for key in self._keys}
        for parameter in parameters:
            name = names.get(id(parameter))
            if name not in self._group_of:
                raise OptimizerError(
                    f"no_decay and param_groups apply to the parameters of the model, not to one of shape "
                    f"{tuple(parameter.shape)} that replaced or copied them",
                    hint="give the factory the model's parameters",
                )
            groups[self._group_of[name]].append(parameter)
        return [{"params": found, **self._settings(key)} for key, found in groups.items()]

    # -- matching -----------------------------------------------------------------------------------------------

    def _tensors(self, live: LiveTensor) -> list[list[str]]:
        """Return all names of each reference tensor of a parameter."""
        return [self._names.get(name, [name]) for name in live.reference_names] or [[live.name]]

    def _refuse_unmatched(self, parameters: Sequence[LiveTensor]) -> None:
        names = [name for live in parameters for tensor in self._tensors(live) for name in tensor]
        for argument, patterns in (("no_decay", self._no_decay), ("param_groups", [one for one, _ in self._patterns])):
            for pattern in patterns:
                if not _matches(pattern, names):
                    inner = [name for name in names if fnmatchcase(name.lower(), f"*{pattern.lower()}*")]
                    close = inner[:3] or difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
                    raise OptimizerError(
                        f"'{pattern}' of {argument} matches no parameter",
                        hint=(f"closest names: {', '.join(close)}; " if close else "")
                        + "a pattern matches a full name of the reference model, e.g. '*.bias'",
                    )

    def _key(self, live: LiveTensor) -> _Key:
        """Find the settings of a parameter, the same for all of its reference tensors."""
        tensors = self._tensors(live)
        first, *others = [self._key_of(names) for names in tensors]
        for names, other in zip(tensors[1:], others, strict=True):
            if other != first:
                raise OptimizerError(
                    f"'{live.name}' holds '{tensors[0][0]}' and '{names[0]}' of the reference model in one parameter, "
                    f"with the settings {self._settings(first)} and {self._settings(other)}",
                    hint="use patterns that match all of its tensors or none: " + ", ".join(one[0] for one in tensors),
                )
        return first

    def _key_of(self, names: Sequence[str]) -> _Key:
        numbers, seen = [], dict[str, int]()
        for number, (pattern, settings) in enumerate(self._patterns):
            if _matches(pattern, names) and not seen.keys() >= settings.keys():
                numbers.append(number)
                for setting in settings:
                    seen.setdefault(setting, number)
        undecayed = next((pattern for pattern in self._no_decay if _matches(pattern, names)), None)
        if undecayed is not None and _DECAY in seen:
            pattern, settings = self._patterns[seen[_DECAY]]
            if settings[_DECAY]:
                raise OptimizerError(
                    f"'{names[0]}' matches '{undecayed}' of no_decay, and '{pattern}' of param_groups, which sets "
                    f"weight_decay={settings[_DECAY]}",
                    hint="leave its weight decay out of one of them, or use narrower patterns",
                )
        return undecayed is not None, tuple(numbers)

    def _settings(self, key: _Key) -> dict[str, Any]:
        is_undecayed, numbers = key
        found: dict[str, Any] = {}
        for number in reversed(numbers):
            found.update(self._patterns[number][1])
        return {**found, _DECAY: 0.0} if is_undecayed else found


class GroupedFactory:
    """A user's factory of optimizers, called with groups in place of the list of parameters.

    Args:
        factory: the user's.
        groups: of the model.
    """

    def __init__(self, factory: Callable[[Any], Any], groups: ParameterGroups) -> None:
        self._factory, self._groups = factory, groups

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> Any:
        """Make the optimizer.

        Raises:
            OptimizerError: its class does not have a setting, or the factory did not keep the groups.
        """
        given = self._groups.of(parameters)
        settings = [{key: value for key, value in group.items() if key != "params"} for group in given]
        members = [list(group["params"]) for group in given]
        optimizer = self._factory(given)  # which may keep and change the groups themselves
        if isinstance(optimizer, torch.optim.Optimizer):
            _refuse_unknown(optimizer, settings)
            _refuse_lost(optimizer, settings, members)
        return optimizer


def check_patterns(no_decay: Any, settings: Any) -> None:
    """Refuse invalid arguments ``no_decay`` and ``param_groups``.

    Raises:
        OptimizerError: something else than patterns, and mappings of settings.
    """
    if not isinstance(no_decay, str) and not (
        isinstance(no_decay, (list, tuple)) and all(isinstance(one, str) for one in no_decay)
    ):
        raise OptimizerError(f"no_decay must be patterns of parameter names (got {no_decay!r})", hint=_CALL)
    for pattern, values in settings.items() if isinstance(settings, Mapping) else ():
        if not (isinstance(pattern, str) and isinstance(values, Mapping) and values and "params" not in values):
            raise OptimizerError(
                f"param_groups must map patterns of parameter names to settings (got {pattern!r}: {values!r})",
                hint=_CALL,
            )
    if settings is not None and not isinstance(settings, Mapping):
        raise OptimizerError(
            f"param_groups must map patterns of parameter names to settings (got {type(settings).__name__}); a factory "
            "may make groups of its own",
            hint=_CALL,
        )


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _refuse_unknown(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    kind, known = type(optimizer).__name__, optimizer.defaults
    for setting in dict.fromkeys(key for group in settings for key in group):
        if known and setting not in known:
            close = difflib.get_close_matches(setting, known, n=1) or sorted(known)
            raise OptimizerError(
                f"{kind} does not have the setting '{setting}' of no_decay or param_groups",
                hint=f"settings of {kind}: {', '.join(close)}",
            )


def _refuse_lost(
    optimizer: torch.optim.Optimizer,
    settings: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[torch.nn.Parameter]],
) -> None:
    """Refuse a factory that took the parameters out of their groups."""
    held = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for values, parameters in zip(settings, members, strict=True):
        for group in (held[id(parameter)] for parameter in parameters if id(parameter) in held):
            for key, value in values.items():
                kept = group.get(key, _NOTHING)
                if kept is not value and not bool(kept == value):
                    raise OptimizerError(
                        f"the optimizer factory did not keep the groups of no_decay and param_groups: '{key}' is "
                        f"{kept!r} in place of {value!r}",
                        hint="pass the argument on as it is: lambda params: torch.optim.AdamW(params, lr=1e-4)",
                    )
