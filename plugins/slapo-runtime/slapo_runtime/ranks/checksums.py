"""Checksums of tensors, the same on every device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_CHUNK = 1 << 20  # elements; temporaries are at most some megabytes
_WORD = 8  # bytes of one integer
_SPREAD = (-7046029254386353131, -4658895280553007687)  # odd 64-bit numbers with well mixed bits
_MODULUS = 1 << 64


def checksum(tensor: torch.Tensor) -> int:
    """Compute a 64-bit checksum of a tensor's bits, in order (not cryptographic).

    It depends on the elements in row-major order, not on type, shape or strides. It is computed on the tensor's device,
    block by block, with the same result on every kind of device.

    Args:
        tensor: of any type. Sparse tensors count by indices and values, nested and quantized tensors by their parts,
            meta tensors by their size.
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
    """Sum all words, each mixed with its position, modulo 2**64."""
    mixed = torch.arange(position, position + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_SPREAD[0]).add_(words)
    mixed.bitwise_xor_(mixed >> 32).mul_(_SPREAD[1])
    mixed.bitwise_xor_(mixed >> 29)
    return int(mixed.sum())


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if (parts := parts_of(tensor)) is not None:
        for part in parts:
            yield from _dense_parts(part)
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    else:
        yield tensor if tensor.layout is torch.strided or tensor.is_meta else tensor.to_dense()


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the components of a nested or quantized tensor, else None."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if not hasattr(type(tensor), "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of all elements as 64-bit integers, padded with zeros."""
    rest = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    for block in _blocks(tensor):
        own = torch.empty(block.numel(), dtype=block.dtype, device=block.device)
        own.view(block.shape).copy_(block)  # resolves strides, conjugation and negation
        joined = torch.cat([rest, own.view(torch.uint8)])
        end = joined.numel() // _WORD * _WORD
        yield joined[:end].view(torch.int64)
        rest = joined[end:]
    if rest.numel():
        yield torch.cat([rest, rest.new_zeros(_WORD - rest.numel())]).view(torch.int64)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield small blocks of a tensor, in row-major order."""
    if tensor.numel() <= _CHUNK:
        if tensor.numel():
            yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_CHUNK)
    else:
        rows = _CHUNK // (tensor.numel() // tensor.shape[0])
        for part in tensor.split(max(rows, 1)):
            yield from _blocks(part if rows else part[0])
