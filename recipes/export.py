"""Export a trained model as safetensors with tokenizer and model card, and optionally as GGUF.

The launcher starts this program, one process without a GPU:

    1 GPU:   python launch/run.py method=export model.path=<run>
    8 GPUs:  the same, since the export uses no GPU
    With fp8 weights for vLLM, and with an adapter merged into its base:
             python launch/run.py method=export model.path=<run> method.args.weights=fp8
             python launch/run.py method=export model=qwen3_4b adapter=lora \\
                 adapter.path=<run>/adapter

Weights are converted one at a time, so memory holds at most one output file. For an adapter, memory
holds the complete model. The run directory gets model/ when all files are complete. Only with
method.args.push_to is the model uploaded to the hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import HfApi, snapshot_download
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from launch.core.errors import UserError
from recipes.models import adapters, model_card, quantize, vision
from recipes.models.model_build import build_model, build_tokenizer, whole_model
from recipes.models.shards import Shards, read_tensors
from recipes.rank.files import move_directory, staging, weights_sha256
from recipes.rank.names import name_field
from recipes.rank.program import Failed, Interrupted, main, say, stop_requested
from recipes.rewards import verify_isolated
from recipes.training import checkpoint

FORMATS = ("safetensors", "gguf")
GGUF = "model.gguf"
HEAD = "lm_head.weight"
OUTTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}  # llama.cpp's names
TOKEN = "HF_TOKEN"
BEAT_S = 30
# Environment variables of the converter, which gets no secrets such as the hub's token.
CONVERTER_VARIABLES = (*verify_isolated.PASSED_ON, "HOME", "TMPDIR", "USER", "LOGNAME")
POLL_S = 0.5  # between checks for a signal


@dataclass
class ExportConfig:
    """Arguments of method=export.

    With `weights` null, weights keep their dtype. Safetensors is always written, and `formats` may
    add gguf, which needs llama.cpp's convert_hf_to_gguf.py as `gguf_converter`. For the model card,
    `license` is the hub's name of the license, and `results_from` is an evaluation run. `push_to`
    is owner/name on the hub.
    """

    weights: str | None = name_field(lambda: quantize.NAMES, default=None)
    formats: list[str] = name_field(lambda: FORMATS, default=["safetensors"])
    gguf_converter: str | None = None
    license: str | None = None
    results_from: str | None = None
    push_to: str | None = None
    push_private: bool = True


def export(config: DictConfig) -> dict[str, Any]:
    args, run_dir = ExportConfig(**config.trainer_args), Path(config.run_dir)
    with heartbeat(run_dir / checkpoint.HEARTBEAT):
        target = run_dir / "model"
        staged = target.with_name(f".{target.name}.staging")
        shutil.rmtree(staged, ignore_errors=True)  # from an interrupted attempt
        with staging(staged):
            result = write_model(config, args, staged)
        move_directory(staged, target)
        if "gguf" in args.formats:
            result["gguf"] = str(target / GGUF)
        result = {"model": str(target), "weights": args.weights, **result}
        result["weights_sha256"] = weights_sha256(target)
        say(f"done: {result['model_bytes'] / 1e9:.3g} GB in {target}")
        if args.push_to:
            result["pushed_to"] = push(target, args, result)
    return result


def write_model(config: DictConfig, args: ExportConfig, staged: Path) -> dict[str, Any]:
    """Write the model and its card into `staged`; return figures for result.json.

    Raises UserError for a damaged model or an adapter of another base, Failed, and Interrupted.
    """
    provenance = OmegaConf.to_container(config.provenance)
    source, result = None if config.adapter.path else find_source(config), {}
    if source is not None:
        check_complete(source, provenance["runs"])
    tokenizer = find_tokenizer(config)
    staged.mkdir()
    if source is not None:
        tensors = read_tensors(source)
        for name in ("config.json", "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, staged / name)
    else:
        model, result["merge_error"] = adapters.merge(build_model(config), None)
        model.config.save_pretrained(staged)
        model.generation_config.save_pretrained(staged)
        tied = model.config.tie_word_embeddings  # then the head shares this tensor
        tensors = (item for item in model.state_dict().items() if not (tied and item[0] == HEAD))
        if whole := whole_model(config, model.config):
            tensors = vision.restored(tensors, whole)
            vision.restore_configs(staged, whole, staged)
    result = {**write_weights(tensors, staged, args.weights), **result}
    tokenizer.save_pretrained(staged)
    if "gguf" in args.formats:
        convert_to_gguf(staged, args)
    facts = {"weights": args.weights, "chat_template": bool(tokenizer.chat_template), **result}
    facts["files"] = ["safetensors", f"{GGUF}, for llama.cpp"][: 1 + ("gguf" in args.formats)]
    title = args.push_to or config.name or staged.parents[1].name
    license_name = args.license or model_card.read_license(source or staged)
    model = OmegaConf.to_container(config.model)
    card = model_card.card(title, license_name, model, provenance, facts)
    (staged / "README.md").write_text(card, encoding="utf-8")
    return result


def find_source(config: DictConfig) -> Path:
    """Return the model's directory; download it from the hub if necessary. Raises UserError."""
    model = config.model
    if model.path:
        return Path(model.path)
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md"]
    try:
        return Path(
            snapshot_download(model.hub_id, revision=model.revision, allow_patterns=patterns)
        )
    except (OSError, httpx.HTTPError) as error:
        raise UserError(
            f"model.hub_id={model.hub_id}, revision {model.revision}: download failed: "
            f"{first_line(error)} Use model.path=<directory>."
        ) from error


