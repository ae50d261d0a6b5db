"""The target ``"torch"``: a scheduled model in plain PyTorch, tensor-parallel and data-parallel."""
