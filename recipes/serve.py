"""Serve a model with vLLM's OpenAI-compatible API until the launcher is stopped.

The launcher starts this program, one process for all GPUs:

    1 GPU:   python launch/run.py hardware=mi350x topology=single method=serve model=qwen3_4b
    8 GPUs:  python launch/run.py hardware=mi350x method=serve model=qwen3_4b
             (8 replicas behind one address; topology.server_tensor_parallel=8 is one replica on 8)
    The model of a run:
             python launch/run.py method=serve model.path=<run> method.args.port=9000

It checks the server's health every few seconds. If the server exits, the run fails; if it stops
answering, the launcher's watchdog ends it after runtime.hang_timeout_s.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from launch.core.vllm_flags import flags
from recipes.bench import vllm_programs
from recipes.rank.device import compute_dtype
from recipes.rank.program import Failed, main, say, stop_requested
from recipes.sampling.generation import engine_args, run_tokenizer, vllm_source
from recipes.training.checkpoint import HEARTBEAT

LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"
POLL_S, HEALTH_EVERY_S = 0.2, 5.0
STOP_TIMEOUT_S = 30.0  # from SIGTERM to SIGKILL


@dataclass
class ServeConfig:
    """Arguments of method=serve. `model_name` is the name that clients send; null: the model's.

    `chat_template_kwargs` are the template's variables for requests that do not set them.
    """

    host: str = LOOPBACK
    port: int = 8000
    model_name: str | None = None
    use_cpu: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def serve(config: DictConfig) -> dict[str, Any]:
    args = ServeConfig(**config.trainer_args)
    argv = command(config, args)
    say(" ".join(argv))
    started = time.monotonic()
    with subprocess.Popen(argv, env=vllm_programs.environment({}, 0, num_gpus())) as server:
        try:
            watch(server, config, args)
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_TIMEOUT_S)
            server.kill()
    return {"time_s": time.monotonic() - started}


def command(config: DictConfig, args: ServeConfig) -> list[str]:
    """Return vLLM's command. topology.server_args replaces its other arguments."""
    topology, on_cpu = config.topology, args.use_cpu
    source, revision = vllm_source(config, run_tokenizer(config))
    cache_gb, width = topology.server_cache_gb, topology.server_tensor_parallel
    arguments = {
        "revision": revision,
        # A container's loopback cannot be published, so its port is published on args.host.
        "host": ALL if is_published(config) else args.host,
        "port": args.port,
        "served_model_name": args.model_name or config.model.name,
        "dtype": str(compute_dtype(config)).removeprefix("torch."),
        "tensor_parallel_size": width,
        "data_parallel_size": max(1, num_gpus() // width),
        "gpu_memory_utilization": None if on_cpu else topology.server_memory_share,
        "kv_cache_memory_bytes": int(cache_gb * 1e9) if cache_gb else None,
        "max_model_len": topology.server_max_length,
        "default_chat_template_kwargs": dict(args.chat_template_kwargs) or None,
        "seed": config.seed,
        "enforce_eager": on_cpu or None,
        "disable_uvicorn_access_log": True,
        **engine_args(config),
    }
    return [*vllm_programs.program(config), "serve", source, *flags(arguments)]


def is_published(config: DictConfig) -> bool:
    """Return whether the server runs in a container with its own network."""
    runtime = config.runtime
    return vllm_programs.runtime_on_node(config) == "docker" and runtime.network != "host"


def num_gpus() -> int:
    """Return the number of GPUs in this process's mask; 1 on a CPU."""
    masks = [os.environ[name] for name in vllm_programs.MASKS if os.environ.get(name)]
    return len(masks[0].split(",")) if masks else 1


def watch(server: subprocess.Popen, config: DictConfig, args: ServeConfig) -> None:
    """Check the server's health until the launcher stops this run. Raises Failed if it exits."""
    host = LOOPBACK if args.host == ALL or is_published(config) else args.host
    address, is_up, checked = f"http://{args.host}:{args.port}", False, 0.0
    while not stop_requested():
        if server.poll() is not None:
            raise Failed(f"vLLM exited with code {server.returncode}. Its output is above.")
        if time.monotonic() - checked >= HEALTH_EVERY_S:
            checked = time.monotonic()
            if vllm_programs.is_healthy(args.port, host):
                # The launcher's watchdog ends a run without new heartbeats.
                (Path(config.run_dir) / HEARTBEAT).touch()
                if not is_up:
                    say(f"serving at {address}/v1; health: {address}/health; Ctrl-C stops")
                is_up = True
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(serve)
