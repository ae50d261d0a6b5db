"""Facts that must be equal on all ranks, and their first difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slapo_runtime.ranks.checksums import checksum

_NOTHING = "(nothing)"


@dataclass(frozen=True)
class RankFact:
    """A value that must be the same on every rank.

    Args:
        what: of the message "ranks disagree about ...", e.g. ``"the seed given to build"``; unique in a list of facts.
        value: as text, e.g. ``"0"``; None if unknown on this rank, which is then not compared.
        over: compared only along this mesh dimension, e.g. ``"tp"``; None compares all ranks.
    """

    what: str
    value: str | None
    over: str | None = None


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return shape, type and checksum: ``"(8, 6), torch.float32, checksum 9ae16a3b2f90404f"``."""
    values = "without values" if tensor.is_meta else f"checksum {checksum(tensor):016x}"
    shape = [tuple(part.shape) for part in tensor.unbind()] if tensor.is_nested else tuple(tensor.shape)
    return f"{shape}, {tensor.dtype}, {values}"


def first_difference(
    by_rank: Mapping[int, Sequence[RankFact]], parts: Mapping[str | None, Iterable[Sequence[int]]]
) -> str | None:
    """Describe the first fact that differs between ranks, with all values; None if all agree.

    Args:
        by_rank: global rank -> its facts. Lists may differ in length: a step that another rank lacks comes before its
            successors.
        parts: for every ``over`` in the facts, the groups of compared ranks.

    Returns:
        the message: ``"ranks disagree about the seed given to build:\\n  rank 0: 0\\n  ranks 1, 2: 1"``.
    """
    longest_first = sorted(by_rank.values(), key=len, reverse=True)
    scopes = {fact.what: fact.over for facts in reversed(longest_first) for fact in facts}
    values = {rank: {fact.what: fact.value for fact in facts} for rank, facts in by_rank.items()}
    for what in dict.fromkeys(fact.what for facts in longest_first for fact in facts):
        for ranks in parts[scopes[what]]:
            ranks_by_value: dict[str, list[int]] = {}
            for rank in ranks:
                value = values[rank].get(what, _NOTHING)
                if value is not None:
                    ranks_by_value.setdefault(value, []).append(rank)
            if len(ranks_by_value) > 1:
                lines = [f"  {_ranks(those)}: {value}" for value, those in ranks_by_value.items()]
                return "\n".join([f"ranks disagree about {what}:", *lines])
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
