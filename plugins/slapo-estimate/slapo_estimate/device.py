"""Device specifications: peak rates, memory and links."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from slapo_core.errors import ArgumentError

__all__ = ["DEVICES", "DeviceSpec", "Link"]


@dataclass(frozen=True)
class Link:
    """A link between ranks along a mesh dimension.

    Args:
        bandwidth: bytes per second that one rank sends.
        latency: seconds of an empty message.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class DeviceSpec:
    """The rates of a device, for the roofline of a step's time.

    Args:
        name: e.g. ``"NVIDIA H100 80GB HBM3"``.
        flops: floating-point operations per second in matrix products, by dtype: ``{"bfloat16": 6.5e14}``;
            ``"float32"`` in full precision, ``"tf32"`` rounded to TF32.
        bandwidth: bytes per second between the device and its memory.
        launch: kernel launch overhead, in seconds.
        memory: bytes of the device's memory; None if unknown.
        links: links by mesh dimension; ``"*"`` for all other dimensions.
        type: torch's device type: ``"cuda"`` estimates attention by CUDA's kernels, other types by the CPU's.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    memory: int | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    type: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, for ``json.dump``."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | str | os.PathLike[str]) -> DeviceSpec:
        """Read the result of :meth:`to_json`.

        Args:
            document: plain values, or the path of a JSON file.

        Raises:
            ArgumentError: a key is missing, unknown, or has an invalid value.
        """
        where, data = "the device", cast("Any", document)
        if not isinstance(document, Mapping):
            where = f"'{os.fspath(document)}'"
            try:
                data = json.loads(Path(document).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise ArgumentError(
                    f"{where} is not a device: {error}", hint="slapo device measure --json device.json"
                ) from error
        _keys(where, "", data, {"name", "flops", "bandwidth", "launch"}, {"memory", "links", "type"})
        name, flops, links = data["name"], data["flops"], data.get("links") or {}
        memory, kind = data.get("memory"), data.get("type", "cpu")
        for key, text in (("name", name), ("type", kind)):
            if not isinstance(text, str) or not text:
                _refuse(where, f"'{key}'", "a text", text)
        if not isinstance(flops, Mapping) or not flops:
            _refuse(where, "'flops'", 'an object of numbers by dtype, e.g. {"float32": 1e12}', flops)
        if memory is not None and (type(memory) is not int or memory < 1):
            _refuse(where, "'memory'", "a number of bytes, or null", memory)
        if not isinstance(links, Mapping):
            _refuse(where, "'links'", 'an object by mesh dimension, e.g. {"*": {...}}', links)
        made = {}
        for mesh_dim, link in links.items():
            _keys(where, f"links.{mesh_dim}.", link, {"bandwidth", "latency"}, set())
            bandwidth = _number(where, f"links.{mesh_dim}.bandwidth", link["bandwidth"])
            made[mesh_dim] = Link(bandwidth, _number(where, f"links.{mesh_dim}.latency", link["latency"], zero=True))
        return cls(
            name,
            {dtype: _number(where, f"flops.{dtype}", value) for dtype, value in flops.items()},
            _number(where, "bandwidth", data["bandwidth"]),
            _number(where, "launch", data["launch"], zero=True),
            memory,
            made,
            kind,
        )


DEVICES: Mapping[str, DeviceSpec] = {
    "a100": DeviceSpec(
        "NVIDIA A100 SXM 80GB (data sheet)",
        {
            "float16": 312e12,
            "bfloat16": 312e12,
            "tf32": 156e12,
            "float32": 19.5e12,
            "float64": 9.7e12,
            "int8": 624e12,
        },
        bandwidth=2.039e12,
        launch=5e-6,
        memory=80 * 10**9,
        links={"tp": Link(300e9, 1e-5), "*": Link(25e9, 2e-5)},
        type="cuda",
    ),
    "h100": DeviceSpec(
        "NVIDIA H100 SXM 80GB (data sheet)",
        {
            "float8_e4m3fn": 1978.9e12,
            "float8_e5m2": 1978.9e12,
            "float16": 989.4e12,
            "bfloat16": 989.4e12,
            "tf32": 494.7e12,
            "float32": 66.9e12,
            "float64": 33.5e12,
            "int8": 1978.9e12,
        },
        bandwidth=3.35e12,
        launch=5e-6,
        memory=80 * 10**9,
        links={"tp": Link(450e9, 1e-5), "*": Link(50e9, 2e-5)},
        type="cuda",
    ),
}
"""Devices by their names for ``slapo estimate --device``: peak rates of data sheets, which a step does not reach.

Products are dense; float32 and float64 without tensor cores, as torch multiplies by default. Links along ``tp`` are
NVLink in one direction; other links are one network card a GPU (HDR and NDR InfiniBand, 200 and 400 Gbit/s). Launch
times and latencies are not in data sheets; these are usual values.

Source: NVIDIA A100 Tensor Core GPU data sheet (2021); NVIDIA H100 Tensor Core GPU architecture white paper (2022),
table 2; NVIDIA DGX A100 and DGX H100 data sheets.
"""


def _keys(where: str, above: str, document: Any, needed: set[str], others: set[str]) -> None:
    if not isinstance(document, Mapping):
        _refuse(where, f"'{above.removesuffix('.')}'" if above else "the document", "an object", document)
    for key in sorted(needed - set(document)):
        raise ArgumentError(
            f"{where} has no '{above}{key}'", hint=f"it needs {', '.join(sorted(above + name for name in needed))}"
        )
    for key in document:
        if key not in needed | others:
            raise ArgumentError(
                f"{where} has an unknown key '{above}{key}'",
                hint=f"the keys are {', '.join(sorted(above + name for name in needed | others))}",
            )


def _number(where: str, key: str, value: Any, *, zero: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        _refuse(where, f"'{key}'", "a number of at least 0" if zero else "a positive number", value)
    return float(value)


def _refuse(where: str, key: str, wanted: str, got: Any) -> NoReturn:
    raise ArgumentError(
        f"{key} of {where} must be {wanted} (got {got!r})", hint="`slapo device measure --json FILE` writes a device"
    )
