"""Run ZeRO 0 to 3 over replicas, with tensor parallelism, without a pipeline."""
