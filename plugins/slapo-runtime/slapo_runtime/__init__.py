"""What running a slapo schedule needs: build, state dicts, checkpoints, initialization, ranks, and target "torch"."""
