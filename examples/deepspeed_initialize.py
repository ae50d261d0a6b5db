"""A scheduled model in a script that calls ``deepspeed.initialize`` itself: two tensor-parallel ranks, ZeRO-1.

``torchrun --nproc-per-node 2 examples/deepspeed_initialize.py``, or by the ``deepspeed`` launcher. The first rank
trains the reference model too, and prints both losses. It takes a GPU for each rank, or the CPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
import slapo_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 0.1,
}


def main(steps: int, device: torch.device) -> None:
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # which deepspeed reads when it is imported
    else:
        torch.cuda.set_device(device)
    import deepspeed

    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
    reference = copy.deepcopy(model)

    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["0"].shard(["weight", "bias"], axis=0)
    sch["0"].sync("backward")
    sch["2"].shard("weight", axis=1)
    sch["2"].sync("forward")

    module, mpu, parameters = slapo_deepspeed.prepare(sch)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, mpu=mpu, config=CONFIG)

    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(steps):
        batch = torch.randn(8, 16).to(device)
        loss = (engine(batch) - batch).square().mean()
        engine.backward(loss)
        engine.step()

        wanted = (reference(batch) - batch).square().mean()
        optimizer.zero_grad()
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), CONFIG["gradient_clipping"])
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, reference {wanted.item():.6f}")
        assert abs(loss.item() - wanted.item()) < 1e-5
    dist.barrier()
    dist.destroy_process_group()


def device_of(wanted: str | None) -> torch.device:
    """A GPU of this rank's own, where each rank has one and nothing else is wanted; or the CPU."""
    ranks, found = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    if wanted == "cuda" and found < ranks:
        sys.exit(f"--device cuda: {ranks} ranks need a GPU each (found {found})")
    if wanted == "cpu" or found < ranks:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if each rank has a GPU")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    options = parser.parse_args()
    main(options.steps, device_of(options.device))
