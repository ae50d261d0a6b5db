"""Optuna's samplers, through one adapter.

Each proposal makes a study of Optuna in memory from the history, so nothing of Optuna is stored on disk. A symbol has
one distribution for each list of candidates, over their indices, because Optuna takes no distribution that changes.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slapo_core import SlapoError
from slapo_tune.plain_data import canonical
from slapo_tune.samplers import Point, Sampler, SearchSpace, Trial
from slapo_tune.samplers.program import ReplayedSearch, candidates_of, sample_point

if TYPE_CHECKING:
    import optuna


ATTEMPTS = 20
"""Unusable proposals of Optuna (tried, refused, or too large) before a random point."""


class OptunaMissingError(SlapoError, ImportError):
    """A sampler of Optuna is used, but Optuna is not installed.

    What to do: ``pip install "slapo-tune[optuna]"``, or use another sampler, e.g. ``frontier``.
    """


class _Optuna(Sampler):
    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        optuna = _imported(self.name)
        ask = ReplayedSearch(space, history, seed)
        for trial in ask.others():
            ask.value(trial.point)
        number = int.from_bytes(hashlib.sha256(f"{seed} {len(history)}".encode()).digest()[:4], "big")
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study = optuna.create_study(direction="maximize", sampler=self._made(optuna, number))
                study.add_trials([_frozen_trial(optuna, space, trial) for trial in history if _is_in_space(ask, trial)])
                for _ in range(ATTEMPTS):
                    point = _suggested(study, space)
                    if point is not None and not ask.is_known(point) and ask.fits(point):
                        return point
        finally:
            optuna.logging.set_verbosity(before)
        ask.random.seed(f"optuna {seed} {len(history)}")
        return sample_point(ask)

    @abstractmethod
    def _made(self, optuna: Any, seed: int) -> optuna.samplers.BaseSampler:
        """Make Optuna's sampler."""


class OptunaTpe(_Optuna):
    """Optuna's tree-structured Parzen estimator; requires ``slapo-tune[optuna]``."""

    name = "optuna.tpe"

    def _made(self, optuna: Any, seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.TPESampler(seed=seed)


class OptunaRandom(_Optuna):
    """Optuna's random sampler; requires ``slapo-tune[optuna]``."""

    name = "optuna.random"

    def _made(self, optuna: Any, seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=seed)


def _imported(name: str) -> Any:
    try:
        import optuna
    except ImportError as missing:
        raise OptunaMissingError(
            f"sampler {name!r} requires optuna, which is not installed",
            plugin="slapo-tune",
            hint='pip install "slapo-tune[optuna]", or sampler="frontier"',
        ) from missing
    return optuna


def _label(name: str, candidates: tuple[Any, ...]) -> str:
    return f"{name} of {canonical([(name, candidates)])}"


def _distribution(optuna: Any, candidates: tuple[Any, ...]) -> Any:
    """Return the distribution of candidates: ordered for numbers, categorical for names."""
    if all(type(value) in (int, float) for value in candidates):
        return optuna.distributions.IntDistribution(0, len(candidates) - 1)
    return optuna.distributions.CategoricalDistribution(tuple(range(len(candidates))))


def _is_in_space(ask: ReplayedSearch, trial: Trial) -> bool:
    """Return whether a trial's point is in the space."""
    found = candidates_of(ask.space, trial.point)
    return found.keys() == trial.point.keys()


def _frozen_trial(optuna: Any, space: SearchSpace, trial: Trial) -> optuna.trial.FrozenTrial:
    parameters, distributions = {}, {}
    for name, candidates in candidates_of(space, trial.point).items():
        label = _label(name, candidates)
        parameters[label] = candidates.index(trial.point[name])
        distributions[label] = _distribution(optuna, candidates)
    failed = trial.value is None or not math.isfinite(trial.value)
    return optuna.trial.create_trial(
        params=parameters,
        distributions=distributions,
        value=None if failed else trial.value,
        state=optuna.trial.TrialState.PRUNED if failed else optuna.trial.TrialState.COMPLETE,
    )


def _suggested(study: optuna.Study, space: SearchSpace) -> Point | None:
    import optuna

    trial = study.ask()

    def pick(name: str, candidates: tuple[Any, ...]) -> int:
        label = _label(name, candidates)
        if isinstance(_distribution(optuna, candidates), optuna.distributions.IntDistribution):
            return trial.suggest_int(label, 0, len(candidates) - 1)
        return int(trial.suggest_categorical(label, tuple(range(len(candidates)))))

    point = space.draw(pick)
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return point
