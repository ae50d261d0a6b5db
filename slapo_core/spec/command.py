"""The base class of commands that plugins add to ``slapo``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import typer

__all__ = ["Command"]


class Command(ABC):
    """A family of commands of a plugin: ``slapo <name> ...``.

    Published by an entry point of the group ``slapo.v1.commands``. It is imported when it is called, and not when
    ``slapo --help`` lists it.

    Attributes:
        name: the word after ``slapo``, e.g. ``"pipeline"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def app(self) -> typer.Typer:
        """What runs: an app of typer, whose commands are ``slapo <name> <command>``.

        A `SlapoError` that it raises is printed without traceback, and ends the process with status 1.
        """
