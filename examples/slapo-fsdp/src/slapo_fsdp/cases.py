"""The cases of ``slapo plugins check``: a model of blocks in groups, and in one group."""

from functools import partial

import torch
from torch import nn

from slapo_testing import DialectCase


class Block(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up, self.act, self.down = nn.Linear(features, 12), nn.GELU(), nn.Linear(12, features)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two blocks with a layer before them and one after them; the mean squared error."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 7), nn.ModuleList(map(Block, (7, 7))), nn.Linear(7, 4)

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        prediction = self.last(x)
        return {"loss": nn.functional.mse_loss(prediction, y), "prediction": prediction}


def batch():
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}


def steps(schedule):
    """Recompute a block; with several ranks along ``tp``, split both layers of each."""
    schedule["blocks.1"].checkpoint()
    if schedule.mesh is not None and schedule.mesh.size("tp") > 1:
        schedule["blocks.*.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        schedule["blocks.*.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    """With an eps that keeps gradients that are zero but for rounding from becoming steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


REJECTS = [{"wrap": "no.such.block"}, {"wrap": 3}, {"reshard_after_forward": "no"}, {"reshard": True}]


def cases():
    case = partial(DialectCase, "fsdp", model=Stack, batch=batch, schedule=steps, optimizers=(sgd, adamw))
    case = partial(case, device_per_rank=True)  # fully_shard moves parameters to the device of its mesh
    return [
        case(
            config={"reshard_after_forward": False},
            rejects=REJECTS,
            meshes=[{"dp": 2, "tp": 2}, {"dp": 2}, {"tp": 2}],
            name="blocks",
        ),
        case(config={"wrap": []}, rejects=REJECTS, dtype=torch.float32, name="one-group"),
    ]
