"""Complete the sizes of groups by the mesh, and those of the pipeline by the steps."""

from __future__ import annotations

from typing import Any

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft

_CONFIG = "model_parallel_config"
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_tensor_parallel_size": "tp",
}
_VIRTUAL = "virtual_pipeline_model_parallel_size"


def fill_sizes(draft: Draft) -> None:
    """
    Raises:
        BuildError: a size is another one than that of the mesh, or of the stages.
    """
    facts = draft.facts
    for name, mesh_dim in _SIZES.items():
        size, given = facts.sizes[mesh_dim], draft.get(_CONFIG, name)
        if draft.given(_CONFIG, name) and given is not None and given != size:
            raise BuildError(
                f"{draft.place(_CONFIG, name)} is {given}, but '{mesh_dim}' of the mesh {facts.mesh} is {size}",
                hint="leave it out: the mesh says it",
            )
        if given != size or not draft.given(_CONFIG, name):
            draft.fill(_CONFIG, name, size, f"'{mesh_dim}' of the mesh")
    check_virtual(draft.options[_CONFIG], facts.per_rank if facts.sizes["pp"] > 1 else 1)
    if facts.per_rank is not None and facts.per_rank > 1 and draft.get(_CONFIG, _VIRTUAL) is None:
        draft.fill(_CONFIG, _VIRTUAL, facts.per_rank, f"{facts.stages} stages on {facts.sizes['pp']} ranks along 'pp'")


def check_virtual(config: dict[str, Any], per_rank: int | None) -> None:
    """
    Args:
        config: ``model_parallel_config``.
        per_rank: stages on each rank along ``pp``; None where it is not known.

    Raises:
        BuildError: the number of virtual stages is another one.
    """
    given = config.get(_VIRTUAL)
    if given is not None and per_rank is not None and given != per_rank:
        one = "one stage" if per_rank == 1 else f"{per_rank} stages"
        raise BuildError(
            f"'{_VIRTUAL}' of {_CONFIG} is {given}, but the schedule makes {one} for each rank along 'pp'",
            hint="leave it out: the number of pipeline_split() steps says it",
        )


def check_sequence_parallel(draft: Draft) -> None:
    """
    Raises:
        BuildError: there is nothing whose gradients Megatron would sum.
    """
    if draft.options[_CONFIG].get("sequence_parallel") and not draft.facts.cuts_sequences:
        raise BuildError(
            f"{draft.place(_CONFIG, 'sequence_parallel')} is True, but no step of the schedule scatters activations "
            "over 'tp', and no parameter is marked sequence_parallel",
            hint='.sync("fwd_post", "reduce_scatter", axis=1) behind the layers that are split; .sync_gradient() steps '
            "sum the gradients of modules between them",
        )


