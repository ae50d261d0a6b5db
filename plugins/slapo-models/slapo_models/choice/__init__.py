"""Choose mesh, micro-batches, checkpoints and stages by predicted time under a limit of memory."""
