"""Write the README.md of an exported model: its origin, weights, results and training runs.

The card lists unknown facts as unknown. Front matter: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Facts = dict[str, Any]


def stated_license(directory: Path) -> str | None:
    """Return the licence in config.json or in the card of a model directory, or None."""
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    licences = content.get("license") or front_matter(directory / "README.md").get("license")
    names = licences if isinstance(licences, list) else [licences]  # some cards list several
    return ", ".join(str(name) for name in names if name) or None


def front_matter(card: Path) -> Facts:
    """Return the YAML between the first two lines of dashes, or {} if it is missing or invalid."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    parts = text.split("---\n", 2)
    if parts[0] or len(parts) < 3:
        return {}
    try:
        content = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def card(
    title: str, license_name: str | None, model: Facts, provenance: Facts, written: Facts
) -> str:
    """Return the text of the model card.

    `provenance` comes from launch/execution/provenance.py. If it has no runs, `model`, from the
    export's own composition, describes the origin. `written` describes the exported files:
    `weights`, `template` (whether there is a chat template) and figures of result.json.
    """
    runs = provenance["runs"]
    first = runs[-1]["model"] if runs else model
    base = first["hub_id"] if first["init"] == "pretrained" and not first["path"] else None
    head = {"license": license_name or "unknown"} | ({"base_model": base} if base else {})
    head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    unstated = "Not stated, neither by the model that this was made from nor at export."
    if base:  # the runs do not copy the base model's card
        unstated = f"Not stated at export. It was made from `{base}`: see the licence there."
    steps = [_run(number, run) for number, run in enumerate(reversed(runs), start=1)]
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {title}",
        _origin(runs, first),
        f"## Licence\n\n{license_name or unstated}",
        "## Weights\n\n" + _weights(written, runs),
        "## Results\n\n" + _results(provenance["results"], written),
        "## How it was made\n\n" + ("\n\n".join(steps) or "Nothing is recorded."),
    ]
    return "\n\n".join(parts) + "\n"


def _origin(runs: list[Facts], first: Facts) -> str:
    if first["path"]:
        start = f"`{Path(first['path']).name}`, a directory"
    elif first["init"] == "random":
        parameters = f"{first['num_parameters']:,} parameters with random weights"
        start = f"a {first['architecture']} of {parameters}"
    else:
        start = f"`{first['hub_id']}` at `{first['revision']}`"
    if not runs:
        return f"Made from {start}; no record says by what."
    return f"Made from {start} by {', then '.join(run['method'] for run in reversed(runs))}."


def _weights(written: Facts, runs: list[Facts]) -> str:
    weights, size = written["weights"], f"{written['model_bytes'] / 1e9:.3g} GB of safetensors"
    lines = [f"- Dtype: {weights or 'as they were'}, {size}"]
    if written.get("num_quantized"):
        lines.append(
            f"- {written['num_quantized']} linear layers in {weights} with a scale for each row, "
            f"activations in {weights} with a scale for each token (compressed-tensors); "
            "embedding, head and norms in bf16"
        )
    if written["weights_error"]:
        worst = written["weights_error_worst"]
        lines.append(
            f"- Rounding changed the tensors it touched by {written['weights_error']:.3g} of their "
            f"norm, most in `{worst['name']}` ({worst['error']:.3g})"
        )
    for result in (written, *(run["result"] for run in runs)):
        if (share := result.get("merge_error")) is not None:
            lines.append(f"- An adapter was merged: rounding took {share:.3g} of what it changed")
    lines.append(f"- Chat template: {'in the tokenizer' if written['template'] else 'none'}")
    if "gguf" in written:
        lines.append("- `model.gguf`: the same weights for llama.cpp")
    return "\n".join(lines)


