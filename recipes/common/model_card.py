"""The README.md of an exported model: what it is, what made it, how well it did. Of facts that are missing it says that they are.

Front matter as the hub reads it (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

Facts = dict[str, Any]


def stated_license(directory: Path) -> str | None:
    """What config.json or the card of a model directory says; None where neither does."""
    said = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("license")
    said = said or front_matter(directory / "README.md").get("license")
    names = said if isinstance(said, list) else [said]  # some cards name two
    return ", ".join(str(name) for name in names if name) or None


def front_matter(card: Path) -> Facts:
    """The YAML between the first two lines of dashes; empty where there is none, or none that can be read."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    parts = text.split("---\n", 2)
    if parts[0] or len(parts) < 3:
        return {}
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def card(title: str, license_name: str | None, model: Facts, provenance: Facts, written: Facts) -> str:
    """`model`: the composition's own, for a model that no run left. `provenance`: launch/files/provenance.py's.
    `written`: `weights`, `template` (whether there is a chat template) and figures of result.json."""
    runs = provenance["runs"]
    first = runs[-1]["model"] if runs else model
    base = first["hub_id"] if first["init"] == "pretrained" and not first["path"] else None
    head = {"license": license_name or "unknown", "base_model": base, "library_name": "transformers", "pipeline_tag": "text-generation"}
    parts = [
        f"---\n{yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False)}---",
        f"# {title}",
        _origin(runs, first),
        "## Licence\n\n" + (license_name or _no_license(base)),
        "## Weights\n\n" + _weights(written, runs),
        "## Results\n\n" + _results(provenance["results"], written),
        "## How it was made\n\n" + _made(runs),
    ]
    return "\n\n".join(parts) + "\n"


def _no_license(base: str | None) -> str:
    if base:  # its card did not come along with the runs between
        return f"Not stated by whoever exported this. It was made from `{base}`: see the licence there."
    return "Not stated: neither the model that this was made from nor whoever exported it named one."


def _origin(runs: list[Facts], first: Facts) -> str:
    if first["init"] == "random" and not first["path"]:
        start = f"a {first['architecture']} of {first['num_parameters']:,} parameters with random weights"
    else:
        start = f"`{first['hub_id']}` at `{first['revision']}`" if not first["path"] else f"`{Path(first['path']).name}`, a directory"
    steps = [run["method"] for run in reversed(runs)]
    return f"Made from {start}" + (f" by {', then '.join(steps)}." if steps else "; no record says by what.")


def _weights(written: Facts, runs: list[Facts]) -> str:
    weights = written["weights"]
    lines = [f"- Dtype: {weights or 'as they were'}, {written['model_bytes'] / 1e9:.3g} GB of safetensors"]
    if written.get("num_quantized"):
        lines.append(
            f"- {written['num_quantized']} linear layers in {weights} with a scale for each row, activations in {weights} with a scale for "
            "each token (compressed-tensors); embedding, head and norms in bf16"
        )
    if written["weights_error"]:
        worst = written["weights_error_worst"]
        lines.append(
            f"- Rounding changed the tensors it touched by {written['weights_error']:.3g} of their norm, most in `{worst['name']}` "
            f"({worst['error']:.3g})"
        )
    merged = [found for found in (written.get("merge_error"), *(run["result"].get("merge_error") for run in runs)) if found is not None]
    lines += [f"- An adapter was merged: rounding took {share:.3g} of what it had changed" for share in merged]
    lines.append(f"- Chat template: {'in the tokenizer' if written['template'] else 'none'}")
    lines += ["- `model.gguf`: the same weights for llama.cpp"] if "gguf" in written else []
    return "\n".join(lines)


