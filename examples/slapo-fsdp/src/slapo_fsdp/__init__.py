"""The dialect ``fsdp``: torch's ``fully_shard`` over mesh_dim ``dp``, one group for each repeated block."""

import slapo_core as slapo
from slapo_runtime.options import Options
from slapo_runtime.planning import ScheduleFacts
from slapo_torch.fully_shard import has_forward, repeated_blocks, shared_names, tie

NAMES = ("wrap", "reshard_after_forward")


class FullyShard(slapo.Dialect):
    """Replicas that hold shards of parameters, gradients and optimizer state, beside the schedule's ``tp``.

    Options:

    - ``wrap``: a path or glob, or a list of them: the modules whose parameters are gathered and released together.
      Default: the elements of each ModuleList or Sequential whose children are of one class. ``[]``: none. All other
      parameters, and those that such a module shares with others, are the root's group.
    - ``reshard_after_forward``: whether the parameters of a group are released after its forward, and gathered again
      for its backward (default True).
    """

    name, supports, accumulates = "fsdp", frozenset({"dp", "tp"}), True

    def check(self, schedule):
        facts = ScheduleFacts.of(schedule, {})
        if facts.dp == 1:
            return
        if len(facts.trained_dtypes) > 1:
            given = ", ".join(sorted(facts.trained_dtypes))
            yield slapo.Violation(f"fully_shard trains parameters of one dtype (got {given})", "model.float()")
        for name, parameter in schedule.model.named_parameters():
            if not parameter.dim() or not parameter.is_contiguous():
                what = "a scalar" if not parameter.dim() else "not contiguous"
                yield slapo.Violation(f"'{name}' is {what}: fully_shard does not shard it", 'target="torch"')
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                hint = 'target="torch", or register them on the parameters of engine.module'
                yield slapo.Violation(f"'{name}' has gradient hooks: fully_shard replaces the parameter", hint)

    def plan(self, schedule, config):
        given = {name: value for name, value in config.items() if name != "origins"}
        options, facts = Options(given, origins=config.get("origins")), ScheduleFacts.of(schedule, {})
        options.refuse_unknown("", list(options.values), NAMES, "it")
        shared, repeated = shared_names(schedule.model), repeated_blocks(schedule.model)
        if options.get("wrap") is not None:
            options.values["wrap"] = self._selected(schedule, options, shared)
        else:
            blocks = [path for path in repeated if tie(shared, path) is None]
            options.fill("wrap", blocks, "the repeated blocks")
            if facts.dp > 1 and not repeated:
                hint = 'wrap="encoder.layer.*", or wrap=[] for one group of all parameters'
                options.refuse("wrap", "is missing, and no ModuleList or Sequential repeats a block", hint)
        reshards = options.default("reshard_after_forward", True, "the default of fully_shard")
        if type(reshards) is not bool:
            options.refuse("reshard_after_forward", f"must be a bool (got {reshards!r})")
        options.check("target 'fsdp'")
        left = [path for path in repeated if "wrap" in options.origins and tie(shared, path)]
        steps = tuple(self._steps(facts, options, {path: tie(shared, path) for path in left}))
        return slapo.Plan(self.name, steps, {**options.values, "origins": options.origins}, notes=("origins",))

    def build(self, plan, context):
        from slapo_fsdp.engine import FSDPEngine  # with torch.distributed.fsdp

        return FSDPEngine(plan, context)

    def _selected(self, schedule, options, shared):
        """The paths that option ``wrap`` selects, in the model's order; problems are noted."""
        given, found = options.get("wrap"), set()
        for pattern in given if isinstance(given, (list, tuple)) else [given]:
            try:
                selected = schedule[pattern]
            except slapo.SlapoError as error:
                options.refuse("wrap", f"selects no module: {error.message}", error.hint or "")
                continue
            found.update(node.path for node in ([selected] if isinstance(selected, slapo.Node) else selected))
        paths = [path for path, _ in schedule.model.named_modules() if path and path in found]
        for path in paths:
            if (names := tie(shared, path)) is not None:
                problem = f"selects '{path}', whose parameter '{names[0]}' is '{names[1]}', too, outside of it"
                options.refuse("wrap", problem, f"leave out '{path}': the root's group holds the parameter")
            if not has_forward(schedule.model.get_submodule(path)):
                options.refuse("wrap", f"selects '{path}', which has no forward", f'wrap="{path}.*"')
        return paths

    def _steps(self, facts, options, left):
        if facts.dp == 1:
            yield "mesh_dim 'dp' has one rank: every parameter stays full"
            return
        blocks, over = options.get("wrap"), f"fully_shard over mesh_dim 'dp' ({facts.dp} ranks)"
        if blocks:
            shown = ", ".join(blocks[:2]) + (f", ... {blocks[-1]}" if len(blocks) > 2 else "")
            twice = ", and again for its backward" if options.get("reshard_after_forward") else ""
            yield f"{over}: {shown} ({len(blocks)} groups), each gathered for its forward{twice}"
        yield f"{over}: all other parameters, one group"
        for path, (own, other) in left.items():
            yield f"'{path}' is in that group: its parameter '{own}' is '{other}', too"
        if facts.split:
            yield f"{len(facts.split)} parameters that the schedule splits over 'tp': each of its ranks shards its own"
        yield "gradients are averaged over 'dp' as they are reduced, with the last micro-batch of a step"


def slapo_cases():
    from slapo_fsdp.cases import cases

    return cases()
