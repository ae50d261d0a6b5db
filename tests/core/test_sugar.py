"""Promise: ``node.name(...)`` is ``node.apply(Name(...))``, completes in a REPL, and misspellings are explained."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ArgumentError, UnknownNameError
from slapo_core.plugins.registry import Registry
from slapo_core.primitives.annotate import Annotate
from slapo_core.primitives.checkpoint import Checkpoint
from slapo_testing.fixtures import isolated_registry  # noqa: F401 - a fixture
from slapo_testing.models import MLP
from tests.messages import Messages
from tests.support.edits import HookAll


def _error(call: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_method_is_apply_with_the_value() -> None:
    one, other = slapo.create_schedule(MLP()), slapo.create_schedule(MLP())
    assert one["head"].annotate("weight", "k", value=[1]) is one["head"]
    other["head"].apply(Annotate("weight", "k", (1,)))
    one["layers.*"].core.checkpoint()
    other["layers.*"].apply(Checkpoint())
    one.checkpoint(preserve_rng_state=False)
    other.apply(Checkpoint(preserve_rng_state=False))
    assert one.records == other.records


@pytest.mark.parametrize("path", ["head", "layers.*", ""])
def test_names_complete_and_document_themselves(path: str) -> None:
    sch = slapo.create_schedule(MLP())
    target = sch[path] if path else sch
    assert {"checkpoint", "replace", "annotate", "core", "apply"} <= set(dir(target))
    assert {"checkpoint", "replace", "annotate"} <= set(dir(target.core))
    assert str(inspect.signature(target.annotate)).startswith("(param: 'str', key: 'str', value: 'Any')")
    call = "checkpoint(match: Any = None, preserve_rng_state: bool = True)"
    assert target.checkpoint.__doc__ == f"{call}\n\n{inspect.getdoc(Checkpoint)}"
    assert target.checkpoint.__name__.endswith("checkpoint")
    where = path or ""
    assert repr(target.checkpoint) == f"<primitive core.checkpoint at '{where}'>"
    assert repr(target.core) == "<primitives of namespace 'core'>"
    assert sch.records == ()


def test_wrong_arguments_show_the_signature(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    signature = "annotate(param: str, key: str, value: Any)"
    message(_error(lambda: sch["head"].annotate("weight"), ArgumentError), "'head'", "'key'", signature)
    message(_error(lambda: sch["layers.*"].annotate(1, 2, 3, 4), ArgumentError), "'layers.*'", "too many", signature)
    text = _error(lambda: sch.checkpoint(rng=True), ArgumentError)
    message(text, "the root", "'rng'", "checkpoint(match: Any = None, preserve_rng_state: bool = True)")
    message(_error(lambda: sch["head"].annotate(1, "k", 2), ArgumentError), "'param'", "got 1")
    assert sch.records == ()


def test_unknown_name_is_an_attribute_error_with_close_matches() -> None:
    sch = slapo.create_schedule(MLP())
    for target in (sch, sch["head"], sch["layers.*"]):
        text = _error(lambda target=target: target.checkpont, UnknownNameError)
        assert "primitive 'checkpont'" in text
        assert "did you mean 'checkpoint'" in text
        assert not hasattr(target, "checkpont")
        assert getattr(target, "checkpont", None) is None
        assert not hasattr(target, "_private")
    assert issubclass(UnknownNameError, AttributeError)
    assert "core.checkpont" in _error(lambda: sch["head"].core.checkpont, UnknownNameError)


@pytest.mark.usefixtures("isolated_registry")
def test_primitive_registered_in_process_is_there_at_once() -> None:
    sch = slapo.create_schedule(MLP())
    assert not hasattr(sch["head"], "hook_all")
    slapo.register_primitive()(HookAll)
    sch["head"].hook_all(prepend=True)
    sch["head"].test.hook_all()
    assert [str(record.primitive) for record in sch.records] == ["hook_all(True)", "hook_all()"]
    assert sch.records[0].distribution == "tests"
    assert sch.records[0].version == "local"
    assert slapo.replay(MLP(), sch.to_json()).records == sch.records


def test_registry_of_one_test_does_not_leak_into_another() -> None:
    assert not hasattr(slapo.create_schedule(MLP())["head"], "hook_all")
    assert isinstance(slapo.create_schedule(MLP())._core.registry, Registry)


@pytest.mark.parametrize(
    ("name", "arguments", "call"),
    [
        ("replace", {"new_mod": nn.ReLU()}, "replace(new_module=ReLU())"),
        ("checkpoint", {"subgraph": "gelu"}, "checkpoint(match='gelu')"),
        ("annotate", {"parm": "weight", "key": "k", "value": 1}, "annotate(param='weight', key='k', value=1)"),
        ("annotate", {"parm": 3, "key": "k", "value": 1}, "annotate(param=3, key='k', value=1), where core.annotate"),
        ("shard", {"names": "weight", "dim": 0}, "shard(names='weight', axis=0)"),
        ("shard", {"param_name": "weight", "axis": 0}, "shard(names='weight', axis=0)"),
        ("sync", {"type": "forward"}, "sync(mode='forward')"),
        ("sync", {"mode": "fwd_post", "sync_op_or_fn": "all_reduce"}, "sync(mode='fwd_post', op='all_reduce')"),
        ("annotate", {"parm": "weight"}, "annotate(param: str, key: str, value: Any)"),
        ("annotate", {"q": 1, "param": "weight", "key": "k"}, "annotate(param: str, key: str, value: Any)"),
    ],
)
def test_a_keyword_of_another_name_is_answered_with_the_corrected_call(
    name: str, arguments: dict[str, Any], call: str
) -> None:
    sch = slapo.create_schedule(MLP(), mesh={"tp": 1})
    with pytest.raises(ArgumentError, match="got an unexpected keyword argument") as caught:
        getattr(sch["head"], name)(**arguments)
    assert str(caught.value.hint).startswith(call)
    assert sch.records == ()


def test_a_function_of_slapo_is_not_looked_for_among_the_primitives() -> None:
    sch = slapo.create_schedule(MLP())
    for target in (sch, sch["head"], sch["layers.*"]):
        with pytest.raises(UnknownNameError) as caught:
            target.verify()
        assert caught.value.hint == "it is a function: slapo.verify(sch, ...)"
