"""The command ``slapo``, and the output functions of plugins' commands."""

from __future__ import annotations

from slapo_core.cli.output import print_json, print_table, table_lines
from slapo_core.cli.vocabulary import print_names

__all__ = ["print_json", "print_names", "print_table", "table_lines"]
