"""Run schedules: build, state, checkpoints, initialization, ranks, stages, and the frame for dialects.

A dialect author meets these names of ``slapo_core``: ``Dialect``, ``Plan``, ``Engine``, ``StepResult``, ``Schedule``,
``Violation``, ``BuildError``, and ``BuildArguments`` of its module ``dialect``; and these of the modules here:

- ``context``: ``BuildContext``, ``StagedBatch``
- ``correspondence.storage``: ``LiveTensor``, ``Placement``, ``TensorStorage``, ``OptimizerStorage``
- ``engine``: ``StatefulEngine``, ``StepInvariants``, ``UnusedParameters``
- ``planning``: ``plan_of``, ``checked_axes``
- ``stages``: ``StagedModel``
- ``stages.partition``: ``Partition``
- ``stages.runner``: ``StageCache``, ``RankStages``, ``Work``
- ``state``: ``ModelState``

The other modules of this level are shared with slapo-torch, slapo-deepspeed, slapo-megatron, slapo-verify,
slapo-estimate, slapo-tune and slapo-testing. The packages begin with a page about their subject: ``correspondence`` (of
live tensors to reference tensors), ``stages``, ``ranks``, ``initialization`` and ``guards``; ``weights`` is internal.
Training scripts import ``data``, the samples of each replica.
"""
