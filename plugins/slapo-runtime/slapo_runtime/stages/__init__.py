"""The stages of a model: definition, plugins, and execution on a rank.

A schedule marks the cuts of the model. Two hooks of plugins make stages of them: ``slapo_partition`` gives a
:class:`~.partition.Partition`, the stages as data, and ``slapo_liveness`` names the values sent from each stage to the
next. Everything else reads these answers only: ``build``, the engines of every target, ``verify`` and estimates.

The terms, from large to small:

- a *stage* computes some *values* from some of the model's arguments and from values of earlier stages; run one after
  the other, the stages compute the model's forward. They hold the modules of the scheduled model, the same objects. A
  parameter that several stages use is a *tie*.
- a *boundary* lies behind each stage but the last. The values of its *liveness* cross it, as a *message* if the two
  stages are on different ranks along ``pp``.
- a *model chunk* is run between two messages: one stage, or several adjacent stages of one rank.
- *work* is one step of a rank: the micro-batches of one batch, run stage by stage.
- an *input signature* (shapes, dtypes and options of a batch) has its own stages; the recent ones are cached.

Random numbers: each stage and micro-batch has an RNG stream of its own, seeded from the step's seed, so that the
numbers depend neither on the order of the pipeline schedule nor on recomputation.

| file | the question that it answers |
|---|---|
| ``partition.py`` | How are stages, values and ties described as data? Hooks answer with it. |
| ``staged_model.py`` | Which stages has a schedule for a batch? Are the answers valid? What do they compute in turn? |
| ``signatures.py`` | Which batches share stages? |
| ``p2p_packing.py`` | How are the values at a boundary packed into one or two tensors, and their gradients sent back? |
| ``runner.py`` | How does a rank run its chunks, micro-batch by micro-batch, between the messages? |
"""

from slapo_runtime.stages.staged_model import (
    Outputs as Outputs,
    RankModule as RankModule,
    StagedModel as StagedModel,
    ask as ask,
    check_liveness as check_liveness,
    needing as needing,
    staged as staged,
    stages as stages,
)