def _results(results: Facts | None, written: Facts) -> str:
    if results is None:
        return "No evaluation was given."
    rows = []
    if "accuracy" in results:
        per_problem = f", {results['samples_per_prompt']} samples of each" if results["samples_per_prompt"] > 1 else ""
        rows.append(("accuracy", results["accuracy"], results["interval"], f"{results['num_problems']} problems{per_problem}"))
        tasks = results["by_task"] if len(results["by_task"]) > 1 else {}
        rows += [(f"accuracy, {task}", f["accuracy"], f["interval"], f"{f['num_problems']} problems") for task, f in tasks.items()]
    for name in ("pass", "maj"):
        for k, value in results.get(f"{name}_at_k", {}).items():
            rows.append((f"{name}@{k}", value, results[f"{name}_at_k_interval"][k], f"{results['num_problems']} problems"))
    lines = ["| measure | value | 95% interval | of |", "|---|---|---|---|"]
    lines += [f"| {name} | {value:.1%} | {low:.1%} to {high:.1%} | {of} |" for name, value, (low, high), of in rows]
    for task, metrics in results.get("lm_eval", {}).items():
        said = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, (int, float)))
        lines.append(f"| lm-evaluation-harness, {task} | {said} | | |")
    evaluation = f"Evaluation `{results['run']}`"
    before = " The weights that were measured are those before the conversion above." if written["weights_error"] else ""
    if "accuracy" not in results:  # the harness has data of its own
        return "\n".join(lines) + f"\n\n{evaluation}.{before}"
    sampling = ", ".join(f"{key} {results['args'][key]}" for key in ("temperature", "max_new_tokens") if key in results["args"])
    return "\n".join(lines) + f"\n\nHeld-out rows of {_data(results['data'], {})}. {evaluation}: {sampling}.{before}"


def _made(runs: list[Facts]) -> str:
    if not runs:
        return "Nothing is recorded."
    return "\n\n".join(_run(number, run) for number, run in enumerate(reversed(runs), start=1))


def _run(number: int, run: Facts) -> str:
    precision, adapter, code = run["precision"], run["adapter"], run["code"]
    commit = (
        f"`{code['commit']}`" + (" with changes that are not in it" if code.get("dirty") else "") if code.get("commit") else "not known"
    )
    rows = {
        "run": f"`{run['run']}`" + (f", of which its {run['left']} was taken" if run["left"].startswith("checkpoint-") else ""),
        "command": f"`python launch/run.py {' '.join(run['overrides'])}`".replace(" `", "`"),
        "arguments": ", ".join(f"{key} {value}" for key, value in run["args"].items() if value is not None) or "the defaults",
        "data": _data(run["data"], run["data_files"]),
        "precision": f"products in {precision['compute']}, weights in {precision['weights']}",
        "adapter": "none" if adapter["rank"] is None else f"{adapter['name']}, rank {adapter['rank']}, alpha {adapter['alpha']}",
        "ended with": ", ".join(f"{key} {value:.4g}" for key, value in run["result"].items() if isinstance(value, (int, float))),
        "seed": str(run["seed"]),
        "code": commit,
        "packages": ", ".join(f"{name} {version}" for name, version in run["packages"].items()),
    }
    return f"{number}. {run['method']}\n\n" + "\n".join(f"   - {name}: {value}" for name, value in rows.items() if value)


def _data(data: Facts | None, files: dict[str, str]) -> str:
    """Files by name and content: where they lay says nothing elsewhere."""
    if not data:
        return "a set that is not recorded"
    if data["kind"] in ("reasoning", "code"):
        tasks = ", ".join(f"{task['name']} (level {task['level']})" for task in data["tasks"])
        return f"{data['kind']}: {data['num_train']} generated problems of {tasks}, {data['num_heldout']} held out"
    sources = [{"path": data["path"], "hub_id": data["hub_id"], "weight": None, "revision": data["revision"]}, *data["sources"]]
    named = []
    for source in sources:
        if source["path"]:
            digest = files.get(source["path"])
            named.append(f"`{Path(source['path']).name}`" + (f" (sha256 {digest[:12]})" if digest else ""))
        elif source["hub_id"]:
            named.append(f"`{source['hub_id']}`" + (f" at `{source['revision']}`" if source.get("revision") else ""))
    return f"{data['kind']}: {', '.join(named) or 'held-out rows of a file'}"
