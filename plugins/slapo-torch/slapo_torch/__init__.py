"""Target ``"torch"``: a scheduled model in plain PyTorch.

It imports what any dialect may: public names of slapo-core, and the modules of slapo-runtime that its docstring lists.
"""
