"""A trained model as others take it: safetensors in the dtype it is served in, tokenizer, chat template, a model card; GGUF; the hub.

Started by the launcher, one process without a GPU:

    1 GPU:   python launch/run.py method=export model.path=<run>
    8 GPUs:  the same: it uses none of them
    For vLLM in fp8, and an adapter merged into its base:
             python launch/run.py method=export model.path=<run> method.args.weights=fp8
             python launch/run.py method=export adapter=lora adapter.path=<run>/adapter model=qwen3_4b

Weights pass one at a time, so memory holds a file of them; only an adapter's base is in memory as a whole. What is written stands in the
run directory's model/ when all of it has reached the disk, and not before. Nothing is sent anywhere unless method.args.push_to says where.
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

from recipes.common import adapters, checkpoint, model_card, quantize, verify_isolated
from recipes.common.errors import UserError
from recipes.common.files import move_directory, weights_sha256
from recipes.common.model import build_model, build_tokenizer
from recipes.common.names import Arguments, named
from recipes.common.program import Failed, Interrupted, main, say, stop_asked
from recipes.common.shards import Shards, stored

FORMATS = ("safetensors", "gguf")
OUTTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}  # of llama.cpp's converter
TOKEN = "HF_TOKEN"
BEAT_S = 30
# Of the environment, what the converter gets: no token of the hub, nor a secret by any other name.
PASSED_ON = (*verify_isolated.PASSED_ON, "HOME", "TMPDIR", "USER", "LOGNAME")
POLL_S = 0.5  # how soon a converter that runs hears of a signal


@dataclass
class ExportConfig(Arguments):
    """Arguments of the export. `weights` null: as they are. `formats`: safetensors are always written, gguf with `gguf_converter`, a file
    (llama.cpp's convert_hf_to_gguf.py). `license`: for the card, as the hub names it. `results_from`: the run of an evaluation that the
    card quotes. `push_to`: owner/name on the hub. Raises UserError for a name that is none."""

    weights: str | None = named(lambda: quantize.NAMES, default=None)
    formats: list[str] = named(lambda: FORMATS, default=["safetensors"])
    gguf_converter: str | None = None
    license: str | None = None
    results_from: str | None = None
    push_to: str | None = None
    push_private: bool = True


def export(config: DictConfig) -> dict[str, Any]:
    args = ExportConfig(**config.trainer_args)
    if args.push_to and not os.environ.get(TOKEN):  # known before hours of work
        raise UserError(f"method.args.push_to={args.push_to}: {TOKEN} is not set where the rank runs. Use: runtime.secrets with it.")
    provenance = OmegaConf.to_container(config.provenance)
    with beating(heartbeat(config)):
        source = None if config.adapter.path else find_source(config)
    if source is not None:
        check_whole(source, provenance["runs"], heartbeat(config))
    target = Path(config.run_dir) / "model"
    staged = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staged, ignore_errors=True)  # of an attempt that was stopped
    staged.mkdir()
    tokenizer = find_tokenizer(config)
    if source is None:
        with beating(heartbeat(config)):
            tensors, merged = merge_adapter(config, staged)
    else:
        tensors, merged = stored(source), {}
        copy_configs(source, staged)
    written = {**write_weights(tensors, staged, args.weights, heartbeat(config)), **merged}
    tokenizer.save_pretrained(staged)
    if "gguf" in args.formats:
        written["gguf"] = str(target / convert_to_gguf(staged, args, heartbeat(config)).name)
    (staged / "README.md").write_text(describe(config, args, source or staged, tokenizer, provenance, written), encoding="utf-8")
    move_directory(staged, target)
    result = {"model": str(target), "weights": args.weights, **written, "weights_sha256": weights_sha256(target, heartbeat(config))}
    say(f"done: {written['model_bytes'] / 1e9:.3g} GB in {target}")
    if not args.push_to:
        return result
    with beating(heartbeat(config)):
        return {**result, "pushed_to": push(target, args, result)}


def find_source(config: DictConfig) -> Path:
    """The directory of the model, fetched from the hub where it is named there. Raises UserError."""
    model = config.model
    if model.path:
        return Path(model.path)
    if model.init == "random" or not model.hub_id:
        raise UserError(f"model={model.name} is random weights, which nobody wants exported. Use: model.path=<run>.")
    wanted = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md"]
    try:
        return Path(snapshot_download(model.hub_id, revision=model.revision, allow_patterns=wanted))
    except (OSError, httpx.HTTPError) as error:
        raise UserError(
            f"model {model.hub_id} at {model.revision} could not be had: {first_line(error)} Use: model.path=<directory>."
        ) from error


def find_tokenizer(config: DictConfig) -> PreTrainedTokenizerBase:
    """With the chat template that is given, or else the one that the adapter was trained with, or else the model's. Raises UserError."""
    own = config.adapter.path and (Path(config.adapter.path) / "tokenizer_config.json").is_file()
    if own and not (config.model.chat_template or config.data.chat_template):
        return AutoTokenizer.from_pretrained(config.adapter.path, trust_remote_code=False)
    return build_tokenizer(config, [])


def check_whole(source: Path, runs: list[dict[str, Any]], beat: Path) -> None:
    """Raises UserError for a checkpoint or a model that is not what its run wrote."""
    fault = None
    if (source / checkpoint.MANIFEST).is_file():
        fault = checkpoint.find_fault(source, beat)
    elif runs and "weights_sha256" in runs[0]["result"] and weights_sha256(source, beat) != runs[0]["result"]["weights_sha256"]:
        fault = f"its weights are not those that the run {runs[0]['run']} left"
    if fault:
        raise UserError(f"model.path={source} is not whole, or was changed: {fault}. Use: another checkpoint, or the run again.")


def merge_adapter(config: DictConfig, staged: Path) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any]]:
    """Weights of the base with the adapter in it, whose configuration is written; and what rounding took. Raises UserError for another
    base than the adapter's."""
    model, lost = adapters.merge(build_model(config), None)
    model.config.save_pretrained(staged)
    model.generation_config.save_pretrained(staged)
    say(f"merged in {str(model.dtype).removeprefix('torch.')}: rounding is {lost:.1%} of what the adapter changes")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()  # the embedding, once more
    return ((name, tensor) for name, tensor in model.state_dict().items() if name not in tied), {"merge_error": lost}


