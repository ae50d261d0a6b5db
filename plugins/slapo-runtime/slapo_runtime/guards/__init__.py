"""Guards on a live split model, against plain tools that silently break it.

| file | the guard |
|---|---|
| ``live_model.py`` | The hooks on the root of the model: state dicts, and the first training forwards. |
| ``wrappers.py`` | Wrappers that take shards for replicas, and shards copied between ranks. |
| ``stale_optimizers.py`` | Optimizers of parameters from before a step, or of shards that they cannot step. |
"""

from slapo_runtime.guards.live_model import Guards as Guards
