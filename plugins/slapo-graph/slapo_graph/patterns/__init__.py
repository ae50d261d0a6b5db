"""The words in which patterns for ``find`` are written: ``from slapo_core import patterns``.

A pattern is mostly plain Python: a function whose parameters stand for any values of the graph and which writes the
operations to find, as a model might. ``print(node.graph)`` shows what there is to find::

    matches = sch["encoder.layer.*"].find(lambda x, bias: F.gelu(x + bias))

- A parameter without a default stands for a value: the result of a call, an argument of the module, a parameter or
  buffer. It is the same value wherever it stands; two parameters may be one value. It is never a constant, and never
  computed inside of the match. A parameter with a default is that constant; with ``any_constant()`` any constant.
- All ways to write one operation are one: ``F.softmax(x, dim=-1)``, ``x.softmax(-1)``, ``torch.softmax(x, -1)`` and
  ``nn.Softmax(-1)``; arguments by position or by name, defaults written or left out, axes from either end. Operands of
  commutative operations may change places. An operation that writes in place is another one.
- Every call of the pattern is a call of its own in the graph. What the function returns, a value or tuples, lists and
  dictionaries of values, are results of the match, and so is every other value that is used outside of it.
- A call of a module of torch.nn without hooks and steps is the function that it computes, with its parameters. In a
  pattern, such a module stands for its function with the same settings in whatever mode the model is; its parameters
  stand for parameters of the same shapes. Modules of other classes are looked into; ``call_module`` names their calls.
- Matches do not overlap: the one that begins first in the graph counts; of those that begin together, the one of the
  earlier alternative.
- Globs and regular expressions are over the names of calls: the operation (``"gelu"``, ``"linear"``), the function as
  printed and in full (``"F.gelu"``, ``"torch._C._nn.gelu"``), and of modules path and class (``"self.query"`` is
  ``"query"``).
"""

from __future__ import annotations

from slapo_graph.patterns.vocabulary import any_constant, any_of, any_op, call_module, capture, optional, where

__all__ = ["any_constant", "any_of", "any_op", "call_module", "capture", "optional", "where"]
