"""The base class of patterns that a plugin provides by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

__all__ = ["Pattern"]


class Pattern(ABC):
    """A pattern with a name: ``sch.find("fusion.bias_gelu")``.

    The first line of the docstring is what ``slapo patterns list`` shows::

        class BiasGelu(slapo.Pattern):
            \"\"\"GELU of a sum with a bias.\"\"\"

            name = "fusion.bias_gelu"

            def forms(self):
                yield lambda x, bias: F.gelu(x + bias)
                yield lambda x, bias: F.gelu(x + bias, approximate="tanh")

    Attributes:
        name: the full name ``<namespace>.<name>``.
        replacement: what computes the same, called with the captures by name, for ``replace(match=...)`` without a new
            module; None if there is none. It must be right for every form.
        results_only: the replacement gives what the pattern returns, and no value inside of a match: one that the
            traced module gives out and does not use, such as the weights of an attention, is None then.
    """

    name: ClassVar[str]
    replacement: ClassVar[Callable[..., Any] | None] = None
    results_only: ClassVar[bool] = False

    @abstractmethod
    def forms(self) -> Iterable[Any]:
        """The ways in which models write it; each is anything that ``find`` takes, all with the same captures.

        Of two forms that match at one place, the earlier one counts.
        """
