"""Ready patterns: operations that models write out, in the ways in which transformers and plain PyTorch code do.

``sch.find("fusion.sdpa")`` uses one by its name; ``slapo patterns list`` shows all, ``slapo patterns show fusion.sdpa``
one with its forms. A pattern finds nothing inside of a module that is a call in the graph: trace with ``flatten=True``.
"""
