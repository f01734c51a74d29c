"""List every check in the order of the report, and the short set that a run starts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.checks import (
    access,
    active,
    driver,
    host_settings,
    kernel_log,
    pci,
    shell_variables,
    state,
)
from launch.checks.facts import Facts
from launch.checks.finding import Finding


@dataclass(frozen=True)
class Check:
    name: str
    subject: str
    run: Callable[[Facts], Finding | None]  # returns None if it does not apply to this machine
    # "always" puts it in the short set; "local" only under runtime=local, since in a container the
    # image or the engine answers for it.
    before_run: str = ""


CHECKS = (
    Check("hardware", "GPUs", access.hardware_group),
    Check("gpus_found", "GPUs", access.gpus_found),
    Check("kfd", "GPUs", access.kfd_node, "local"),
    Check("render_nodes", "GPUs", access.render_nodes, "local"),
    Check("partition_mode", "GPUs", state.partition_mode, "always"),
    Check("memory_size", "GPUs", state.memory_size),
    Check("memory_occupied", "GPUs", state.memory_occupied, "always"),
    Check("foreign_processes", "GPUs", state.foreign_processes),
    Check("ras", "GPUs", state.ras),
    Check("temperature", "GPUs", state.temperature),
    Check("power_cap", "GPUs", state.power_cap),
    Check("gtt_size", "GPUs", state.gtt_size),
    Check("carved_memory", "GPUs", state.carved_memory),
    Check("amdgpu_driver", "Driver and firmware", driver.amdgpu_driver),
    Check("rocm", "Driver and firmware", driver.rocm_version),
    Check("kernel", "Driver and firmware", driver.kernel_version),
    Check("linux_firmware", "Driver and firmware", driver.linux_firmware),
    Check("gpu_firmware", "Driver and firmware", driver.gpu_firmware),
    Check("kernel_log", "Driver and firmware", kernel_log.kernel_log),
    Check("pcie", "Links", pci.pcie),
    Check("xgmi", "Links", pci.xgmi),
    Check("iommu", "Links", pci.iommu),
    Check("acs", "Links", pci.acs),
    Check("numa_balancing", "Host", host_settings.numa_balancing),
    Check("hugepages", "Host", host_settings.hugepages),
    Check("memlock", "Host", host_settings.memlock),
    Check("open_files", "Host", host_settings.open_files),
    Check("shm", "Host", host_settings.shm, "local"),
    Check("run_root_disk", "Host", host_settings.run_root_disk, "always"),
    Check("docker_disk", "Host", host_settings.docker_disk),
    Check("clock", "Host", host_settings.clock),
    Check("integrated_gpu", "Environment", shell_variables.integrated_gpu, "always"),
    Check("gfx_override", "Environment", shell_variables.gfx_override, "always"),
    Check("visibility_masks", "Environment", shell_variables.visibility_masks, "always"),
    Check("allocator", "Environment", shell_variables.allocator, "always"),
)

ACTIVE = "Active tests"
# Checks of a program that has run (launch/checks/measuring.py).
ACTIVE_CHECKS = (
    Check("active_tests", ACTIVE, active.ran),
    Check("torch_gpus", ACTIVE, active.torch_gpus),
    Check("gemm", ACTIVE, active.gemm),
    Check("gemm_rate", ACTIVE, active.gemm_rate),
    Check("gemm_fp32_output", ACTIVE, active.fp32_output),
    Check("xcd_clocks", ACTIVE, active.xcd_clocks),
    Check("copy_rate", ACTIVE, active.copy_rate),
    Check("all_reduce", ACTIVE, active.all_reduce),
    Check("all_reduce_rate", ACTIVE, active.all_reduce_rate),
)


def run(facts: Facts) -> dict[Check, Finding]:
    """Return the findings of every check that applies to this machine."""
    checks: tuple[Check, ...] = CHECKS
    if facts.active is not None:
        # Report tests that failed or were not run only once.
        whole = facts.active.measured and not facts.active.failed
        checks += ACTIVE_CHECKS if whole else ACTIVE_CHECKS[:1]
    return {check: finding for check in checks if (finding := check.run(facts)) is not None}


def before_run(facts: Facts, contained: bool) -> dict[str, Finding]:
    """Return the findings of the short set. A failure there would make a run fail."""
    when = ("always",) if contained else ("always", "local")
    chosen = (check for check in CHECKS if check.before_run in when)
    return {check.name: finding for check in chosen if (finding := check.run(facts)) is not None}
