"""The dialect ``accumulate``: every batch in pieces, one optimizer step for all of them."""

from functools import partial

import torch
from torch.utils import _pytree as pytree

import slapo_core as slapo


class Accumulate(slapo.Dialect):
    """One process of plain PyTorch; option ``micro_batches`` says into how many pieces a batch is cut (default 2)."""

    name, supports = "accumulate", frozenset()  # no mesh dimension larger than 1

    def plan(self, schedule, config):
        count = config.get("micro_batches", 2)
        if set(config) - {"micro_batches"} or type(count) is not int or count < 1:
            raise slapo.BuildError(f"target 'accumulate' takes micro_batches, an int >= 1 (got {dict(config)})")
        return slapo.Plan(self.name, (f"one optimizer step for {count} micro-batches",), {"micro_batches": count})

    def build(self, plan, context):
        return Engine(plan, context)


class Engine:
    def __init__(self, plan, context):
        self.plan, self.context, self.module, self.is_closed = plan, context, context.schedule.model, False
        self.optimizer, state = context.make_optimizer(), context.state
        self.state_dict, self.load_state_dict = state.state_dict, state.load_state_dict
        calls = (state.save, state.load, state.check_replicas)
        self.save, self.load, self.check_replicas = (partial(do, optimizer=self.optimizer) for do in calls)

    def train_step(self, batch):
        if self.is_closed or self.optimizer is None:
            raise slapo.BuildError("the engine is closed, or cannot train", hint="build(sch, ..., optimizer=...)")
        total, size = 0.0, next(len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        self.optimizer.zero_grad()
        for rows in torch.arange(size).chunk(self.plan.config["micro_batches"]):
            piece = pytree.tree_map_only(torch.Tensor, lambda tensor, rows=rows: tensor[rows], batch)
            loss = self.context.compute_loss(piece)[0] * (len(rows) / size)  # it is a mean over the samples of a piece
            loss.backward()
            total += loss.detach()
        norm = self.context.clip_gradients()
        self.optimizer.step()
        return slapo.StepResult(total, grad_norm=norm)

    def eval_step(self, batch):
        if self.is_closed:
            raise slapo.BuildError("the engine is closed", hint="schedule and build a fresh model")
        return slapo.StepResult(*self.context.evaluate(batch))

    def close(self):
        self.is_closed = True
