"""The stages of a model: what they are, who says so, and how one rank runs its own.

A schedule marks where the model is cut. Two hooks, which plugins answer, make stages of that: ``slapo_partition`` gives
a :class:`~.partition.Partition`, the stages as data, and ``slapo_liveness`` says which values stand on the way from
each stage to the next. Everything after that reads these answers and nothing else: ``build``, the engines of every
target, ``verify`` and estimates.

The terms, from the whole to the part:

- a *stage* computes some *values* from some of the model's arguments and from values of earlier stages; run one after
  the other, the stages compute what the model's forward does. They hold the modules of the scheduled model, the very
  same objects. A parameter that several stages use is a *tie*.
- a *boundary* lies behind each stage but the last. What *liveness* says of it crosses it; where the two stages are on
  different ranks along ``pp``, it crosses as a *message*.
- a *model chunk* is what one rank runs between two messages: one stage, or several adjacent ones.
- *work* is one step of a rank: the micro-batches of one batch, run stage by stage.
- an *input signature* (shapes, dtypes and options of a batch) has its own stages; the recent ones are kept.

Random numbers: each stage and micro-batch has an RNG stream of its own, seeded from the step's seed, so that a pipeline
draws the same in whatever order its schedule runs, and again when a checkpointed stage is recomputed.

| file | the question that it answers |
|---|---|
| ``partition.py`` | What is a stage, a value, a tie, as data? Hooks answer with it. |
| ``staged_model.py`` | Which stages has a schedule for a batch? Are the answers valid? What do they compute in turn? |
| ``p2p_packing.py`` | How does whatever crosses a boundary go in one or two tensors, and its gradient back? |
| ``runner.py`` | How does a rank run its chunks, micro-batch by micro-batch, between the messages? |
"""

from slapo_runtime.stages.staged_model import (
    Outputs as Outputs,
    Part as Part,
    StagedModel as StagedModel,
    ask as ask,
    check_liveness as check_liveness,
    needing as needing,
    staged as staged,
    stages as stages,
)
