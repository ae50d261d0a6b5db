"""Receipts: what the steps of a schedule should cause in a training step, and what was seen.

- `attribution`: the module and the step whose code runs, forward and backward.
- `collectives`: operations that communicate, with bytes, types and mesh dimensions.
- `watch`: records a block of training steps of a live model, which is the same object before and after.
- `receipt`: compares the effects that steps and runtime expect with a record.
- `engines`: what a watch of a built engine needs (`built_of`), and the receipt of its first step.
- `observing`: runs steps of a schedule or an engine under a watch, and gives a table of both.
"""

from slapo_runtime.receipts.observation import Observation as Observation
from slapo_runtime.receipts.observing import observe as observe
