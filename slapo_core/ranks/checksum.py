"""One number for the bits of a tensor, so that ranks can compare tensors without sending them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["checksum"]

_CHUNK = 1 << 20  # elements; so that no temporary is larger than some megabytes
_WORD = 8  # bytes that are taken as one integer
_SPREAD = (-7046029254386353131, -4658895280553007687)  # odd 64-bit numbers with well mixed bits
_MODULUS = 1 << 64


def checksum(tensor: torch.Tensor) -> int:
    """A number that two tensors share if they have the same bits in the same order (64 bits, not cryptographic).

    Neither the type nor the shape counts, only the elements in row-major order, wherever they lie in memory. It is
    computed on the tensor's device, piece by piece, and is the same number on every kind of device.

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
    if tensor.layout is torch.strided or tensor.is_meta:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor.to_dense()


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of all elements, in their order, as 64-bit integers; the last one is filled up with zeros."""
    rest = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    for piece in _pieces(tensor):
        own = torch.empty(piece.numel(), dtype=piece.dtype, device=piece.device)
        own.view(piece.shape).copy_(piece)  # resolves strides, conjugation and negation
        joined = torch.cat([rest, own.view(torch.uint8)])
        whole = joined.numel() // _WORD * _WORD
        yield joined[:whole].view(torch.int64)
        rest = joined[whole:]
    if rest.numel():
        yield torch.cat([rest, rest.new_zeros(_WORD - rest.numel())]).view(torch.int64)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in row-major order, cut so that a copy of a piece is small."""
    if tensor.numel() <= _CHUNK:
        if tensor.numel():
            yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK)
    else:
        rows = _CHUNK // (tensor.numel() // tensor.shape[0])
        for part in tensor.split(max(rows, 1)):
            yield from _pieces(part if rows else part[0])
