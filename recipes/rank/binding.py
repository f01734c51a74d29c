"""Bind ranks to the cores next to their GPUs (topology.numa_binding), as torch chooses them.

torchrun's --numa-binding needs the program numactl, which images and small machines do not have.
"""

from __future__ import annotations

from launch.core.errors import UserError


def bind(binding: str, local_rank: int) -> str:
    """Bind all threads of this process and its future children; return a line with the cores.

    Raises UserError if /sys does not list the cores, or if none is left for this rank.
    """
    try:
        from torch.numa import binding as numa  # missing before torch 2.9

        options = numa.NumaOptions(numa.AffinityMode(binding.replace("_", "-")))
        cores = numa._get_logical_cpus_to_bind_to(gpu_index=local_rank, numa_options=options)
        numa._bind_all_threads_in_current_process_to_logical_cpus(logical_cpu_indices=cores)
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"topology.numa_binding={binding}: the cores next to GPU {local_rank} are unknown or "
            f"not allowed here ({error}). Use: topology.numa_binding=null."
        ) from error
    return (
        f"topology.numa_binding={binding}: {len(cores)} core(s) from {min(cores)} to "
        f"{max(cores)}, next to GPU {local_rank}"
    )
