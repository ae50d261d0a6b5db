"""Initialization of tensors on the meta device, with the same values under every schedule.

| file | the question that it answers |
|---|---|
| ``programs.py`` | Which operations initialize a tensor, and what do they give for any shard of it? |
| ``initializers.py`` | Which methods of modules initialize a tensor, and how do they run on a copy without values? |
"""

from slapo_runtime.initialization.programs import (
    Initializer as Initializer,
    cannot_initialize as cannot_initialize,
)
