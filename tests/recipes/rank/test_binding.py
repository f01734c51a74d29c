"""Test the cores of a rank on a machine of two processors, four NUMA nodes and hyperthreads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.core.errors import UserError
from recipes.rank import binding

# Processors of 8 physical cores; core n has the second thread n + 16. A node is 4 of them, an L3
# cache 2.
THREADS = 32
# Two next to each node.
GPUS = [f"0000:{bus:02x}:00.0" for bus in (0x05, 0x26, 0x46, 0x65, 0x85, 0xA6, 0xC6, 0xE5)]


def listed(cores: set[int]) -> str:
    return ",".join(str(core) for core in sorted(cores)) + "\n"


@pytest.fixture
def machine(tmp_path) -> Path:
    for core in range(THREADS):
        physical = core % 16
        cpu = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        (cpu / "cache/index3").mkdir(parents=True)
        (cpu / "topology").mkdir()
        (cpu / "topology/physical_package_id").write_text(f"{physical // 8}\n")
        (cpu / "topology/thread_siblings_list").write_text(f"{physical},{physical + 16}\n")
        first = physical // 2 * 2
        (cpu / "cache/index3/shared_cpu_list").write_text(
            f"{first}-{first + 1},{first + 16}-{first + 17}\n"
        )
    for place, gpu in enumerate(GPUS):
        device = tmp_path / f"sys/bus/pci/devices/{gpu}"
        device.mkdir(parents=True)
        first = place // 2 * 4
        (device / "local_cpulist").write_text(f"{first}-{first + 3},{first + 16}-{first + 19}\n")
    return tmp_path


def of(
    machine: Path, policy: str, rank: int, allowed: range = range(THREADS), gpus: list[str] = GPUS
) -> set[int]:
    return set(binding.cores(policy, gpus, rank, frozenset(allowed), machine))


def test_a_rank_has_the_cores_of_its_node_or_processor(machine):
    assert of(machine, "node", 0) == of(machine, "node", 1) == {0, 1, 2, 3, 16, 17, 18, 19}
    assert of(machine, "node", 7) == {12, 13, 14, 15, 28, 29, 30, 31}
    assert of(machine, "socket", 2) == {*range(8), *range(16, 24)}


def test_ranks_next_to_the_same_cores_share_whole_physical_ones(machine):
    assert [of(machine, "exclusive", rank) for rank in (0, 1)] == [{0, 1, 16, 17}, {2, 3, 18, 19}]
    assert [of(machine, "core_complex", rank) for rank in (2, 3)] == [
        {4, 5, 20, 21},
        {6, 7, 22, 23},
    ]
    shares = [of(machine, "exclusive", rank) for rank in range(8)]
    assert sum(map(len, shares)) == len(set().union(*shares)) == THREADS
    # A split's trainers: alone on this node.
    assert of(machine, "exclusive", 0, gpus=GPUS[1:]) == {0, 1, 2, 3, 16, 17, 18, 19}


def test_more_ranks_than_caches_take_turns(machine):
    assert of(machine, "core_complex", 2, gpus=[GPUS[0]] * 3) == of(machine, "core_complex", 0)


def test_cores_that_the_process_may_not_use_are_left_alone(machine):
    assert of(machine, "node", 0, range(2)) == {0, 1}
    assert of(machine, "socket", 0, range(12)) == set(range(8))


@pytest.mark.parametrize(
    ("policy", "allowed", "gpus", "message"),
    [
        ("node", range(4, 8), GPUS, r"GPU 0000:05:00.0\. Use: topology.numa_binding=null"),
        ("exclusive", range(1), GPUS[:2], r"1 physical core\(s\) for 2 ranks next to them"),
        ("node", range(THREADS), ["0000:ff:00.0"], "topology.numa_binding: .*0000:ff:00.0"),
    ],
)
def test_binding_errors(machine, policy, allowed, gpus, message):
    with pytest.raises(UserError, match=message):
        of(machine, policy, 0, allowed, gpus)


def test_every_thread_of_the_process_is_bound(machine):
    before = os.sched_getaffinity(0)
    (machine / f"sys/bus/pci/devices/{GPUS[0]}/local_cpulist").write_text(f"{min(before)}\n")
    try:
        message = binding.bind("node", GPUS, 0, machine)
        threads = os.listdir("/proc/self/task")
        assert {frozenset(os.sched_getaffinity(int(thread))) for thread in threads} == {
            frozenset({min(before)})
        }
        assert (
            message
            == f"topology.numa_binding=node: 1 core(s) from {min(before)} to {min(before)}, "
            "next to GPU 0000:05:00.0"
        )
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)
