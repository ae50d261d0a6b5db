"""Receipts: what ``slapo observe --json`` wrote, attached to the steps of a schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError
from slapo_view.memory import together

if TYPE_CHECKING:
    from slapo_core import Schedule

_FINDING = {"source": str, "expected": str, "seen": str, "is_seen": bool, "cause": str}
_COLLECTIVE = {"module": str, "record": str, "kind": str, "mesh_dim": str, "phase": str, "dtype": str, "bytes": int}
_HINT = "slapo observe ... --json > receipt.json"


class Receipt:
    """The findings of an observation, by step.

    Args:
        data: of ``observation.to_json()``; or the path of a file that holds it.
        schedule: that was observed.

    Attributes:
        steps: number of observed training steps.
        by_step: ``str(record)`` -> its findings.
        others: findings of the runtime, and of what no step explains.
        collectives: of the first rank, as :func:`~slapo_view.memory.together` gives them.

    Raises:
        ArgumentError: not a receipt, or one of another schedule or mesh.
    """

    def __init__(self, data: Any, schedule: Schedule) -> None:
        if isinstance(data, str | Path):
            data = _read(Path(data))
        if hasattr(data, "to_json"):
            data = data.to_json()
        findings, ranks = _checked(data)
        sizes = dict(schedule.mesh.sizes) if schedule.mesh is not None else {}
        if _larger(data["mesh"]) != _larger(sizes):
            raise ArgumentError(
                f"the receipt is of another mesh (receipt: {data['mesh']}, schedule: {sizes})", hint=_HINT
            )
        known = {str(record) for record in schedule.records}
        self.steps: int = data["steps"]
        self.by_step: dict[str, list[dict[str, Any]]] = {}
        self.others: list[dict[str, Any]] = []
        for one in findings:
            if one["source"].startswith("#") and one["source"] not in known:
                raise ArgumentError(
                    f"the receipt is of another schedule: it has the step {one['source']}, which the schedule has not",
                    hint=_HINT,
                )
            into = self.by_step.setdefault(one["source"], []) if one["source"] in known else self.others
            into.append(one)
        self.seen, self.all = sum(one["is_seen"] for one in findings), len(findings)
        self.collectives = together((call, call["count"]) for call in ranks[0]["collectives"])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the receipt {path} cannot be read: {error}", hint=_HINT) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ArgumentError(f"{path} is not JSON: {error}", hint=_HINT) from error


def _checked(data: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the findings and the ranks of a document."""
    try:
        findings, ranks = data["findings"], data["ranks"]
        is_valid = (
            type(data["steps"]) is int
            and data["steps"] > 0
            and all(type(size) is int for size in data["mesh"].values())
            and all(_has(one, _FINDING) for one in findings)
            and len(ranks) > 0
            and all(_has(call, {**_COLLECTIVE, "count": int}) for call in ranks[0]["collectives"])
        )
    except (AttributeError, IndexError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise ArgumentError(
            "not a receipt: it lacks findings, mesh, ranks or steps as `observe` writes them", hint=_HINT
        )
    return findings, ranks


def _has(value: Mapping[str, Any], types: Mapping[str, type]) -> bool:
    return all(type(value[name]) is kind for name, kind in types.items())


def _larger(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > 1}
