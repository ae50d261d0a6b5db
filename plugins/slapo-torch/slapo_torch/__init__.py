"""Target ``"torch"``: a scheduled model in plain PyTorch, over tensor-parallel ranks, replicas and pipeline stages.

It imports what any dialect may: public names of slapo-core, and the modules of slapo-runtime that its docstring lists.
"""