def fill_pipeline(draft: Draft) -> None:
    """Communication between stages.

    Raises:
        BuildError: a setting that would do nothing, or make gradients wrong.
    """
    facts = draft.facts
    if facts.sizes["pp"] == 1:
        for name in ("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "microbatch_group_size_per_vp_stage"):
            if draft.options[_CONFIG].get(name):
                raise BuildError(
                    f"{draft.place(_CONFIG, name)} is {draft.get(_CONFIG, name)}, but the mesh {facts.mesh} has one "
                    "rank along 'pp'",
                    hint="leave it out",
                )
        return
    if not draft.given(_CONFIG, "batch_p2p_comm"):
        if draft.get(_CONFIG, "overlap_p2p_comm"):
            draft.fill(_CONFIG, "batch_p2p_comm", False, "with overlap_p2p_comm")
        elif facts.per_rank != 1:
            why = "with several stages a rank, Megatron's gradients are wrong otherwise on two ranks"
            draft.fill(_CONFIG, "batch_p2p_comm", False, why)
    check_interleaving(draft.options[_CONFIG], facts.per_rank, facts.sizes["pp"])


def check_interleaving(config: dict[str, Any], per_rank: int | None, pp: int) -> None:
    """
    Args:
        config: ``model_parallel_config``.
        per_rank: stages on each rank along ``pp``; None where it is not known.
        pp: the number of these ranks.

    Raises:
        BuildError: a setting that Megatron's schedule for this number of stages does not run, or runs wrongly.
    """
    if per_rank is None:
        return
    if per_rank == 1:
        for name in ("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "microbatch_group_size_per_vp_stage"):
            if config.get(name):
                raise BuildError(
                    f"'{name}' of {_CONFIG} is {config[name]}, which Megatron has for several stages a rank only; the "
                    "schedule makes one",
                    hint="leave it out, or cut the model into more stages",
                )
    elif config.get("batch_p2p_comm", True) and pp == 2:
        raise BuildError(
            f"'batch_p2p_comm' of {_CONFIG} is True with {per_rank} stages on each of two ranks along 'pp': Megatron "
            "confuses their P2P messages, and gradients are wrong",
            hint=f'{_CONFIG}={{"batch_p2p_comm": False}}, the value filled in by default',
        )


def fill_microbatches(draft: Draft, given: Any) -> int:
    """Complete the number of micro-batches.

    Args:
        draft: of the options.
        given: the option ``microbatches``; None where there is none.

    Raises:
        BuildError: it is not positive, ``accumulate`` differs, or Megatron's schedule does not run it.
    """
    facts = draft.facts
    pp = facts.sizes["pp"]
    if given is not None and (type(given) is not int or given < 1):
        raise BuildError(f"microbatches must be a positive number (got {given!r})", hint=f"microbatches={max(2, pp)}")
    if given is not None and facts.accumulate is not None and given != facts.accumulate:
        raise BuildError(
            f"microbatches is {given}, but build(accumulate={facts.accumulate})",
            hint="say it once: they are the same number",
        )
    if given is None:
        given = facts.accumulate
        why = f"accumulate={given}"
        if given is None and pp > 1:
            given, why = pp, f"one for each of {pp} ranks of the pipeline"
        elif given is None:
            given, why = 1, "nothing is accumulated"
        draft.origins["microbatches"] = why
    check_microbatches(draft.options[_CONFIG], given, facts.per_rank, pp)
    return int(given)


def check_microbatches(config: dict[str, Any], count: int, per_rank: int | None, pp: int) -> None:
    """
    Args:
        config: ``model_parallel_config``.
        count: of micro-batches.
        per_rank: stages on each rank along ``pp``; None where it is not known.
        pp: the number of these ranks.

    Raises:
        BuildError: Megatron's interleaved schedule does not run this number.
    """
    if per_rank is None or per_rank == 1 or pp == 1:
        return
    group = config.get("microbatch_group_size_per_vp_stage") or pp
    if group < pp:
        raise BuildError(
            f"'microbatch_group_size_per_vp_stage' of {_CONFIG} is {group}, but must not be smaller than the {pp} "
            "ranks along 'pp'",
            hint=f"leave it out for {pp}",
        )
    rest = count % group
    if count < group or 0 < rest < pp:
        fitting = max(1, round(count / group)) * group
        raise BuildError(
            f"microbatches={count} cannot be run with {per_rank} stages on each of {pp} ranks along 'pp': Megatron "
            f"takes them in groups of {group}, and the last group must not be smaller than {pp}",
            hint=f"microbatches={fitting}",
        )


def check_stages(config: dict[str, Any], count: int, stages: int, pp: int) -> None:
    """Check options that depend on the number of stages.

    Args:
        config: ``model_parallel_config`` of the plan.
        count: of micro-batches.
        stages: of the model.
        pp: the number of ranks along ``pp``.

    Raises:
        BuildError: Megatron's schedule for this number of stages does not run it.
    """
    check_virtual(config, stages // pp)
    check_interleaving(config, stages // pp, pp)
    check_microbatches(config, count, stages // pp, pp)
