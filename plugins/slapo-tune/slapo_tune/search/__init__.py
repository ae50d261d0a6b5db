"""The loop: propose, prune, run, log."""
