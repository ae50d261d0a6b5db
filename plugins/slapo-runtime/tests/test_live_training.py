"""Training without `build`: clipping, state dicts and export give what the reference model would."""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_runtime.gradients import GradientClipper
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights import live
from tests.messages import Messages
from tests.support.building import AllReduce, Split, SumOutput, bert, gpt2, llama, real, split

NORMS = (2.0, 1.0, 3.0, math.inf)


class Awkward(nn.Module):
    """Ties, biases, a frozen parameter, one that is not used, and one of another shape than it is used in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 12)
        self.out.weight = self.embed.weight
        self.unused = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.frozen(self.fc2(self.fc1(x).tanh())))
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


def awkward() -> nn.Module:
    torch.manual_seed(0)
    return Awkward().double()


class _Copy(torch.autograd.Function):
    """The same on every rank of ``tp``; in the backward pass, the sum over them."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def scheduled(mesh: dict[str, int]) -> slapo.Schedule:
    """The MLP split as columns and rows; what is frozen and unused too, so that their pieces count as well."""
    sch = slapo.create_schedule(awkward(), mesh=mesh)
    assert sch.mesh is not None
    sch["fc1"].apply(Split(("weight", "bias")))
    sch["fc2"].apply(Split(("weight",), axis=1))
    sch["unused"].apply(Split(("weight", "bias")))
    if sch.mesh.size("tp") > 1:
        group = sch.mesh.group("tp")
        bias = sch.model.fc2.bias  # added once, not on every rank

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.linear(x, sch.model.fc2.weight)
            y = AllReduce.apply(y, group)
            return y + bias

        sch.model.fc2.forward = forward  # type: ignore[method-assign]
        sch.model.fc1.register_forward_pre_hook(lambda module, args: (_Copy.apply(args[0], group),))
    return sch


def token_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(12, (4, 6), generator=generator) for _ in range(3)]


def plain_training(norm_type: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for ids in token_batches():
        optimizer.zero_grad()
        model(ids).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type).item())
        optimizer.step()
    return norms, model.state_dict()


def live_training(mesh: dict[str, int]) -> dict[float, tuple[list[float], dict[str, torch.Tensor], float]]:
    """For each kind of norm: the norms of three steps, the weights, and the norm of what was clipped last."""
    results = {}
    for norm_type in NORMS:
        sch = scheduled(mesh)
        assert sch.mesh is not None
        optimizer = torch.optim.AdamW(sch.model.parameters(), lr=0.01)
        forward: Any = sch.model
        if sch.mesh.size("dp") > 1:
            forward = nn.parallel.DistributedDataParallel(
                sch.model, process_group=sch.mesh.group("dp"), find_unused_parameters=True
            )
        norms = []
        for ids in token_batches():
            optimizer.zero_grad()
            forward(ids.chunk(sch.mesh.size("dp"))[sch.mesh.rank("dp")]).backward()
            norms.append(slapo.clip_grad_norm_(sch, 0.05, norm_type).item())
            after = slapo.clip_grad_norm_(sch, math.inf, norm_type).item()
            optimizer.step()
        results[norm_type] = norms, slapo.state_dict(sch), after
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_three_clipped_steps_equal_the_reference_model(mesh: dict[str, int]) -> None:
    expected = {norm_type: plain_training(norm_type) for norm_type in NORMS}
    for results in run_ranks(live_training, mesh, world_size=math.prod(mesh.values())):
        for norm_type, (norms, state) in expected.items():
            assert all(norm > 0.05 for norm in norms)  # they are clipped
            assert results[norm_type][0] == pytest.approx(norms, rel=1e-12)
            assert results[norm_type][2] == pytest.approx(0.05, rel=1e-4)
            assert list(results[norm_type][1]) == list(state)
            for name, tensor in state.items():
                torch.testing.assert_close(results[norm_type][1][name], tensor, rtol=1e-11, atol=1e-13)


