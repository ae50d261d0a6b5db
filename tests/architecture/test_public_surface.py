"""The public names are frozen: a name that comes or goes is a decision, written here."""

from __future__ import annotations

import inspect

from torch import nn

import slapo_core
from slapo_core import errors

FUNCTIONS_AND_CLASSES = {
    "BuildContext",
    "Change",
    "Command",
    "Compiler",
    "DeviceSpec",
    "Dialect",
    "Edit",
    "Effect",
    "Engine",
    "Equivalence",
    "Fact",
    "Layout",
    "Link",
    "Match",
    "Mesh",
    "Node",
    "Observation",
    "Pattern",
    "Plan",
    "Primitive",
    "Problem",
    "Record",
    "Sampler",
    "Schedule",
    "StepResult",
    "Suggestion",
    "Tracer",
    "Trial",
    "Violation",
    "auto_schedule",
    "build",
    "clip_grad_norm_",
    "create_schedule",
    "estimate",
    "estimate_functions",
    "fit",
    "fully_shard",
    "hookimpl",
    "load_optimizer_state_dict",
    "load_state_dict",
    "observe",
    "optimizer_state_dict",
    "parameter_groups",
    "register_primitive",
    "replay",
    "save_pretrained",
    "stages",
    "state_dict",
    "verify",
}

MODULES = {"effects", "patterns"}

SCHEDULE = {
    "apply",
    "document",
    "example_inputs",
    "explain",
    "is_sealed",
    "is_verified",
    "mesh",
    "model",
    "records",
    "reference",
    "rewound",
    "root",
    "seal",
    "to_json",
    "undo",
}

ERRORS = {
    "ApplyError",
    "ArgumentError",
    "BuildError",
    "EstimateError",
    "FitError",
    "GuardError",
    "HookError",
    "InputError",
    "LaunchError",
    "MeshError",
    "OptimizerError",
    "PathError",
    "PluginError",
    "PostconditionError",
    "PreconditionError",
    "RankFailedError",
    "RankMismatchError",
    "ReceiptError",
    "ReplicaError",
    "ReplayError",
    "SealedError",
    "SerializationError",
    "SlapoError",
    "StaleError",
    "TraceError",
    "UndoError",
    "UnknownNameError",
    "UnusablePluginError",
    "VerifyError",
    "WeightsError",
}


def test_public_names_are_these_and_no_others() -> None:
    assert set(slapo_core.__all__) == FUNCTIONS_AND_CLASSES | MODULES | ERRORS


def test_every_public_name_leads_somewhere() -> None:
    for name in slapo_core.__all__:
        assert getattr(slapo_core, name) is not None
    assert set(slapo_core.__all__) <= set(dir(slapo_core))


def test_every_error_is_public_and_says_when_and_what_to_do() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == set(errors.__all__) == ERRORS
    for name in sorted(ERRORS):
        text = vars(getattr(errors, name)).get("__doc__") or ""
        assert "What to do: " in text, f"{name}: the docstring must say what to do"


def test_a_schedule_has_few_members() -> None:
    sch = slapo_core.create_schedule(nn.Linear(2, 2))
    own = {name for name in (*dir(slapo_core.Schedule), *vars(sch)) if not name.startswith("_")}
    assert own == SCHEDULE
    assert len(own) <= 15