def copy_configs(source: Path, staged: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, staged / name)


def write_weights(tensors: Iterator[tuple[str, torch.Tensor]], staged: Path, weights: str | None, beat: Path) -> dict[str, Any]:
    """Figures of result.json. The configuration in `staged` follows. Raises UserError where `weights` does not fit, and Interrupted."""
    file = staged / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if weights is not None and content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "an unknown method")
        raise UserError(f"method.args.weights={weights}: the model is quantized already ({method}). Use: the model that it was made from.")
    convert, shards = quantize.Converter(weights), Shards(staged)
    for name, tensor in tensors:
        if stop_asked():
            raise Interrupted()
        for new, converted in convert(name, tensor).items():
            shards.add(new, converted)
        beat.touch()
    shards.close()
    if weights in quantize.EIGHT_BITS and not convert.num_quantized:
        raise UserError(f"method.args.weights={weights}: the model has no linear layers known here. Use: method.args.weights=bf16.")
    file.write_text(json.dumps(quantize.served_config(content, weights), indent=2) + "\n", encoding="utf-8")
    return {"model_bytes": shards.num_bytes, **convert.figures()}


def convert_to_gguf(staged: Path, args: ExportConfig, beat: Path) -> Path:
    """model.gguf, by llama.cpp's converter in a process of its own. `beat` is touched while the file grows. Raises Failed with its last
    line, and Interrupted."""
    output = staged / "model.gguf"
    outtype = OUTTYPES[args.weights] if args.weights else "auto"
    argv = [sys.executable, str(args.gguf_converter), str(staged), "--outfile", str(output), "--outtype", outtype]
    say(f"converting: {' '.join(argv[1:])}")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    with subprocess.Popen(argv, env=env, **pipes, text=True, errors="replace") as process:
        code, printed = follow(process, output, beat)
    if stop_asked():  # the same signal has reached the converter, too
        raise Interrupted()
    if code != 0 or not output.is_file():
        lines = [line for line in printed.splitlines() if line.strip()]
        said = lines[-1] if lines else "it said nothing"
        raise Failed(f"{args.gguf_converter} wrote no model.gguf (exit code {code}): {said}")
    return output


def follow(process: subprocess.Popen[str], output: Path, beat: Path) -> tuple[int, str]:
    """Exit code and what was printed, when `process` has ended by itself or was killed since a signal asked to stop."""
    size = 0
    while True:
        try:
            printed, _ = process.communicate(timeout=POLL_S)
            return process.returncode, printed
        except subprocess.TimeoutExpired:  # it loses no output
            grown = output.stat().st_size if output.is_file() else 0
            if grown != size:  # one that hangs is the watchdog's
                size = grown
                beat.touch()
            if stop_asked():
                process.kill()  # what it wrote is thrown away anyhow


def describe(
    config: DictConfig,
    args: ExportConfig,
    source: Path,
    tokenizer: PreTrainedTokenizerBase,
    provenance: dict[str, Any],
    written: dict[str, Any],
) -> str:
    """The model card. `source`: the directory whose licence it states; that of a merged adapter's base stands in its configuration."""
    title = args.push_to or config.name or Path(config.run_dir).parent.name
    facts = {"weights": args.weights, "template": bool(tokenizer.chat_template), **written}
    model = OmegaConf.to_container(config.model)
    return model_card.card(title, args.license or model_card.stated_license(source), model, provenance, facts)


def push(folder: Path, args: ExportConfig, result: dict[str, Any]) -> str:
    """The commit's address, private unless asked otherwise. Raises Failed where the hub refuses; what was exported stays."""
    hub = HfApi(token=os.environ[TOKEN])
    try:
        hub.create_repo(args.push_to, private=args.push_private, exist_ok=True)
        return str(hub.upload_folder(repo_id=args.push_to, folder_path=folder, commit_message="Export"))
    except (OSError, httpx.HTTPError) as error:  # the hub's own answers are both
        raise Failed(f"the model is in {folder}, and could not be pushed to {args.push_to}: {first_line(error)}", **result) from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__  # httpx's time-outs say nothing else


@contextlib.contextmanager
def beating(beat: Path) -> Iterator[None]:
    """While files pass the network or an adapter is merged, of which the launcher's watchdog sees nothing; the hub's client has timeouts of
    its own."""
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


def heartbeat(config: DictConfig) -> Path:
    return Path(config.run_dir) / checkpoint.HEARTBEAT


if __name__ == "__main__":
    main(export)