def odd_gradients() -> tuple[list[str], float, list[torch.dtype]]:
    sch = slapo.create_schedule(real("mlp"), mesh={"tp": 2})
    split(sch, "mlp")
    norms = [slapo.clip_grad_norm_(sch, 1.0).item()]  # no gradients at all
    for parameter in sch.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if dist.get_rank() == 1:
        sch.model.fc1.weight.grad[0, 0] = math.inf
    messages = []
    before = sch.model.fc2.weight.grad.clone()
    for call in (
        lambda: slapo.clip_grad_norm_(sch, 1.0, error_if_nonfinite=True),
        lambda: slapo.clip_grad_norm_(sch, -1.0),
        lambda: slapo.clip_grad_norm_(sch, 1.0, 0.0),
        lambda: slapo.clip_grad_norm_(sch.model, 1.0),  # type: ignore[arg-type]
    ):
        with pytest.raises((RuntimeError, slapo.ArgumentError)) as error:
            call()
        messages.append(str(error.value))
    assert torch.equal(before, sch.model.fc2.weight.grad)
    with sch.reference(), pytest.raises(slapo.SealedError, match="rewound to step 0"):
        slapo.clip_grad_norm_(sch, 1.0)
    return messages, norms[0], [slapo.clip_grad_norm_(sch, 1.0, p).dtype for p in (1.0, 2.0, math.inf)]


@pytest.mark.ranks
def test_invalid_clipping_is_refused_on_every_rank(message: Messages) -> None:
    results = run_ranks(odd_gradients, world_size=2)
    for _, norm, dtypes in results:
        assert norm == 0.0
        assert dtypes == [torch.float32] * 3
    words = ("is inf", "got -1.0", "got 0.0", "got Mlp")
    for told, word in zip(zip(*(messages for messages, *_ in results), strict=True), words, strict=True):
        message(*set(told), word)


# -- state dicts and files ------------------------------------------------------------------------------------


def round_trips(directory: str) -> list[str]:
    """State dicts at two and four ranks are the reference model's; loading and export keep them."""
    size = dist.get_world_size()
    wrong = []
    for name in ("gpt2", "bert", "llama"):
        sch = split(slapo.create_schedule(real(name), mesh={"tp": size}), name)
        other = real(name, seed=4).state_dict()
        parameters = list(sch.model.parameters())
        slapo.load_state_dict(sch, other)
        state = slapo.state_dict(sch)
        if list(state) != list(other) or not all(torch.equal(state[key], other[key]) for key in other):
            wrong.append(f"{name}: state dict")
        if not all(a is b for a, b in zip(parameters, sch.model.parameters(), strict=True)):
            wrong.append(f"{name}: other parameter objects")
        slapo.save_pretrained(sch, f"{directory}/{name}-{size}")
        slapo.save_pretrained(sch, f"{directory}/{name}-{size}-files", max_shard_size="20KB")
        if not all(torch.equal(value, slapo.state_dict(sch)[key]) for key, value in state.items()):
            wrong.append(f"{name}: changed by saving")
        if slapo.state_dict(sch, rank0_only=True).keys() != (other.keys() if dist.get_rank() == 0 else set()):
            wrong.append(f"{name}: rank0_only")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.breadth)])
