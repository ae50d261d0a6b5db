"""hello.full_precision: a whole slapo plugin in one file."""

import functools
from dataclasses import dataclass

import slapo_core as slapo


@dataclass(frozen=True)
class FullPrecision(slapo.Primitive):
    """Run one module in full precision while the rest runs under autocast.

    rewrite: ``y = module(x)`` in bfloat16 or float16 -> ``y = module(x.float())``, autocast off inside
    """

    name = "hello.full_precision"
    equivalence = slapo.Equivalence.EXACT  # without autocast nothing changes

    def preconditions(self, node):
        if any(record.name == self.name for record in node.records):
            yield slapo.Violation("it runs in full precision already", "leave this step out")

    def apply(self, node, edit):
        edit.wrap_forward(node, _in_full_precision)


def _in_full_precision(forward):  # at the top level of the module: pickle finds it again by its name
    return functools.partial(_run, forward)


def _run(forward, module, *args):
    import torch

    with torch.autocast(args[0].device.type, enabled=False):
        return forward(module, *(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in args))
