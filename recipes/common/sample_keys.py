"""What decides which samples are drawn, and what becomes of them: the hashes under which batches and their verdicts lie.

Whatever a difference of could change a sample stands in the samples' key; what could change a verdict, in the verdicts', on top of the
samples'. So another verifier costs no sampling, and nothing that was made for other work is taken.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from recipes.common.checkpoint import HEARTBEAT
from recipes.common.data import load_train, texts
from recipes.common.errors import UserError
from recipes.common.files import json_sha256, sha256
from recipes.common.model import model_directory
from recipes.common.rewards import CODE_TESTS
from recipes.common.samples import Row

if TYPE_CHECKING:
    from recipes.common.batches import Asked

COMMON = Path(__file__).parent
SAMPLING = ("seed", "engine", "samples_per_prompt", "batch_size", "max_new_tokens", "temperature", "top_p", "top_k", "use_cpu")
JUDGING = ("math-verify", "latex2sympy2_extended", "sympy", "reasoning-gym")  # packages
COMMIT = re.compile(r"[0-9a-f]{40}")


def samples_key(config: DictConfig, args: Asked, rows: list[Row], model: Any) -> dict[str, Any]:
    """All that decides what is sampled. Versions too: another kernel draws other tokens. `model`: its model_identity."""
    packages = ("torch", "transformers", *(["vllm"] if args.engine == "vllm" else []))
    template = config.model.chat_template or config.data.chat_template
    return {
        "model": model,
        "template": template and sha256(Path(template)),  # in place of the tokenizer's own, which is among the model's files
        "rows": json_sha256(rows),  # prompts, and what the verifier reads beside them
        "sampling": {name: getattr(args, name) for name in SAMPLING},
        "precision": [config.precision.compute, config.precision.weights, config.hardware.attention],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "code": {name: sha256(COMMON / name) for name in ("generation.py", "model.py")},
    }


def verdicts_key(config: DictConfig, samples: dict[str, Any]) -> dict[str, Any]:
    """The samples' key, the rewards with their arguments, and the code that they and the scorers are made of.

    `sandbox_image`: of code_tests, the id of the image that the sandbox's containers are made of, as the launcher found it.
    """
    files = [*COMMON.glob("verify*.py"), *(COMMON / name for name in ("rewards.py", "answers.py", "tasks.py", "cups.py"))]
    code = {file.name: sha256(file) for file in sorted(files)}
    for name in config.method.rewards:
        spec = importlib.util.find_spec(name.rpartition(".")[0]) if "." in name else None
        code |= {name: sha256(Path(spec.origin))} if spec is not None and spec.origin else {}
    asked = OmegaConf.to_container(config.method)
    return {
        "samples": json_sha256(samples),
        "rewards": {name: value for name, value in asked.items() if name.startswith("reward") or name == "sandbox"},
        "code": code,
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in JUDGING}},
        "sandbox_image": config.get("sandbox_image") if CODE_TESTS in config.method.rewards else None,
    }


def model_identity(config: DictConfig) -> Any:
    """A directory by what is in its files, the hub's by its commit, random weights by what they and their tokenizer are drawn from.

    Raises UserError for a branch or a tag of the hub, which may be another model tomorrow.
    """
    directory, model = model_directory(config), config.model
    if model.init == "random" and model.path is None:  # also where vLLM has had them written
        return {**OmegaConf.to_container(model), "seed": config.seed, "texts": json_sha256(texts(load_train(config.data, "sft")))}
    if directory is not None:
        beat = Path(config.run_dir) / HEARTBEAT
        return {str(p.relative_to(directory)): sha256(p, beat) for p in sorted(directory.rglob("*")) if p.is_file()}
    if not COMMIT.fullmatch(model.revision or ""):
        raise UserError(
            f"model.revision={model.revision}: samples are kept under the model that they are of, so a commit of the hub is needed, 40 "
            "hexadecimal digits; or model.path=<directory>."
        )
    return [model.hub_id, model.revision]
