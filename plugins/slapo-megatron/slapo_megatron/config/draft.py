"""Options in the making: what the user gave, and what was filled in, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slapo_megatron.config.facts import Facts
from slapo_megatron.config.slots import slots

__all__ = ["Draft"]


@dataclass
class Draft:
    """Values are found and set by the name of an option and of a field, e.g. ``"optimizer_config", "clip_grad"``.

    Args:
        options: for ``optimizer_config``, ``ddp_config``, ``model_parallel_config`` and ``scheduler``: a copy of what
            the user gave, which is filled in.
        facts: what the schedule and the arguments of ``build`` say.
        origins: ``"optimizer_config.clip_grad"`` -> why it was filled in.
        has_optimizer_config: whether the user gave an ``optimizer_config``.
    """

    options: dict[str, dict[str, Any]]
    facts: Facts
    origins: dict[str, str] = field(default_factory=dict)
    has_optimizer_config: bool = False

    def given(self, option: str, name: str) -> bool:
        """Whether the user said something."""
        return name in self.options[option]

    def get(self, option: str, name: str) -> Any:
        """The value; where nobody said any, Megatron's default; None for a field that it does not have."""
        if name in self.options[option]:
            return self.options[option][name]
        slot = slots(option).get(name)
        return None if slot is None else slot.default

    @property
    def may_train(self) -> bool:
        """Whether there is an optimizer; also where nobody has said whether there is a factory."""
        return self.facts.has_optimizer is not False or self.get("optimizer_config", "lr") is not None

    def fill(self, option: str, name: str, value: Any, why: str) -> Any:
        """Set a value, note why, and give it back."""
        self.options[option][name] = value
        self.origins[f"{option}.{name}"] = why
        return value

    @staticmethod
    def place(option: str, name: str) -> str:
        """For messages: ``"'clip_grad' of optimizer_config"``."""
        return f"'{name}' of {option}"