def test_state_dicts_and_exports_equal_the_reference_model(tmp_path: Path, world_size: int) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    assert run_ranks(round_trips, str(tmp_path), world_size=world_size) == [[]] * world_size
    for name, auto in (("gpt2", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM), ("llama", AutoModelForCausalLM)):
        expected = real(name, seed=4)
        for directory in (f"{name}-{world_size}", f"{name}-{world_size}-files"):
            loaded, info = auto.from_pretrained(tmp_path / directory, output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            assert type(loaded) is type(expected)
            assert loaded.config.to_diff_dict().keys() >= {"vocab_size"}
            for key, tensor in expected.state_dict().items():
                assert torch.equal(loaded.state_dict()[key], tensor), key
        assert (tmp_path / f"{name}-{world_size}-files" / "model.safetensors.index.json").is_file()


def export_plain(directory: str) -> None:
    sch = scheduled({"tp": dist.get_world_size()})
    slapo.load_state_dict(sch, {key: value + 1 for key, value in awkward().state_dict().items()})
    slapo.save_pretrained(sch, f"{directory}/files", max_shard_size=1500)
    slapo.save_pretrained(sch, f"{directory}/one", max_shard_size=1500)
    slapo.save_pretrained(sch, f"{directory}/one")
    with pytest.raises((slapo.ArgumentError, slapo.BuildError)) as error:
        slapo.save_pretrained(sch, f"{directory}/none", max_shard_size="much")
    assert "(got 'much')" in str(error.value)


@pytest.mark.ranks
def test_a_plain_module_is_exported_as_safetensors_that_every_way_of_loading_reads(tmp_path: Path) -> None:
    run_ranks(export_plain, str(tmp_path), world_size=2)
    assert sorted(file.name for file in (tmp_path / "one").iterdir()) == ["model.safetensors"]
    index = json.loads((tmp_path / "files" / "model.safetensors.index.json").read_text())
    expected = awkward().state_dict()
    assert set(index["weight_map"]) == set(expected)
    assert all((tmp_path / "files" / file).stat().st_size < 4000 for file in index["weight_map"].values())
    for directory in ("one", "files"):
        engine = slapo.build(slapo.create_schedule(awkward()), weights=tmp_path / directory)
        for key, tensor in engine.state_dict().items():
            assert torch.equal(tensor, expected[key] + 1)


def test_live_functions_work_without_a_mesh_and_refuse_built_models(message: Messages) -> None:
    sch = slapo.create_schedule(real("mlp"))
    sch["fc1"].checkpoint()
    assert list(slapo.state_dict(sch)) == ["fc1.weight", "fc1.bias", "fc2.weight"]
    with pytest.raises(slapo.WeightsError, match=r"missing: fc1\.weight"):
        slapo.load_state_dict(sch, {})
    sch.seal()
    assert list(slapo.state_dict(sch)) == ["fc1.weight", "fc1.bias", "fc2.weight"]
    built = slapo.create_schedule(real("mlp"))
    slapo.build(built)
    with pytest.raises(slapo.SealedError) as error:
        slapo.state_dict(built)
    message(error, "cannot call state_dict", "engine.state_dict()")


def test_cached_live_state_is_dropped_after_a_step_or_undo() -> None:
    sch = slapo.create_schedule(real("mlp"), mesh={"tp": 1})
    before = slapo.state_dict(sch)
    sch["fc1"].apply(Split(("weight", "bias")))
    sch["fc2"].apply(SumOutput())
    assert all(torch.equal(value, before[key]) for key, value in slapo.state_dict(sch).items())
    sch.undo(to=0)
    assert all(torch.equal(value, before[key]) for key, value in slapo.state_dict(sch).items())


# -- torch's own ----------------------------------------------------------------------------------------------


def dry(name: str = "mlp") -> slapo.Schedule:
    return split(slapo.create_schedule(real(name), mesh={"tp": 2}), name)


def test_torch_s_own_state_dict_of_a_split_model_warns_once(message: Messages) -> None:
    model = dry().model
    with pytest.warns(UserWarning, match="reference model") as caught:
        pieces = model.state_dict()
    assert len(caught) == 1
    message(caught[0].message, "3 tensors, e.g. 'fc1.weight', here (4, 6) of (8, 6)", "slapo.state_dict(sch)")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(pieces)  # its own pieces are right
        model.state_dict()


def test_loading_full_weights_into_shards_names_the_call(message: Messages) -> None:
    model = dry().model
    told = set()
    for strict in (True, False):
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(real("mlp").state_dict(), strict=strict)
        told.update(line.strip() for line in str(error.value).splitlines() if "slapo.load_state_dict" in line)
    message(*told, "3 tensors, e.g. 'fc1.weight', here (4, 6) of (8, 6)", "slapo.load_state_dict(sch, state)")


def test_save_pretrained_and_copies_of_sharded_models_warn(tmp_path: Path) -> None:
    import copy
    import pickle

    with pytest.warns(UserWarning, match="this rank's shards"):
        dry("bert").model.save_pretrained(tmp_path)
    for copied in (copy.deepcopy(dry().model), pickle.loads(pickle.dumps(dry().model))):
        with pytest.warns(UserWarning, match="'fc1.weight', here"):
            copied.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sch = dry()
        slapo.state_dict(slapo.create_schedule(real("mlp")))
        with sch.reference() as model:
            model.state_dict()
            copy.deepcopy(model).state_dict()
        sch.undo(to=0)
        sch.model.state_dict()
        split(slapo.create_schedule(real("mlp"), mesh={"tp": 1}), "mlp").model.state_dict()
        assert not sch.model._state_dict_pre_hooks
        for make in (bert, gpt2, llama):
            assert make().state_dict()


# -- changes outside of the schedule ------------------------------------------------------------------------------


def _replaced(model: Any) -> str:
    model.fc2 = nn.Linear(8, 4, bias=False)
    return "fc2"


def _added(model: Any) -> str:
    model.fc1.adapter = nn.Linear(2, 2)
    return "fc1.adapter"


def _resized(model: Any) -> str:
    model.fc2.weight.data = torch.zeros(6, 8)
    return "fc2"


def _emptied(model: Any) -> str:
    model.fc2 = nn.Identity()
    return "fc2"


@pytest.mark.parametrize("change", [_replaced, _added, _resized, _emptied])
def test_a_change_outside_of_the_schedule_is_refused_wherever_values_leave(change: Any, tmp_path: Path) -> None:
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 4)}
    sch = slapo.create_schedule(real("mlp"), example_inputs=batch)
    sch["fc1"].checkpoint()
    slapo.state_dict(sch)  # what is looked up there is kept
    path = change(sch.model)
    for call in (
        lambda: slapo.state_dict(sch),
        lambda: slapo.save_pretrained(sch, tmp_path),
        lambda: slapo.verify(sch, batch),
        lambda: slapo.build(sch),
    ):
        with pytest.raises(slapo.WeightsError, match="outside of the schedule") as refused:
            call()
        assert refused.value.path == path
        assert "create_schedule(model)" in str(refused.value.hint)
    assert not list(tmp_path.iterdir())

    sch = slapo.create_schedule(real("mlp"))
    change(sch.model)  # before the first step: it is the reference model's
    sch["fc1"].checkpoint()
    assert list(slapo.state_dict(sch)) == list(sch.model.state_dict())
    engine = slapo.build(sch, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    sch.model.fc1 = nn.Linear(6, 8)
    for leave in (engine.state_dict, lambda: engine.save(tmp_path)):
        with pytest.raises(slapo.WeightsError, match="'fc1'"):
            leave()


def test_parameter_registered_outside_of_the_schedule_is_refused(message: Messages) -> None:
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 4)}
    sch = slapo.create_schedule(real("mlp"), example_inputs=batch)
    sch["fc1"].checkpoint()
    sch.model.fc1.register_parameter("prompt", nn.Parameter(torch.ones(3)))
    with pytest.raises(slapo.WeightsError) as refused:
        slapo.state_dict(sch)
    message(refused, "'fc1.prompt' (3,) was added to the model outside of the schedule", "create_schedule(model)")
    with pytest.raises(slapo.VerifyError, match=r"'fc1.prompt' .* outside of the schedule"):
        slapo.verify(sch, batch)