def find_tokenizer(config: DictConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the adapter if it has one, unless a chat template is configured."""
    has_tokenizer = (
        config.adapter.path and (Path(config.adapter.path) / "tokenizer_config.json").is_file()
    )
    if has_tokenizer and not (config.model.chat_template or config.data.chat_template):
        return AutoTokenizer.from_pretrained(config.adapter.path, trust_remote_code=False)
    return build_tokenizer(config, [])


def check_complete(source: Path, runs: list[dict[str, Any]]) -> None:
    """Raise UserError if a checkpoint or model is incomplete or was changed."""
    problem = None
    if (source / checkpoint.MANIFEST).is_file():
        problem = checkpoint.find_error(source)
    else:
        expected = runs[0]["result"].get("weights_sha256") if runs else None
        if expected and weights_sha256(source) != expected:
            problem = f"its weights differ from the weights saved by the run {runs[0]['run']}"
    if problem:
        raise UserError(
            f"model.path={source} is incomplete or was changed: {problem}. "
            "Use another checkpoint, or repeat the training."
        )


def write_weights(
    tensors: Iterator[tuple[str, torch.Tensor]], staged: Path, weights: str | None
) -> dict[str, Any]:
    """Write weights and their configuration, and return figures for result.json.

    Raises UserError if the model does not support `weights`, and Interrupted.
    """
    file = staged / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if weights is not None and content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "an unknown method")
        raise UserError(
            f"method.args.weights={weights}: the model is already quantized ({method}). "
            "Use method.args.weights=null, or export the original model."
        )
    convert, shards = quantize.Converter(weights), Shards(staged)
    for name, tensor in tensors:
        if stop_requested():
            raise Interrupted()
        for new, converted in convert(name, tensor).items():
            shards.add(new, converted)
    shards.close()
    if weights in quantize.EIGHT_BITS and not convert.num_quantized:
        raise UserError(
            f"method.args.weights={weights}: cannot quantize this model, because none of its "
            "linear layers has a known name. Use method.args.weights=bf16."
        )
    text = json.dumps(quantize.served_config(content, weights), indent=2)
    file.write_text(f"{text}\n", encoding="utf-8")
    return {"model_bytes": shards.num_bytes, **convert.figures()}


def convert_to_gguf(staged: Path, args: ExportConfig) -> None:
    """Write model.gguf with llama.cpp's converter in a separate process.

    Raises Interrupted, and Failed with the converter's last line.
    """
    output = staged / GGUF
    outtype = OUTTYPES[args.weights] if args.weights else "auto"
    argv = [sys.executable, str(args.gguf_converter), str(staged)]
    argv += ["--outfile", str(output), "--outtype", outtype]
    say(f"converting: {' '.join(argv[1:])}")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {name: os.environ[name] for name in CONVERTER_VARIABLES if name in os.environ}
    with subprocess.Popen(argv, env=env, **pipes, text=True, errors="replace") as process:
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # communicate() keeps the output
                output_text, _ = process.communicate(timeout=POLL_S)
            if stop_requested():
                process.kill()
                raise Interrupted()
    if process.returncode != 0 or not output.is_file():
        last = (output_text.strip() or "no output").splitlines()[-1]
        raise Failed(
            f"{args.gguf_converter} wrote no {GGUF} (exit code {process.returncode}): {last}"
        )


def push(folder: Path, args: ExportConfig, result: dict[str, Any]) -> str:
    """Upload the model, and return the commit's URL. Raises Failed if the upload fails."""
    hub = HfApi(token=os.environ[TOKEN])
    try:
        hub.create_repo(args.push_to, private=args.push_private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=args.push_to, folder_path=folder, commit_message="Export"
        )
        return str(commit)
    except (OSError, httpx.HTTPError) as error:  # the hub's own errors are subclasses of these
        raise Failed(
            f"method.args.push_to={args.push_to}: upload failed: {first_line(error)} "
            f"The exported model is in {folder}.",
            **result,
        ) from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__  # httpx's timeouts have no message


@contextlib.contextmanager
def heartbeat(file: Path) -> Iterator[None]:
    """Touch `file` regularly, so that the watchdog does not stop long downloads and merges."""
    done = threading.Event()

    def touch() -> None:
        while not done.wait(BEAT_S):
            file.touch()

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main(export)
