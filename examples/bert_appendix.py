"""The schedule of the paper's appendix, for BERT as transformers 5 writes it: tensor parallel, attention and two chains
of small operations replaced and fused, half of the layers recomputed.

    python examples/bert_appendix.py                    # unscheduled on one process, scheduled on two, the comparison
    python examples/bert_appendix.py --text my.txt      # on your own text
    python examples/bert_appendix.py --compiler eager   # the same graphs, nothing compiled

Model, data, runs and comparison are those of ``bert_tp.py``; only the schedule is another. The model writes its
attention out (``attn_implementation="eager"``), as it did when the paper was written.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import bert_tp

import slapo_core as slapo


def schedule_bert(sch: slapo.Schedule, *, compiler: str = "inductor") -> None:
    """As in the paper's appendix; each layer is one graph, in which the patterns of slapo-fusion are found."""
    for layer in sch["bert.encoder.layer.*"]:
        # Shard the attention and the MLP
        for name in ("query", "key", "value"):
            layer[f"attention.self.{name}"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        for name in ("attention.output.dense", "output.dense"):
            layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        # Take the biases out of the linear layers, and trace
        for name in ("intermediate.dense", "attention.output.dense", "output.dense"):
            layer[name].decompose()
        layer.trace(flatten=True)
        # Replace the attention, fuse what follows the matrix products
        layer.replace(match="fusion.sdpa")
        layer.fuse("fusion.bias_gelu", compiler=compiler, name="bias_gelu")
        layer.fuse("fusion.bias_dropout_add_norm", compiler=compiler, name="bias_dropout_add_norm")
    sch["bert.encoder.layer.[0-2]"].checkpoint()


def main(arguments: Sequence[str] | None = None) -> int:
    """What the command line asks for, and its exit status."""
    parser = bert_tp.parser("bert_appendix", __doc__)
    parser.add_argument("--compiler", default="inductor", help="of the fused regions (default: %(default)s)")
    options = parser.parse_args(arguments)
    schedule = functools.partial(schedule_bert, compiler=options.compiler)
    return bert_tp.main(options, schedule=schedule, attention="eager", script=__file__)


if __name__ == "__main__":
    sys.exit(main())
