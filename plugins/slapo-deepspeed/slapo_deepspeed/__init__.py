"""DeepSpeed as a target of slapo: ``slapo_core.build(sch, target="deepspeed", config="ds.json")``.

Installing this distribution is enough. DeepSpeed is imported when an engine is built, and not before.
"""

from __future__ import annotations

__all__: list[str] = []
