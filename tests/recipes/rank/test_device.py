"""Test that a rank is bound to the cores that torch chooses for its GPU."""

from __future__ import annotations

import os

import pytest
from torch.numa import binding as numa

from launch.core.errors import UserError
from recipes.rank.device import bind_to_cores


@pytest.mark.parametrize("policy", ["node", "socket", "exclusive", "core_complex"])
def test_every_thread_of_the_process_is_bound(monkeypatch, policy):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(numa, "_get_gpu_count", lambda: 1)
    monkeypatch.setattr(numa, "_get_numa_node_index_for_gpu_index", lambda **_: 0)
    monkeypatch.setattr(
        numa, "_get_allowed_logical_cpu_indices_for_numa_node", lambda **_: {min(before)}
    )
    try:
        assert "1 core(s)" in bind_to_cores(policy, 0)
        threads = os.listdir("/proc/self/task")
        assert {frozenset(os.sched_getaffinity(int(thread))) for thread in threads} == {
            frozenset({min(before)})
        }
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)


def test_unknown_cores_are_a_user_error(monkeypatch):
    # The error of a set of no cores comes from the operating system.
    monkeypatch.setattr(numa, "_get_logical_cpus_to_bind_to", lambda **_: set())
    with pytest.raises(UserError, match="topology.numa_binding=null"):
        bind_to_cores("node", 0)
