"""Test that each row of meanings.yaml matches its real messages, and no harmless lines."""

from __future__ import annotations

import re

import pytest

from launch.config.request import Request
from launch.execution.meaning import explain, table

MEAN_NOTHING = [
    "",
    "step 40/400  loss 0.912  reward 0.512  12,345 tok/s  eta 1:05",
    "KeyError: 'prompt'",
    "INFO 11-21 14:00:00 [gpu_worker.py:298] Available KV cache memory: 61.21 GiB",
    "[rank0]:[W1121 ProcessGroupNCCL.cpp:1476] Warning: destroy_process_group() was not called "
    "before program exit",
    "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>, timeout 20",
    "W1121 14:13:17 torch/distributed/elastic/multiprocessing/api.py:1047] Unable to shutdown "
    "process 2962 via 15, killing via 9",
    "exitcode  : 1 (pid: 2963)",
    "urllib3: 429 Client Error: Too Many Requests for url: https://tracker.example.org/api",
    "bash: /opt/run.sh: Permission denied",
    "Fatal Python error: Illegal instruction",
    "downloading https://huggingface.co/Qwen/Qwen3-0.6B/resolve/main/model.safetensors",
]


@pytest.mark.parametrize("row", table(), ids=lambda row: row["patterns"][0])
def test_real_messages_are_explained_by_their_row(row):
    """No row is hidden by earlier rows that match its messages."""
    assert row["examples"]
    for message in row["examples"]:
        lines = ["Traceback (most recent call last):", *message.splitlines(), "  and more after it"]
        assert explain(lines) == row["means"]


@pytest.mark.parametrize("line", MEAN_NOTHING)
def test_a_harmless_line_has_no_explanation(line):
    assert explain([line]) is None


def test_remedies_are_overrides_that_exist():
    overrides = [
        pair
        for row in table()
        for pair in re.findall(r"(?<![/\w])([a-z_]+(?:\.\w+)*)=(\w*)", row["means"])
        if pair[0] not in ("iommu", "size")  # options of the kernel and of mount
    ]
    assert {"debug", "container", "topology.server_max_length"} <= dict(overrides).keys()
    for key, value in overrides:
        option = "rocm" if key == "container" else 1  # a group takes one of its options
        assert Request([f"{key}={value if value not in ('', 'N') else option}"]).checked()
