"""A primitive is a value: to JSON and back, and replayed on another instance of the model."""

from __future__ import annotations

import json

from slapo_core.errors import SerializationError
from slapo_core.schedule.creation import replay
from slapo_core.schedule.records import primitive_from_json, primitive_to_json
from slapo_core.spec.primitive import Primitive
from slapo_core.testing.bench import build_model, prepare, registered
from slapo_core.testing.case import Case, made
from slapo_core.testing.check import CheckError

__all__ = ["json_round_trip", "round_trip_value"]


def json_round_trip(case: Case) -> None:
    """The value is the same after JSON, and its schedule replays to the same records."""
    value = case.value()
    if not case.serializable:
        _must_refuse(value)
        return
    with registered(value, *(made(step) for _, step in case.before)):
        bench = prepare(case, mesh_size=2)
        round_trip_value(bench.settled(case.path, value))
        bench.apply()
        again = replay(build_model(case), bench.schedule.to_json(), example_inputs=bench.schedule.example_inputs)
        for saved, replayed in zip(bench.schedule.records, again.records, strict=True):
            if saved != replayed or saved.effects != replayed.effects:
                raise CheckError(
                    "the schedule replays to other records",
                    required=f"{saved!r} with the effects {saved.effects}",
                    got=f"{replayed!r} with the effects {replayed.effects}",
                    hint="let apply depend on the fields and the node only, not on global state or random numbers",
                )


def round_trip_value(value: Primitive) -> None:
    """Hold a value against its copy through JSON.

    Raises:
        CheckError: JSON cannot carry it, or the copy is another value or has another hash.
    """
    try:
        arguments = primitive_to_json(value, where=str(value))
    except SerializationError as error:
        raise CheckError(
            "JSON cannot carry the arguments",
            required="fields that are numbers, strings, booleans, None, tuples or string-keyed dictionaries",
            got=error.message,
            hint="take a name instead of a live object; or say serializable=False in the Case",
        ) from error
    copy = primitive_from_json(type(value), json.loads(json.dumps(arguments)))
    if copy != value:
        raise CheckError(
            "the value made from JSON is another one",
            required=repr(value),
            got=repr(copy),
            hint="let __post_init__ accept what JSON gives back (lists for tuples, strings for keys), and keep eq",
        )
    if _hash_of(copy) != _hash_of(value):
        raise CheckError(
            "the value made from JSON is equal but has another hash",
            required=f"hash {hash(value)}",
            got=f"hash {hash(copy)}",
            hint="do not write __hash__ by hand: @dataclass(frozen=True) derives it from the fields",
        )


def _hash_of(value: Primitive) -> int:
    try:
        return hash(value)
    except TypeError as error:
        raise CheckError(
            "the value cannot be hashed",
            required="every field is hashable, so that a primitive can be a key and be compared across ranks",
            got=f"{error}, in {value!r}",
            hint="turn dictionaries into sorted tuples of pairs in __post_init__",
        ) from error


def _must_refuse(value: Primitive) -> None:
    try:
        arguments = primitive_to_json(value, where=str(value))
    except SerializationError:
        return
    raise CheckError(
        "the case says serializable=False, but JSON can carry the value",
        required="an argument that JSON cannot carry",
        got=json.dumps(arguments),
        hint="remove serializable=False from the Case",
    )
