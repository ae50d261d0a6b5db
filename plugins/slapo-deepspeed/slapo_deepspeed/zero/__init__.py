"""Without a pipeline: ZeRO 0 to 3 over the replicas, tensor parallelism through the mesh."""
