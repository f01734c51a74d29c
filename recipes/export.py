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
import time
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
from recipes.models.shards import Shards, stored
from recipes.rank.files import move_directory, weights_sha256
from recipes.rank.names import named
from recipes.rank.program import Failed, Interrupted, main, say, stop_asked
from recipes.rewards import verify_isolated
from recipes.training import checkpoint

FORMATS = ("safetensors", "gguf")
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

    weights: str | None = named(lambda: quantize.NAMES, default=None)
    formats: list[str] = named(lambda: FORMATS, default=["safetensors"])
    gguf_converter: str | None = None
    license: str | None = None
    results_from: str | None = None
    push_to: str | None = None
    push_private: bool = True


def export(config: DictConfig) -> dict[str, Any]:
    args = ExportConfig(**config.trainer_args)
    run_dir = Path(config.run_dir)
    beat, target = run_dir / checkpoint.HEARTBEAT, run_dir / "model"
    provenance = OmegaConf.to_container(config.provenance)
    source = None
    if not config.adapter.path:
        with beating(beat):
            source = find_source(config)
        check_whole(source, provenance["runs"], beat)
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)  # from an attempt that was stopped
    staged.mkdir()
    tokenizer = find_tokenizer(config)
    if source is None:
        with beating(beat):
            tensors, merged = merge_adapter(config, staged)
    else:
        tensors, merged = stored(source), {}
        for name in ("config.json", "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, staged / name)
    written = {**write_weights(tensors, staged, args.weights, beat), **merged}
    tokenizer.save_pretrained(staged)
    if "gguf" in args.formats:
        written["gguf"] = str(target / convert_to_gguf(staged, args, beat).name)
    title = args.push_to or config.name or run_dir.parent.name
    licence = args.license or model_card.stated_license(source or staged)
    facts = {"weights": args.weights, "chat_template": bool(tokenizer.chat_template), **written}
    facts["files"] = ["safetensors", *(["model.gguf, for llama.cpp"] if "gguf" in facts else [])]
    facts.pop("gguf", None)
    model = OmegaConf.to_container(config.model)
    card = model_card.card(title, licence, model, provenance, facts)
    (staged / "README.md").write_text(card, encoding="utf-8")
    move_directory(staged, target)
    result = {"model": str(target), "weights": args.weights, **written}
    result["weights_sha256"] = weights_sha256(target, beat)
    say(f"done: {written['model_bytes'] / 1e9:.3g} GB in {target}")
    if args.push_to:
        with beating(beat):
            result["pushed_to"] = push(target, args, result)
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


def check_whole(source: Path, runs: list[dict[str, Any]], beat: Path) -> None:
    """Raise UserError if a checkpoint or a model differs from what its run wrote."""
    fault = None
    if (source / checkpoint.MANIFEST).is_file():
        fault = checkpoint.find_fault(source, beat)
    elif (
        runs
        and "weights_sha256" in runs[0]["result"]
        and weights_sha256(source, beat) != runs[0]["result"]["weights_sha256"]
    ):
        fault = f"its weights differ from those that run {runs[0]['run']} saved"
    if fault:
        raise UserError(
            f"model.path={source} is incomplete or was changed: {fault}. "
            "Use another checkpoint, or run the training again."
        )


def merge_adapter(
    config: DictConfig, staged: Path
) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any]]:
    """Return the base's weights with the adapter merged in, and {merge_error: rounding error}.

    Write the configuration into `staged`. Raises UserError if the adapter belongs to another base.
    """
    model, error = adapters.merge(build_model(config), None)
    model.config.save_pretrained(staged)
    model.generation_config.save_pretrained(staged)
    # A tied head is the same tensor as the embedding.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = ((name, weight) for name, weight in model.state_dict().items() if name not in tied)
    return tensors, {"merge_error": error}


def write_weights(
    tensors: Iterator[tuple[str, torch.Tensor]], staged: Path, weights: str | None, beat: Path
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
        if stop_asked():
            raise Interrupted()
        for new, converted in convert(name, tensor).items():
            shards.add(new, converted)
        beat.touch()
    shards.close()
    if weights in quantize.EIGHT_BITS and not convert.num_quantized:
        raise UserError(
            f"method.args.weights={weights}: the model has no linear layers known here. "
            "Use: method.args.weights=bf16."
        )
    served = json.dumps(quantize.served_config(content, weights), indent=2)
    file.write_text(f"{served}\n", encoding="utf-8")
    return {"model_bytes": shards.num_bytes, **convert.figures()}


def convert_to_gguf(staged: Path, args: ExportConfig, beat: Path) -> Path:
    """Write model.gguf with llama.cpp's converter, in a separate process, and return its path.

    Raises Failed with the converter's last line, and Interrupted.
    """
    output = staged / "model.gguf"
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
            if output.is_file() and time.time() - output.stat().st_mtime < BEAT_S:
                beat.touch()  # not of a hung converter, which the watchdog ends
            if stop_asked():
                process.kill()
                raise Interrupted()
    if process.returncode != 0 or not output.is_file():
        last = (printed.strip() or "no output").splitlines()[-1]
        raise Failed(
            f"{args.gguf_converter} wrote no model.gguf (exit code {process.returncode}): {last}"
        )
    return output


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
    """Touch `beat` during downloads, uploads and merges, which the watchdog cannot see."""
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