def test_wrappers_hooks_and_modes_are_no_change_of_the_model() -> None:
    sch = slapo.create_schedule(real("mlp"))
    sch["fc1"].checkpoint()
    expected = slapo.state_dict(sch)
    model: Any = sch.model
    copy.deepcopy(model)
    model.fc2 = torch.compile(model.fc2)
    model.fc1.register_forward_hook(lambda *_: None)
    model.eval().train()
    model.note = nn.Dropout()  # without tensors, and nothing was there
    state = slapo.state_dict(sch)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def first_forward_of_a_changed_model() -> tuple[str, str | None]:
    sch = split(slapo.create_schedule(real("mlp"), mesh={"tp": 2}), "mlp")
    path = _replaced(sch.model)
    try:
        sch.model(torch.ones(4, 6), torch.ones(4, 4))
    except slapo.WeightsError as error:
        return str(error), error.path
    return path, None


@pytest.mark.ranks
def test_the_first_training_forward_of_a_changed_model_is_refused(message: Messages) -> None:
    answers = run_ranks(first_forward_of_a_changed_model, world_size=2)
    assert [path for _, path in answers] == ["fc2", "fc2"]
    message(answers[0][0], "outside of the schedule", "replace")


# -- what the first training forward compares over tp -------------------------------------------------------------


