"""Test how the watchdog measures the progress of a run."""

from __future__ import annotations

import os

from launch.execution import watchdog


def test_progress_is_a_heartbeat_logged_lines_or_saved_bytes(tmp_path):
    assert (watchdog.steps_done(tmp_path), watchdog.bytes_saved(tmp_path)) == ((0, 0), 0)
    (tmp_path / "heartbeat").touch()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    os.utime(tmp_path / "heartbeat", ns=(0, 5000))
    folder = tmp_path / "checkpoints/.staging/checkpoint-4/pytorch_model_fsdp_0"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(10))
    (folder / "gone").symlink_to("nowhere")
    (tmp_path / ".model.staging").mkdir()
    (tmp_path / ".model.staging/model.safetensors").write_bytes(bytes(5))
    assert (watchdog.steps_done(tmp_path), watchdog.bytes_saved(tmp_path)) == ((5000, 3), 15)


def test_tokens_of_a_server():
    metrics = """
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="/a{b}c"} 1200.0
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 34.0
vllm:generation_tokens_total{engine="1",model_name="m"} 6.0
vllm:request_success_total{engine="0"} 5.0
"""
    assert watchdog.tokens(metrics) == 1240.0
    assert watchdog.tokens("") == 0.0
