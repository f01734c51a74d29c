"""debug=memory_fault: what a process is given so that a fault names its kernel."""

from __future__ import annotations

import pytest

from launch.plan import process_env
from launch.schema.plan import Setting
from tests.conftest import composed, host_with

AMD = {
    "HSA_TOOLS_LIB": "/opt/rocm/lib/librocm-debug-agent.so.2", "HSA_TOOLS_REPORT_LOAD_FAILURE": "1",
    "HSA_ENABLE_DEBUG": "1", "AMD_SERIALIZE_KERNEL": "3", "AMD_SERIALIZE_COPY": "3",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "1", "HSA_DISABLE_FRAGMENT_ALLOCATOR": "1",
}  # fmt: skip
NVIDIA = {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def settings(tmp_path, *overrides: str, **environ: str) -> dict[str, Setting]:
    config = composed("method=sft", "model=qwen3_0_6b", *overrides)
    return {
        s.name: s
        for s in process_env.settings(config, host_with(1, **environ), "trainer", [0], tmp_path)
    }


@pytest.mark.parametrize(
    ("hardware", "ours", "others"),
    [("mi300x", AMD, NVIDIA), ("strix_halo", AMD, NVIDIA), ("h200", NVIDIA, AMD)],
)
def test_what_a_vendor_needs(tmp_path, hardware, ours, others):
    found = settings(tmp_path, f"hardware={hardware}", "topology=single", "debug=memory_fault")
    assert {name: found[name].value for name in ours} == ours
    assert not set(others) & set(found)
    assert all(found[name].reason.startswith("debug=memory_fault: ") for name in ours)