def first_forward_of_ranks_that_differ() -> dict[str, Any]:
    ids, answers = token_batches()[0], {}
    sch = scheduled({"tp": 2})
    with torch.no_grad():
        sch.model.norm.weight.add_(dist.get_rank())  # as ranks do that make the model with seeds of their own
    try:
        sch.model(ids)
    except slapo.RankMismatchError as error:
        answers["values"] = str(error)
    sch = scheduled({"tp": 2})
    torch.manual_seed(100 + dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sch.model(ids)
    answers["warned"] = [str(one.message) for one in caught if "RNG state" in str(one.message)]
    answers["state"] = bytes(torch.get_rng_state().tolist())
    return answers


@pytest.mark.ranks
def test_values_and_random_states_over_tp_are_compared_in_the_first_training_forward(message: Messages) -> None:
    first, second = run_ranks(first_forward_of_ranks_that_differ, world_size=2)
    assert "'norm.weight'" in first["values"]
    assert len(first["warned"]) == 1
    message(first["warned"][0], "torch.manual_seed(seed)")
    assert first["state"] == second["state"]


def random_states_of_an_evaluation() -> tuple[bytes, bytes]:
    sch = scheduled({"tp": 2})
    torch.manual_seed(100 + dist.get_rank())
    before = bytes(torch.get_rng_state().tolist())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sch.model.eval()(token_batches()[0])
    return before, bytes(torch.get_rng_state().tolist())


@pytest.mark.ranks
def test_the_ranks_of_tp_evaluate_with_one_random_state() -> None:
    """As ``generate(do_sample=True)`` needs it."""
    first, second = run_ranks(random_states_of_an_evaluation, world_size=2)
    assert first[0] != second[0]
    assert first[1] == second[1] == first[0]


# -- extra state, sealed schedules, clipping ----------------------------------------------------------------------


class WithExtraState(nn.Linear):
    """As TransformerEngine's modules have one."""

    scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_a_plain_state_dict_with_extra_state_is_loaded() -> None:
    plain = nn.Sequential(WithExtraState(4, 4))
    plain[0].scale = 3.0
    model = nn.Sequential(WithExtraState(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    slapo.load_state_dict(sch, plain.state_dict())
    assert torch.equal(model[0].weight, plain[0].weight)
    assert model[0].scale == 3.0


def test_a_sealed_model_exports_its_weights_and_its_configuration(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    sch = slapo.create_schedule(llama())
    sch["model.layers.0"].checkpoint()
    expected = slapo.state_dict(sch)
    sch.seal()
    slapo.save_pretrained(sch, tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_file_in_the_way_of_an_export_is_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(slapo.BuildError, match="cannot be written"):
        slapo.save_pretrained(slapo.create_schedule(real("mlp")), tmp_path / "file")


def test_clipping_looks_a_model_up_once_and_again_after_its_parameters_were_exchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    class Counted(GradientClipper):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(live, "GradientClipper", Counted)
    model = real("mlp")
    sch = slapo.create_schedule(model)
    sch["fc1"].checkpoint()
    for _ in range(3):
        model(torch.ones(4, 6), torch.ones(4, 4)).backward()
        slapo.clip_grad_norm_(sch, 0.01)
    assert len(made) == 1
    model.load_state_dict(real("mlp").state_dict(), assign=True)
    model(torch.ones(4, 6), torch.ones(4, 4)).backward()
    slapo.clip_grad_norm_(sch, 0.01)
    assert len(made) == 2
    assert nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]) < 0.011
