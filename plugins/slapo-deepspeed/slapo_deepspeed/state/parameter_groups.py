"""Remember an optimizer's parameter groups before DeepSpeed replaces them by flat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError

if TYPE_CHECKING:
    import torch

    from slapo_core.layout import Mesh


@dataclass
class Group:
    """One group of the user's factory.

    Args:
        parameters: the model's own.
        place: among the groups that DeepSpeed keeps; None where it keeps none, as this rank has no parameters of it.
        settings: of a group that DeepSpeed does not keep.
    """

    parameters: tuple[torch.Tensor, ...]
    place: int | None
    settings: dict[str, Any]


class Groups:
    """All of them, in the user's order; made before ``deepspeed.initialize`` by :meth:`of`."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None, *, keeps_first: bool = False) -> Groups | None:
        """Remember the groups of an optimizer that DeepSpeed has not seen yet; None of None.

        Args:
            optimizer: with all parameters, the frozen ones too, which DeepSpeed does not get.
            keeps_first: whether the first group gets a placeholder, on a rank without trained parameters.
        """
        return None if optimizer is None else cls._made(optimizer.param_groups, keeps_first=keeps_first)

    @classmethod
    def one(cls, parameters: Iterable[torch.Tensor]) -> Groups:
        """Make a single group, of DeepSpeed's own optimizer or of a placeholder."""
        return cls._made([{"params": list(parameters)}], keeps_first=True)

    @classmethod
    def _made(cls, groups: Iterable[Mapping[str, Any]], *, keeps_first: bool = False) -> Groups:
        found: list[Group] = []
        place = 0
        for group in groups:
            parameters = tuple(group["params"])
            is_kept = any(one.requires_grad for one in parameters) or (keeps_first and not found)
            settings = {} if is_kept else {key: value for key, value in group.items() if key != "params"}
            found.append(Group(parameters, place if is_kept else None, settings))
            place += is_kept
        return cls(found)

    def __iter__(self) -> Any:
        return iter(self._groups)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose groups DeepSpeed did not keep.

        Raises:
            BuildError: their number is another one; it would train parameters with the settings of others.
        """
        kept = sum(group.place is not None for group in self._groups)
        if len(optimizer.param_groups) != kept:
            raise BuildError(
                f"DeepSpeed made {len(optimizer.param_groups)} of the {kept} groups of parameters that the factory of "
                f"{type(optimizer).__name__} gave, so that settings of groups are lost",
                hint="give all parameters the same settings, or use another optimizer",
            )

    def check_stages(self, mesh: Mesh | None) -> None:
        """Refuse a group with trained parameters on some stages only, or a placeholder: a collective over ``pp``.

        DeepSpeed sums norms group by group over the ranks of a replica: those that lack one would be one sum behind.

        Raises:
            BuildError: on every rank.
        """
        if mesh is None or mesh.size("pp") == 1:
            return
        import torch.distributed as dist

        own = [group.place is not None for group in self._groups]
        by_rank: list[list[bool]] = [[]] * mesh.size("pp")
        dist.all_gather_object(by_rank, own, group=mesh.group("pp"))
        for number, there in enumerate(zip(*by_rank, strict=True)):
            if any(there) and not all(there):
                lacking = ", ".join(str(rank) for rank, has_some in enumerate(there) if not has_some)
                raise BuildError(
                    f"group {number} of the optimizer has no parameters on rank {lacking} of 'pp': DeepSpeed sums the "
                    "norm of gradients group by group over all stages, and would wait for that rank for ever",
                    hint="group parameters by properties found on every stage (weights, biases), or make one group",
                )

    def shown(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Return ``param_groups`` with the model's parameters and the current settings."""
        return [{**self.settings(group, optimizer), "params": list(group.parameters)} for group in self._groups]

    @staticmethod
    def settings(group: Group, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Those of now; DeepSpeed's schedulers write into them."""
        if group.place is None:
            return group.settings
        return {key: value for key, value in optimizer.param_groups[group.place].items() if key != "params"}

    def set(self, settings: Iterable[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
        """Give every group other settings, in the user's order."""
        for group, values in zip(self._groups, settings, strict=True):
            (group.settings if group.place is None else optimizer.param_groups[group.place]).update(values)
