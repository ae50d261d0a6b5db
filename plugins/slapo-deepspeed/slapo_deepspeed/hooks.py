"""Answer the hook `slapo_doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from slapo_core import hookimpl
from slapo_core.hookspecs import Fact, Problem


@hookimpl
def slapo_doctor() -> Iterator[Fact | Problem]:
    """Report DeepSpeed's version, accelerator and interrupted builds of its operators."""
    from slapo_deepspeed.runtime import examine

    return examine()
