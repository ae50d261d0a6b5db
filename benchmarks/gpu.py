"""What a GPU shows in a few minutes: training, large vocabularies, CUDA graphs, fused regions, estimates, host time.

    python benchmarks/gpu.py --minutes 3 --out DIR              on a machine with a GPU
    python benchmarks/gpu.py --small --minutes 10 --out DIR     tiny sizes, also on a CPU: whether it runs at all
    python benchmarks/gpu.py --page                             docs/results/gpu.md, of benchmarks/results/gpu_*.json

The parts run one after another, the most valuable first, each in a process of its own that writes
``DIR/gpu_<part>.json`` as soon as it has something, and again and again. A part has its share of the minutes that are
left; what one leaves over is for the others. One that fails or is ended keeps the rows it has, and the others run. A
part that was completed at this commit is not run again.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from report import RESULTS, save

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "gpu.md"
Row = Mapping[str, Any]
COMPLETE = "complete"


@dataclass(frozen=True)
class Part:
    """A part: what runs it, and how its rows are shown.

    Args:
        run: ``"module:function"`` of a function that takes a :class:`Run`.
        weight: its share of the time, beside the weights of others.
        text: what is measured, for the page.
        columns: of the table: each gives a cell for a row.
    """

    run: str
    weight: int
    text: str
    columns: Mapping[str, Callable[[Row], str]]


@dataclass
class Run:
    """What a part is given.

    Args:
        part: its name.
        device: that it measures.
        small: whether sizes are those of a CPU.
        compiler: of what is compiled.
        deadline: when it is ended, in seconds of ``time.time()``.
        file: for its rows.
        setting: kept beside them.
    """

    part: str
    device: torch.device
    small: bool
    compiler: str
    deadline: float
    file: Path
    setting: Mapping[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until this part is ended."""
        return self.deadline - time.time()

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def say(self, what: str | Row) -> None:
        """Print a line, or a row as one."""
        if not isinstance(what, str):
            what = ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in what.items()
                if not isinstance(value, Mapping)
            )
        print(f"{time.monotonic() - self.began:6.1f} s  {self.part}: {what}", flush=True)

    def failure(self, error: Exception) -> str:
        """An error that is a variant's result, in one line with the three innermost places; the rest is printed."""
        traceback.print_exception(error)
        innermost = traceback.extract_tb(error.__traceback__)[-3:]
        places = [f"{Path(each.filename).name}:{each.lineno}" for each in innermost]
        line = str(error).strip().partition(os.linesep)[0]
        return f"{type(error).__name__}: {line} ({', '.join(places)})"[:300]

    def keep(self, rows: Iterable[Row], ended: str = "running") -> None:
        """Write the rows so far, and everything else that this part knows."""
        save("", [dict(row) for row in rows], file=self.file, **self.setting, facts=self.facts, ended=ended)


# -- the parts --------------------------------------------------------------------------------------------------------


def _ratio(row: Row, key: str) -> str:
    return "{ratio:.2f} ({quartile_1:.2f} to {quartile_3:.2f})".format(**row[key])


def _gib(row: Row, key: str) -> str:
    return f"{row[key] / 2**30:.2f} GiB"


def _apart(row: Row, what: str) -> str:
    return f"{row[f'predicted_{what}'] / row[f'measured_{what}'] - 1:+.1%}"


