"""Layouts of sharded tensors over a device mesh, meshes, and the devices of this process."""

from slapo_core.layout.devices import (
    accelerator,
    device_of,
    fork_rng,
    is_simulated,
    kernel_device,
    simulated_device,
    start_single_process_group,
    type_of_ranks,
)
from slapo_core.layout.mesh import DATA_DIMS, MESH_DIMS, Mesh, check_sizes, declare_mesh
from slapo_core.layout.sharding import Layout, ShardRange

__all__ = [
    "DATA_DIMS",
    "MESH_DIMS",
    "Layout",
    "Mesh",
    "ShardRange",
    "accelerator",
    "check_sizes",
    "declare_mesh",
    "device_of",
    "fork_rng",
    "is_simulated",
    "kernel_device",
    "simulated_device",
    "start_single_process_group",
    "type_of_ranks",
]
