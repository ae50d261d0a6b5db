"""docs/guides/hosts.md: the code of its first table trains: a plain model on the left, a split one on the right."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slapo_runtime.launcher import run_ranks
from slapo_testing import preload_modules
from tests.ecosystem.pages import ROOT

preload_modules(
    "deepspeed", "slapo_deepspeed", "slapo_transformers", "slapo_tp", "lightning.pytorch",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip

HOSTS = ("trainer", "sft", "accelerate", "lightning", "deepspeed")
STEPS, SIZE = 3, 4


def rows() -> dict[str, tuple[str, str]]:
    """The code of the table's two columns, by host."""
    page = (ROOT / "docs" / "guides" / "hosts.md").read_text(encoding="utf-8")
    table = page.partition("| your script | instead |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.strip("|").split(" | ") for line in table.splitlines()]
    code = [["\n".join(re.findall(r"`([^`]+)`", cell)) for cell in row] for row in cells]
    return {host: (left, right) for host, (left, right) in zip(HOSTS, code, strict=True)}


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))


def steps(sch: Any) -> None:
    for layer in sch["model.layers.*"]:
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            layer[name].shard("weight", axis=0)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        for name in ("self_attn", "mlp"):
            layer[name].sync("bwd_post", "all_reduce")


def tokens() -> torch.Tensor:
    return torch.randint(4, 64, (STEPS * SIZE, 8), generator=torch.Generator().manual_seed(1))


def batches() -> Iterator[dict[str, torch.Tensor]]:
    return ({"input_ids": ids, "labels": ids} for ids in tokens().split(SIZE))


def trained(host: str, code: str, directory: Path, *, split: bool) -> list[float]:
    """The losses of a script with the code of a cell."""
    import slapo_core as slapo

    made = model()
    names: dict[str, Any] = {"model": made, "steps": steps}
    if split and host != "lightning":
        names["sch"] = slapo.create_schedule(made, mesh={"tp": 2})
        steps(names["sch"])
    return globals()[f"by_{host}"](names, code.replace("...)", "**rest)"), directory)  # type: ignore[no-any-return]


def by_trainer(names: dict[str, Any], code: str, directory: Path, kind: str = "Trainer") -> list[float]:
    import transformers

    options = {
        "output_dir": str(directory), "max_steps": STEPS, "per_device_train_batch_size": SIZE, "logging_steps": 1,
        "learning_rate": 1e-2, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "ddp_backend": "gloo" if torch.distributed.is_initialized() else None,
    }  # fmt: skip
    rest = {"train_dataset": [{"input_ids": ids, "labels": ids} for ids in tokens()]}
    names |= {"Trainer": transformers.Trainer, "args": transformers.TrainingArguments(**options), "rest": rest}
    if kind == "SFTTrainer":
        trl_names(names, options)
    exec(code, names)
    names["trainer"].train()
    return [line["loss"] for line in names["trainer"].state.log_history if "loss" in line]


def trl_names(names: dict[str, Any], options: dict[str, Any]) -> None:
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    import slapo_transformers

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w1"))
    rest = {
        "train_dataset": Dataset.from_list([{"input_ids": ids.tolist()} for ids in tokens()]),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1"),
    }
    args = trl.SFTConfig(**options, bf16=False)
    names |= {"SFTTrainer": trl.SFTTrainer, "slapo_transformers": slapo_transformers, "args": args, "rest": rest}


def by_sft(names: dict[str, Any], code: str, directory: Path) -> list[float]:
    return by_trainer(names, code, directory, "SFTTrainer")


def by_accelerate(names: dict[str, Any], code: str, directory: Path) -> list[float]:
    from accelerate import Accelerator

    names["accelerator"] = accelerator = Accelerator(cpu=True)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-2)
    names["loader"] = torch.utils.data.DataLoader(tokens(), batch_size=SIZE)  # type: ignore[arg-type]
    exec(code, names)
    losses = []
    for ids in names["loader"]:
        loss = names["model"](input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(names["model"].parameters(), 1.0)
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def by_lightning(names: dict[str, Any], code: str, directory: Path) -> list[float]:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = names["model"], []

        def training_step(self, ids: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    names["rest"] = {
        "max_epochs": 1, "accelerator": "cpu", "gradient_clip_val": 1.0, "logger": False,
        "use_distributed_sampler": False, "enable_progress_bar": False, "enable_checkpointing": False,
        "enable_model_summary": False,
    }  # fmt: skip
    names |= {"L": L}
    exec(code, names)
    module = Module()
    names["trainer"].fit(module, torch.utils.data.DataLoader(tokens(), batch_size=SIZE))  # type: ignore[arg-type]
    return module.losses


def by_deepspeed(names: dict[str, Any], code: str, directory: Path) -> list[float]:
    import deepspeed

    import slapo_deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which is compiled for minutes

    names["config"] = {
        "train_micro_batch_size_per_gpu": SIZE, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    names |= {"deepspeed": deepspeed, "slapo_deepspeed": slapo_deepspeed}
    exec(code, names)
    losses = []
    for batch in batches():
        loss = names["engine"](**batch).loss
        names["engine"].backward(loss)
        names["engine"].step()
        losses.append(loss.item())
    return losses


def all_hosts(column: int, directory: Path) -> dict[str, list[float]]:
    ids = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    found = {}
    for host, cells in rows().items():
        os.environ.update(ids)  # a host may take them out
        found[host] = trained(host, cells[column], directory / host, split=column == 1)
    return found


@pytest.mark.ranks
def test_both_columns_of_the_table_train_alike(tmp_path: Path) -> None:
    (plain,) = run_ranks(all_hosts, 0, tmp_path / "plain", world_size=1)
    assert all(len(losses) == STEPS and losses[0] != losses[-1] for losses in plain.values())
    for split in run_ranks(all_hosts, 1, tmp_path / "split", world_size=2):
        for host, losses in plain.items():
            assert split[host] == pytest.approx(losses, rel=1e-4), host
