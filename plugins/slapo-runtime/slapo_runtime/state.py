"""The names of :mod:`slapo_runtime.correspondence.state` that plugins also import from here."""

from slapo_runtime.correspondence.state import (
    ModelState as ModelState,
)
