"""What each block costs, and what comes before and after: in parameters, in floating-point operations, or in time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from slapo_pipeline.balance.sections import Call, Section, Sections, run_in_sections

__all__ = ["Costs", "flops", "parameters_as_registered", "parameters_in_use"]

Share = Mapping[Hashable, float]


@dataclass(frozen=True)
class Costs:
    """Each part's cost by what it is of; what has the same key counts once in a stage.

    Attributes:
        before: goes to the stage of the first block.
        blocks: in their order.
        after: goes to the stage of the last block.
    """

    before: Share
    blocks: tuple[Share, ...]
    after: Share


def flops(sections: Sections) -> Costs:
    """Of the forward; the backward has twice as many, everywhere alike."""
    shares: list[Share] = [{position: section.flops} for position, section in enumerate(_in_order(sections))]
    return _costs(shares)


def parameters_in_use(model: nn.Module, call: Call, blocks: Sequence[str], cuts: Sequence[str] = ()) -> Costs:
    """Elements of the parameters: of a block, its own and those that it uses; elsewhere, those that are used there.

    Those that are not used at all go to the first stage, where their tensors live.
    """
    sections = run_in_sections(model, call, blocks, cuts)
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    of_blocks = [{id(parameter) for parameter in model.get_submodule(path).parameters()} for path in blocks]
    used = [set(section.parameters) for section in _in_order(sections)]
    for position, own in enumerate(of_blocks, start=1):
        used[position] |= own
    if not cuts:  # with others, they are on the first stage of all
        used[0] |= sizes.keys() - set().union(*used)
    shares: list[Share] = [{key: sizes[key] for key in section} for section in used]
    return _costs(shares)


def parameters_as_registered(model: nn.Module, blocks: Sequence[str]) -> Costs:
    """The same by the order of the modules, where it is not known what the model is called with.

    What is registered before the blocks is taken to come before them, and what is registered later to come after.
    """
    shares: list[dict[Hashable, float]] = [{} for _ in range(len(blocks) + 2)]
    position = 0
    places = {path: index for index, path in enumerate(blocks, start=1)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((places[path] for path in _above(name) if path in places), None)
        if inside is not None:
            position = len(shares) - 1
            shares[inside][id(parameter)] = parameter.numel()
        else:
            shares[position][id(parameter)] = parameter.numel()
    return _costs(shares)


def _above(name: str) -> list[str]:
    """Paths of the modules that a parameter lies in, the nearest first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _in_order(sections: Sections) -> tuple[Section, ...]:
    return (sections.before, *sections.blocks, sections.after)


def _costs(shares: Sequence[Share]) -> Costs:
    before, *blocks, after = shares
    return Costs(before, tuple(blocks), after)
