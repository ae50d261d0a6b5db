"""The dialect ``accumulate``: every batch in pieces, one optimiser step for all of them."""

import slapo_core as slapo


class Accumulate(slapo.Dialect):
    """One process of plain PyTorch; option ``micro_batches`` says into how many pieces a batch is cut (default 2)."""

    name = "accumulate"
    supports = frozenset()  # no mesh dimension larger than 1

    def check(self, schedule):
        if not any(parameter.requires_grad for parameter in schedule.model.parameters()):
            yield slapo.Violation("the model has no parameter to train", 'target="torch" evaluates it')

    def plan(self, schedule, config):
        count = config.get("micro_batches", 2)
        if set(config) - {"micro_batches"} or type(count) is not int or count < 1:
            raise slapo.BuildError(f"target 'accumulate' takes micro_batches, an int >= 1 (got {dict(config)})")
        step = f"{count} micro-batches a step, gradients summed, one optimiser step"
        return slapo.Plan(self.name, (step,), {"micro_batches": count})

    def build(self, plan, schedule, **options):
        torch_dialect = schedule.registry.load("torch", "dialects")()
        engine = torch_dialect.build(torch_dialect.plan(schedule, {}), schedule, **options)
        return AccumulatingEngine(engine, options.get("loss"), options.get("max_grad_norm"), plan)


class AccumulatingEngine:
    """The engine of target ``torch`` with another training step. Batches are mappings of tensors, samples first."""

    def __init__(self, engine, loss, max_grad_norm, plan):
        self.loss, self.max_grad_norm, self.plan, self.optimizer = loss, max_grad_norm, plan, engine.optimizer
        for name in ("module", "eval_step", "state_dict", "load_state_dict", "save", "load"):
            setattr(self, name, getattr(engine, name))
        self._engine = engine

    def close(self):
        self.optimizer = None
        self._engine.close()

    def train_step(self, batch):
        import torch

        if self.optimizer is None:
            raise slapo.BuildError("this engine cannot train: it is closed, or was built without an optimizer")
        size, total, norm = len(next(iter(batch.values()))), 0.0, None
        self.optimizer.zero_grad()
        for indices in torch.arange(size).chunk(self.plan.config["micro_batches"]):
            piece = {name: tensor[indices] for name, tensor in batch.items()}
            inputs = {name: tensor for name, tensor in piece.items() if self.loss is None or name != "labels"}
            output = self.module(**inputs)
            loss = (self.loss(output, piece) if self.loss else output.loss) * (len(indices) / size)
            loss.backward()
            total = total + loss.detach()
        if self.max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        self.optimizer.step()
        return slapo.StepResult(total, grad_norm=norm)