TRAINING: Mapping[str, Callable[[Row], str]] = {
    "variant": lambda row: row["variant"],
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "against eager": functools.partial(_ratio, key="against_eager"),
    "MFU": lambda row: f"{row['mfu']:.1%}",
    "MFU of the measured peak": lambda row: f"{row['mfu_measured']:.1%}",
    "peak memory": functools.partial(_gib, key="peak_bytes"),
    "to the first step": lambda row: f"{row['first_step_seconds']:.1f} s",
}
PARTS = {
    "llama_1b": Part(
        "gpu_training:llama_1b",
        45,
        """A training step of an unmodified `LlamaForCausalLM` of transformers: 16 layers, width 2048, 32 heads, 8 of
keys and values, vocabulary 128,256, embeddings and head one matrix; bfloat16, sequences of 2,048 tokens, fused AdamW.
*kernels* is `slapo_models.llama(sch, attention="fusion.causal_sdpa")`: each layer traced, attention and norms replaced,
rotary embeddings and SwiGLU fused.
*compiled layers* is `sch["model.layers.*"].compile()`.""",
        TRAINING,
    ),
    "mixed_precision": Part(
        "gpu_training:mixed_precision",
        15,
        """The same in float32 with one sequence, computed in bfloat16: *eager* by `torch.autocast`, the others by
`build(..., precision="bf16-mixed")`, which is autocast, too, and with `data_parallel="fsdp"` (of one rank) a cast of
the gathered parameters.""",
        TRAINING,
    ),
    "large_vocabulary": Part(
        "gpu_loss:large_vocabulary",
        15,
        """Forward and backward of a head and its cross entropy in bfloat16, the logits in float32 for the loss as
transformers has it: plain, and with `sch["lm_head"].linear_cross_entropy(implementation=...)`, which changes nothing in
the model. Peak memory has the weight and its gradient in it.""",
        {
            "tokens x classes x features": lambda row: f"{row['tokens']:,} x {row['classes']:,} x {row['features']:,}",
            "variant": lambda row: row["variant"],
            "time": lambda row: f"{1e3 * row['seconds']:.1f} ms",
            "plain / this": functools.partial(_ratio, key="against_plain"),
            "peak memory": functools.partial(_gib, key="peak_bytes"),
        },
    ),
    "launch_bound": Part(
        "gpu_training:launch_bound",
        15,
        """The same at width 1024 with 16 heads, by one sequence of 512 tokens, so that kernels are shorter than their
launches; with and without `cudagraphify` on the layers, and by `torch.compile(mode="reduce-overhead")`.""",
        TRAINING,
    ),
    "fused_regions": Part(
        "gpu_parts:fused_regions",
        10,
        "Forward and backward of what lies between the products of a layer, on its own, in bfloat16.",
        {
            "region": lambda row: f"`{row['region']}`",
            "variant": lambda row: row["variant"],
            "time": lambda row: f"{1e6 * row['seconds']:.0f} µs",
            "eager / this": functools.partial(_ratio, key="against_eager"),
        },
    ),
    "estimates": Part(
        "gpu_parts:estimates",
        22,
        """Peak memory and time of a training step of twelve schedules, in bfloat16 with fused AdamW: predicted by
`estimate`, from sizes and from measured numbers of the device (FLOP/s of products, bandwidth, launch), and measured.
The workspace of cuBLAS is not counted.""",
        {
            "model": lambda row: row["model"],
            "schedule": lambda row: row["schedule"],
            "predicted memory": functools.partial(_gib, key="predicted_bytes"),
            "measured memory": functools.partial(_gib, key="measured_bytes"),
            "memory is off by": functools.partial(_apart, what="bytes"),
            "predicted time": lambda row: f"{1e3 * row['predicted_seconds']:.1f} ms",
            "measured time": lambda row: f"{1e3 * row['measured_seconds']:.1f} ms",
            "time is off by": functools.partial(_apart, what="seconds"),
        },
    ),
    "host_time": Part(
        "gpu_parts:host_time",
        8,
        "CPU time that one thread takes for a forward of a small layer with gradients, one sequence, as its model "
        "calls it.",
        {
            "model": lambda row: row["model"],
            "layer": lambda row: row["layer"],
            "time": lambda row: f"{1e6 * row['seconds']:.0f} µs",
            "this / untraced": functools.partial(_ratio, key="against_untraced"),
        },
    ),
}


# -- a part, in its process -------------------------------------------------------------------------------------------


def run_part(options: argparse.Namespace) -> int:
    """Run one part here, and write how it ended."""
    device = torch.device(options.device)
    setting = {"part": options.part, "commit": options.commit, "small": options.small, **machine(device)}
    file = result_file(options.out, options.part)
    run = Run(options.part, device, options.small, options.compiler, options.deadline, file, setting)
    run.keep([])
    module, _, function = PARTS[options.part].run.partition(":")
    ended = COMPLETE
    try:
        getattr(importlib.import_module(module), function)(run)
    except Exception as error:  # noqa: BLE001 - is what the part gave
        ended = f"failed: {run.failure(error)}"
    run.keep(json.loads(file.read_text())["rows"], ended)
    return 0 if ended == COMPLETE else 1


def machine(device: torch.device) -> dict[str, Any]:
    """The device, and versions of what runs on it."""
    if device.type == "cpu":
        return {"device": "CPU"}
    import triton

    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(smi, capture_output=True, text=True, check=False) if shutil.which(smi[0]) else None
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": asked.stdout.split()[0] if asked is not None and asked.stdout.split() else "unknown",
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def result_file(directory: Path, part: str) -> Path:
    return directory / f"gpu_{part}.json"


# -- all parts, in turn -----------------------------------------------------------------------------------------------