def _results(results: Facts | None, written: Facts) -> str:
    if results is None:
        return "No evaluation was given."
    lines = ["| measure | value | 95% interval | of |", "|---|---|---|---|"]

    def add(name: str, value: float, interval: tuple[float, float], of: str) -> None:
        lines.append(f"| {name} | {value:.1%} | {interval[0]:.1%} to {interval[1]:.1%} | {of} |")

    if "accuracy" in results:
        problems, samples = f"{results['num_problems']} problems", results["samples_per_prompt"]
        of = f"{problems}, {samples} samples of each" if samples > 1 else problems
        add("accuracy", results["accuracy"], results["interval"], of)
        for task, f in results["by_task"].items() if len(results["by_task"]) > 1 else ():
            add(f"accuracy, {task}", f["accuracy"], f["interval"], f"{f['num_problems']} problems")
    for name in ("pass", "maj"):
        for k, value in results.get(f"{name}_at_k", {}).items():
            interval = results[f"{name}_at_k_interval"][k]
            add(f"{name}@{k}", value, interval, f"{results['num_problems']} problems")
    for task, metrics in results.get("lm_eval", {}).items():
        lines.append(f"| lm-evaluation-harness, {task} | {_numbers(metrics)} | | |")
    text = f"Evaluation `{results['run']}`"
    if "accuracy" in results:  # else from lm-evaluation-harness, which has its own data
        keys = [key for key in ("temperature", "max_new_tokens") if key in results["args"]]
        sampling = ", ".join(f"{key} {results['args'][key]}" for key in keys)
        text = f"Held-out rows of {_data(results['data'], {})}. {text}: {sampling}"
    if written["weights_error"]:
        text += ". The weights that were measured are those before the conversion above"
    return "\n".join(lines) + f"\n\n{text}."


def _numbers(values: Mapping[str, Any]) -> str:
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    return ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())


def _run(number: int, run: Facts) -> str:
    precision, adapter, code = run["precision"], run["adapter"], run["code"]
    checkpoint = run["left"].startswith("checkpoint-")
    args = {key: value for key, value in run["args"].items() if value is not None}
    commit = "not known"
    if code.get("commit"):
        commit = f"`{code['commit']}`" + (" with changes on top" if code.get("dirty") else "")
    trained = f"{adapter['name']}, rank {adapter['rank']}, alpha {adapter['alpha']}"
    rows = {
        "run": f"`{run['run']}`" + (f", its {run['left']}" if checkpoint else ""),
        "command": f"`{' '.join(['python launch/run.py', *run['overrides']])}`",
        "arguments": ", ".join(f"{key} {value}" for key, value in args.items()) or "the defaults",
        "data": _data(run["data"], run["data_files"]),
        "precision": f"products in {precision['compute']}, weights in {precision['weights']}",
        "adapter": "none" if adapter["rank"] is None else trained,
        "ended with": _numbers(run["result"]),
        "seed": str(run["seed"]),
        "code": commit,
        "packages": ", ".join(f"{name} {version}" for name, version in run["packages"].items()),
    }
    lines = [f"   - {name}: {value}" for name, value in rows.items() if value]
    return f"{number}. {run['method']}\n\n" + "\n".join(lines)


def _data(data: Facts | None, files: dict[str, str]) -> str:
    """Return a description of data, with files by name and hash; paths mean nothing elsewhere."""
    if not data:
        return "a set that is not recorded"
    if data["kind"] in ("reasoning", "code"):
        tasks = ", ".join(f"{task['name']} (level {task['level']})" for task in data["tasks"])
        return (
            f"{data['kind']}: {data['num_train']} generated problems of {tasks}, "
            f"{data['num_heldout']} held out"
        )
    names = []
    for source in (data, *data["sources"]):
        if source["path"]:
            digest = files.get(source["path"])
            name = f"`{Path(source['path']).name}`"
            names.append(f"{name} (sha256 {digest[:12]})" if digest else name)
        elif source["hub_id"]:
            revision = source.get("revision")
            names.append(f"`{source['hub_id']}`" + (f" at `{revision}`" if revision else ""))
    return f"{data['kind']}: {', '.join(names) or 'held-out rows of a file'}"
