"""Every check, in the order of the report, and the short set that a run starts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.checks import access, active, driver, environment, host, kernel_log, pci, state, strix_halo
from launch.checks.facts import Facts
from launch.checks.finding import Finding


@dataclass(frozen=True)
class Check:
    name: str
    subject: str
    run: Callable[[Facts], Finding | None]  # None: not about this machine
    # In the short set: "always"; "local", which the image or the engine answers for in a container. Empty: not in it.
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
    Check("gtt_size", "GPUs", strix_halo.gtt_size),
    Check("carved_memory", "GPUs", strix_halo.carved_memory),
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
    Check("numa_balancing", "Host", host.numa_balancing),
    Check("hugepages", "Host", host.hugepages),
    Check("memlock", "Host", host.memlock),
    Check("open_files", "Host", host.open_files),
    Check("shm", "Host", host.shm, "local"),
    Check("run_root_disk", "Host", host.run_root_disk, "always"),
    Check("docker_disk", "Host", host.docker_disk),
    Check("clock", "Host", host.clock),
    Check("integrated_gpu", "Environment", environment.integrated_gpu, "always"),
    Check("gfx_override", "Environment", environment.gfx_override, "always"),
    Check("visibility_masks", "Environment", environment.visibility_masks, "always"),
    Check("allocator", "Environment", environment.allocator, "always"),
)

ACTIVE = "Active tests"
ACTIVE_CHECKS = (  # of a program that has run: launch/checks/measuring.py
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
    """What every check says that is about this machine."""
    return _found(facts, CHECKS + _of_active(facts))


def _of_active(facts: Facts) -> tuple[Check, ...]:
    """One that failed, or was not run, says so once."""
    if facts.active is None:
        return ()
    return ACTIVE_CHECKS if facts.active.measured and not facts.active.failed else ACTIVE_CHECKS[:1]


def before_run(facts: Facts, contained: bool) -> dict[str, Finding]:
    """The short set, by name: cheap, and what it finds would make a run fail."""
    chosen = tuple(check for check in CHECKS if check.before_run == "always" or (check.before_run == "local" and not contained))
    return {check.name: finding for check, finding in _found(facts, chosen).items()}


def _found(facts: Facts, checks: tuple[Check, ...]) -> dict[Check, Finding]:
    return {check: finding for check in checks if (finding := check.run(facts)) is not None}