def run_parts(options: argparse.Namespace) -> int:
    """Run what is not complete, within the minutes; give 1 if something then is not."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the part ends, too
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    waiting = [part for part in options.parts if options.again or not is_complete(options, part)]
    for part in options.parts:
        if part not in waiting:
            print(f"{part}: complete at {options.commit}: not run again", flush=True)
    incomplete = False
    for place, part in enumerate(waiting):
        left = deadline - time.monotonic()
        seconds = left * PARTS[part].weight / sum(PARTS[name].weight for name in waiting[place:])
        ended = in_process(options, part, seconds) if seconds > 0 else "not run: no time is left"
        print(f"{part}: {ended}", flush=True)
        incomplete |= ended != COMPLETE
    return int(incomplete)


def is_complete(options: argparse.Namespace, part: str) -> bool:
    """Whether DIR has all of a part, of this very code."""
    file = result_file(options.out, part)
    if not file.exists() or options.commit == "unknown" or options.commit.endswith("-dirty"):
        return False
    known = json.loads(file.read_text())
    return (known["commit"], known["small"], known["ended"]) == (options.commit, options.small, COMPLETE)


def in_process(options: argparse.Namespace, part: str, seconds: float) -> str:
    """Run a part, end it with all its processes when its time is over, and give how it ended."""
    file = result_file(options.out, part)
    with tempfile.TemporaryDirectory() as cache:  # nothing is compiled beforehand
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        command = [sys.executable, sys.argv[0], "--part", part, "--deadline", str(time.time() + seconds)]
        command += ["--out", str(options.out)]
        command += ["--device", options.device, "--commit", options.commit, "--compiler", options.compiler]
        command += ["--small"] if options.small else []
        file.unlink(missing_ok=True)
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        ended = None
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            ended = f"ended at its limit of {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    known = json.loads(file.read_text()) if file.exists() else {"rows": []}
    if known.get("ended", "running") == "running":  # it had no time to say more
        setting = {"part": part, "commit": options.commit, "small": options.small, **known}
        ended = ended or f"failed: exit status {process.returncode}"
        file.write_text(json.dumps({**setting, "ended": ended}, indent=2) + "\n")
        return ended
    return str(known["ended"])


# -- the page ---------------------------------------------------------------------------------------------------------


def page(directory: Path) -> str:
    """docs/results/gpu.md, of the results in a directory."""
    lines = [
        "# On a GPU",
        "",
        "<!-- Made by benchmarks/gpu.py --page of benchmarks/results/gpu_*.json; change these instead. -->",
        "",
        "What [`benchmarks/gpu.py`](../../benchmarks/gpu.py) measures on one GPU. Variants are timed by CUDA events,",
        "in turn; ratios are from each round, medians with quartiles, above 1 where the variant is faster. The",
        "first three losses of each are compared with eager's, on a batch that is learned: one that is off by more",
        "than 1 % has no figures.",
        "",
        "Model FLOPs utilization (MFU) is the tokens per second times `6 N + 12 L h s`, over the peak: N parameters, L",
        "layers, h the width, s the length of a sequence; the second term is attention's, of which a causal mask saves",
        "nothing in this formula, and neither does what is recomputed count. The peak is that of the data sheet (dense",
        "bfloat16), and the one that a product of 8192 x 8192 matrices reaches. Peak memory is",
        "`torch.cuda.max_memory_allocated` from the first step on; seconds to the first step begin with a model on the",
        "device, and nothing compiled beforehand.",
    ]
    for name, part in PARTS.items():
        lines += ["", f"## {name}", "", *part.text.splitlines(), ""]
        file = result_file(directory, name)
        lines += _table(part, json.loads(file.read_text())) if file.exists() else ["Not measured yet."]
    return "\n".join(lines) + "\n"


def _table(part: Part, known: Mapping[str, Any]) -> list[str]:
    if known["small"] or known["device"] == "CPU":
        raise SystemExit(f"gpu_{known['part']}.json was not measured on a GPU at full size: it does not belong there")
    versions = ", ".join(f"{name} {known[name]}" for name in ("driver", "torch", "cuda", "triton", "commit"))
    lines = [f"{known['device']}, {versions}, {known['date']}."]
    if known["ended"] != COMPLETE:
        lines += [f"Not complete: {known['ended']}."]
    numbers = {name: value for name, value in known["facts"].items() if isinstance(value, int | float)}
    if numbers:
        shown = (f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in numbers.values())
        lines += ["", "; ".join(f"{name} {value}" for name, value in zip(numbers, shown, strict=True)) + "."]
    lines += ["", f"| {' | '.join(part.columns)} |", "|---" * len(part.columns) + "|"]
    for row in known["rows"]:
        lines.append("| " + " | ".join(_cell(row, cell) for cell in part.columns.values()) + " |")
    failed = [
        ", ".join(each for each in row.values() if isinstance(each, str)) for row in known["rows"] if "failed" in row
    ]
    for line in dict.fromkeys(failed):
        lines += ["", f"{line}."]
    return lines


def _cell(row: Row, cell: Callable[[Row], str]) -> str:
    try:
        return cell(row)
    except KeyError:
        return "-"


# -- the command ------------------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="for all parts together (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for results")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--small", action="store_true", help="tiny sizes, by aot_eager: whether it runs at all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", help="backend of torch.compile (default: inductor; aot_eager with --small)")
    parser.add_argument("--commit", default=None, help="of this code (default: as git says)")
    parser.add_argument("--again", action="store_true", help="also parts that are complete")
    parser.add_argument("--page", action="store_true", help="only write docs/results/gpu.md")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    options.compiler = options.compiler or ("aot_eager" if options.small else "inductor")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.page:
        return options
    if options.out is None:
        parser.error("where to? --out DIR")
    if torch.device(options.device).type == "cpu" and not options.small:
        parser.error("there is no CUDA device; --small runs on a CPU")
    options.commit = options.commit or _commit()
    return options


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    if shutil.which("git") is None:
        return "unknown"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or run one part, or all."""
    options = parsed(arguments)
    if options.page:
        PAGE.write_text(page(RESULTS))
        return 0
    return run_part(options) if options.part else run_parts(options)


if __name__ == "__main__":
    sys.exit(main())
