"""Compare values across ranks, as text and checksums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

_CHUNK = 1 << 20  # elements; so that no temporary is larger than some megabytes
_WORD = 8  # bytes that are taken as one integer
_SPREAD = (-7046029254386353131, -4658895280553007687)  # odd 64-bit numbers with well mixed bits
_MODULUS = 1 << 64


def checksum(tensor: torch.Tensor) -> int:
    """Compute a 64-bit checksum of a tensor's bits, in order (not cryptographic).

    Neither the type nor the shape counts, only the elements in row-major order, wherever they lie in memory. It is
    computed on the tensor's device, block by block, and is the same number on every kind of device.

    Args:
        tensor: of any type; of a sparse one the indices and the values count, of one on the meta device the size.
    """
    total = 0
    for dense in _dense_parts(tensor.detach()):
        total = (total * 1_000_003 + dense.numel() * dense.element_size()) % _MODULUS
        if dense.is_meta:
            continue
        position = 1
        for words in _words(dense):
            total = (total + _mixed(words, position)) % _MODULUS
            position += words.numel()
    return total


def _mixed(words: torch.Tensor, position: int) -> int:
    """The sum over all words, each stirred together with its position; all arithmetic is modulo 2**64."""
    mixed = torch.arange(position, position + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_SPREAD[0]).add_(words)
    mixed.bitwise_xor_(mixed >> 32).mul_(_SPREAD[1])
    mixed.bitwise_xor_(mixed >> 29)
    return int(mixed.sum())


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    else:
        yield tensor if tensor.layout is torch.strided or tensor.is_meta else tensor.to_dense()


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give the bytes of all elements as 64-bit integers; the last one is padded with zeros."""
    rest = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    for block in _blocks(tensor):
        own = torch.empty(block.numel(), dtype=block.dtype, device=block.device)
        own.view(block.shape).copy_(block)  # resolves strides, conjugation and negation
        joined = torch.cat([rest, own.view(torch.uint8)])
        whole = joined.numel() // _WORD * _WORD
        yield joined[:whole].view(torch.int64)
        rest = joined[whole:]
    if rest.numel():
        yield torch.cat([rest, rest.new_zeros(_WORD - rest.numel())]).view(torch.int64)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in row-major order, cut so that a copy of a block is small."""
    if tensor.numel() <= _CHUNK:
        if tensor.numel():
            yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK)
    else:
        rows = _CHUNK // (tensor.numel() // tensor.shape[0])
        for part in tensor.split(max(rows, 1)):
            yield from _blocks(part if rows else part[0])


_NOTHING = "(nothing)"


@dataclass(frozen=True)
class RankFact:
    """A value that must be the same on every rank.

    Args:
        what: of the message "ranks disagree about ...", e.g. ``"the seed given to build"``; once in a list of facts.
        value: for people and for comparing, e.g. ``"0"``; None if this rank cannot tell, and is not compared.
        over: compared only among ranks that differ in nothing but their place along this mesh dimension, e.g.
            ``"tp"``; None compares all.
    """

    what: str
    value: str | None
    over: str | None = None


def describe_tensor(tensor: torch.Tensor) -> str:
    """Shape, type and checksum: ``"(8, 6), torch.float32, checksum 9ae16a3b2f90404f"``."""
    values = "without values" if tensor.is_meta else f"checksum {checksum(tensor):016x}"
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {values}"


def first_difference(
    by_rank: Mapping[int, Sequence[RankFact]], parts: Mapping[str | None, Iterable[Sequence[int]]]
) -> str | None:
    """The first fact that ranks disagree about, with the values of all ranks; None if there is none.

    Args:
        by_rank: global rank -> its facts. The list of some rank may be longer: a step that another rank lacks is
            named before what comes after it.
        parts: for every ``over`` in the facts, the ranks that are compared with each other.

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
