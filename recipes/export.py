"""Export a trained model: safetensors in the served dtype, tokenizer, model card; GGUF; the hub.

Started by the launcher, one process without a GPU:

    1 GPU:   python launch/run.py method=export model.path=<run>
    8 GPUs:  the same, since it uses none of them
    In fp8 for vLLM, and with an adapter merged into its base:
             python launch/run.py method=export model.path=<run> method.args.weights=fp8
             python launch/run.py method=export model=qwen3_4b adapter=lora \\
                 adapter.path=<run>/adapter

Weights are converted one at a time, so memory holds one file; only an adapter's base is in memory
as a whole. The run directory's model/ appears once everything is on disk. Nothing is uploaded
without method.args.push_to.
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
from recipes.models import adapters, model_card, quantize
from recipes.models.model_build import build_model, build_tokenizer
from recipes.models.shards import Shards, read_tensors
from recipes.rank.files import move_directory, weights_sha256
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
# Environment variables passed to the converter, without the hub's token or other secrets.
PASSED_ON = (*verify_isolated.PASSED_ON, "HOME", "TMPDIR", "USER", "LOGNAME")
POLL_S = 0.5  # how soon a signal reaches the converter


@dataclass
class ExportConfig:
    """Arguments of method=export.

    `weights` null keeps their dtype. Of `formats`, safetensors is always written, and gguf needs
    `gguf_converter`, llama.cpp's convert_hf_to_gguf.py. `license` is the hub's name of the licence,
    for the card. The card quotes the evaluation run `results_from`. `push_to` is owner/name on the
    hub.
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
    with beating(run_dir / checkpoint.HEARTBEAT):
        target = run_dir / "model"
        staged = target.with_name(f".{target.name}.staging")
        shutil.rmtree(staged, ignore_errors=True)  # from an attempt that was stopped
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

    Raises UserError for a damaged model and an adapter of another base, Failed, and Interrupted.
    """
    provenance = OmegaConf.to_container(config.provenance)
    source, result = None if config.adapter.path else find_source(config), {}
    if source is not None:
        check_whole(source, provenance["runs"])
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
        tied = model.config.tie_word_embeddings  # if tied, the head is the embedding's tensor
        tensors = (item for item in model.state_dict().items() if not (tied and item[0] == HEAD))
    result = {**write_weights(tensors, staged, args.weights), **result}
    tokenizer.save_pretrained(staged)
    if "gguf" in args.formats:
        convert_to_gguf(staged, args)
    facts = {"weights": args.weights, "chat_template": bool(tokenizer.chat_template), **result}
    facts["files"] = ["safetensors", f"{GGUF}, for llama.cpp"][: 1 + ("gguf" in args.formats)]
    title = args.push_to or config.name or staged.parents[1].name
    licence = args.license or model_card.read_license(source or staged)
    model = OmegaConf.to_container(config.model)
    card = model_card.card(title, licence, model, provenance, facts)
    (staged / "README.md").write_text(card, encoding="utf-8")
    return result


def find_source(config: DictConfig) -> Path:
    """Return the model's directory, downloaded if it is on the hub. Raises UserError."""
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
            f"model {model.hub_id} at {model.revision}: download failed: {first_line(error)} "
            "Use: model.path=<directory>."
        ) from error


def find_tokenizer(config: DictConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the configured chat template, the adapter's, or the model's."""
    own = config.adapter.path and (Path(config.adapter.path) / "tokenizer_config.json").is_file()
    if own and not (config.model.chat_template or config.data.chat_template):
        return AutoTokenizer.from_pretrained(config.adapter.path, trust_remote_code=False)
    return build_tokenizer(config, [])


def check_whole(source: Path, runs: list[dict[str, Any]]) -> None:
    """Raise UserError if a checkpoint or a model differs from what its run wrote."""
    fault = None
    if (source / checkpoint.MANIFEST).is_file():
        fault = checkpoint.find_fault(source)
    else:
        expected = runs[0]["result"].get("weights_sha256") if runs else None
        if expected and weights_sha256(source) != expected:
            fault = f"its weights differ from those that run {runs[0]['run']} saved"
    if fault:
        raise UserError(
            f"model.path={source} is incomplete or was changed: {fault}. "
            "Use another checkpoint, or run the training again."
        )


def write_weights(
    tensors: Iterator[tuple[str, torch.Tensor]], staged: Path, weights: str | None
) -> dict[str, Any]:
    """Write weights and their configuration, and return figures for result.json.

    Raises UserError if `weights` does not suit the model, and Interrupted.
    """
    file = staged / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if weights is not None and content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "an unknown method")
        raise UserError(
            f"method.args.weights={weights}: the model is quantized already ({method}). "
            "Use the model that it was made from, or method.args.weights=null."
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
            f"method.args.weights={weights}: the model has no linear layers known here. "
            "Use: method.args.weights=bf16."
        )
    served = json.dumps(quantize.served_config(content, weights), indent=2)
    file.write_text(f"{served}\n", encoding="utf-8")
    return {"model_bytes": shards.num_bytes, **convert.figures()}


def convert_to_gguf(staged: Path, args: ExportConfig) -> None:
    """Write model.gguf with llama.cpp's converter, in a separate process.

    Raises Failed with the converter's last line, and Interrupted.
    """
    output = staged / GGUF
    outtype = OUTTYPES[args.weights] if args.weights else "auto"
    argv = [sys.executable, str(args.gguf_converter), str(staged)]
    argv += ["--outfile", str(output), "--outtype", outtype]
    say(f"converting: {' '.join(argv[1:])}")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    with subprocess.Popen(argv, env=env, **pipes, text=True, errors="replace") as process:
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # keeps the output
                printed, _ = process.communicate(timeout=POLL_S)
            if stop_requested():
                process.kill()
                raise Interrupted()
    if process.returncode != 0 or not output.is_file():
        last = (printed.strip() or "no output").splitlines()[-1]
        raise Failed(
            f"{args.gguf_converter} wrote no {GGUF} (exit code {process.returncode}): {last}"
        )


def push(folder: Path, args: ExportConfig, result: dict[str, Any]) -> str:
    """Upload the model, privately unless configured otherwise, and return the commit's URL.

    Raises Failed if the hub rejects it; the exported files stay.
    """
    hub = HfApi(token=os.environ[TOKEN])
    try:
        hub.create_repo(args.push_to, private=args.push_private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=args.push_to, folder_path=folder, commit_message="Export"
        )
        return str(commit)
    except (OSError, httpx.HTTPError) as error:  # the hub's own errors are subclasses of these
        raise Failed(
            f"the model is in {folder}, but pushing to {args.push_to} failed: {first_line(error)}",
            **result,
        ) from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__  # httpx's timeouts have no message


@contextlib.contextmanager
def beating(beat: Path) -> Iterator[None]:
    """Touch `beat`, since the watchdog cannot see downloads, uploads and merges."""
    done = threading.Event()

    def touch() -> None:
        while not done.wait(BEAT_S):
            beat.touch()

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main(export)
