"""Collect the inputs that determine samples and verdicts. Their hashes name the batches.

Verdicts have a separate key that adds the scoring inputs, so new rewards do not need new samples.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launch.core.json_files import sha256
from recipes.data.data_load import run_texts
from recipes.models.model_build import model_directory
from recipes.rank.files import json_sha256
from recipes.rewards.reward_functions import CODE_TESTS
from recipes.sampling.samples import Row
from recipes.training.checkpoint import HEARTBEAT

RECIPES = Path(__file__).parents[1]
SAMPLING = (
    *("seed", "engine", "samples_per_prompt", "batch_size", "max_new_tokens"),
    *("temperature", "top_p", "top_k", "use_cpu", "chat_template_kwargs"),
)
SCORING = ("math-verify", "latex2sympy2_extended", "sympy", "reasoning-gym")  # packages that score


def samples_key(config: DictConfig, args: Any, rows: list[Row], model: Any) -> dict[str, Any]:
    """Return all inputs that determine samples; `model` is the result of model_identity."""
    packages = ("torch", "transformers", *(["vllm"] if args.engine == "vllm" else []))
    template = config.model.chat_template or config.data.chat_template
    precision, topology = config.precision, config.topology
    engine = [topology.server_max_length, OmegaConf.to_container(topology.server_args)]
    return {
        "model": model,
        "template": template and sha256(Path(template)),
        "rows": json_sha256(rows),  # prompts and columns for rewards
        "sampling": {name: getattr(args, name) for name in SAMPLING},
        "engine": engine if args.engine == "vllm" else None,
        "precision": [precision.compute, precision.weights, config.hardware.attention],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "code": {
            name: sha256(RECIPES / folder / name)
            for folder, name in (
                *(("sampling", "generation.py"), ("models", "model_build.py")),
                ("data", "data_messages.py"),
            )
        },
    }


def verdicts_key(config: DictConfig, samples: dict[str, Any]) -> dict[str, Any]:
    """Return all inputs that determine verdicts: the samples' key, rewards and their code."""
    files = [
        *(RECIPES / "rewards").glob("*.py"),
        *(RECIPES / "data" / name for name in ("tasks.py", "code_tasks.py", "cups.py")),
    ]
    code = {file.name: sha256(file) for file in sorted(files)}
    for name in config.method.rewards:
        spec = importlib.util.find_spec(name.rpartition(".")[0]) if "." in name else None
        code |= {name: sha256(Path(spec.origin))} if spec is not None and spec.origin else {}
    method = OmegaConf.to_container(config.method)
    scoring = {k: v for k, v in method.items() if k.startswith("reward") or k == "sandbox"}
    versions = {name: importlib.metadata.version(name) for name in SCORING}
    runs_code = CODE_TESTS in config.method.rewards
    return {
        "samples": json_sha256(samples),
        "rewards": scoring,
        "code": code,
        "versions": {"python": platform.python_version(), **versions},
        "sandbox_image": config.get("sandbox_image") if runs_code else None,
    }


def model_identity(config: DictConfig) -> Any:
    """Return hashes of the model's files, its commit on the hub, or inputs of random weights."""
    directory, model = model_directory(config), config.model
    if model.init == "random" and model.path is None:  # even if the weights were written for vLLM
        return {
            **OmegaConf.to_container(model),
            "seed": config.seed,
            "texts": json_sha256(run_texts(config)),
        }
    if directory is not None:
        beat = Path(config.run_dir) / HEARTBEAT
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): sha256(path, beat) for path in files}
    return [model.hub_id, model.revision]
