"""Write the README.md of an exported model: its origin, weights, results and training runs.

The card lists unknown facts as unknown. Front matter: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

Facts = dict[str, Any]
# Facts of a run on the card, besides its command, data, precision and adapter.
RUN_FACTS = ("run", "left", "args", "result", "seed", "code", "packages")


def read_license(directory: Path) -> str | None:
    """Return the license in config.json or in the model card of a directory, or None."""
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    licenses = content.get("license") or front_matter(directory / "README.md").get("license")
    names = licenses if isinstance(licenses, list) else [licenses]  # some cards list several
    return ", ".join(str(name) for name in names if name) or None


def front_matter(card: Path) -> Facts:
    """Return the YAML at the start of a card, or {} if it is missing or invalid."""
    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def card(
    title: str, license_name: str | None, model: Facts, provenance: Facts, exported: Facts
) -> str:
    """Return the text of the model card.

    `provenance` comes from launch/execution/provenance.py. If it lists no runs, the model was made
    from `model`, the export's own configuration. `exported` describes the exported files:
    `weights`, `chat_template` (whether there is one), `files` and metrics from result.json.
    """
    runs = provenance["runs"][::-1]  # from the first run to the last
    first = runs[0]["model"] if runs else model
    base = first["hub_id"] if first["init"] == "pretrained" and not first["path"] else None
    head = {"license": license_name or "unknown"} | ({"base_model": base} if base else {})
    head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    origin = f"`{first['hub_id']}` at `{first.get('revision')}`"
    if first["path"]:
        origin = f"`{Path(first['path']).name}`, a directory"
    elif first["init"] == "random":
        parameters = f"{first['num_parameters']:,} parameters with random weights"
        origin = f"a {first['architecture']} of {parameters}"
    methods = f" by {', then '.join(run['method'] for run in runs)}." if runs else "."
    results, note = provenance["results"], ""
    if results:
        results = {**results, "data": _data(results["data"], {})}
        if exported["weights_error"]:
            note = "\nThese results were measured before the weights were converted as above."
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {title}",
        f"Made from {origin}{methods}",
        f"## License\n\n{license_name or 'Unknown at export. See the source model.'}",
        f"## Weights\n\n{_facts({**exported, 'weights': exported['weights'] or 'unchanged'})}",
        f"## Results\n\n{_facts(results)}{note}",
    ]
    for number, run in enumerate(runs, start=1):
        command = " ".join(["python launch/run.py", *run["overrides"]])
        facts = {name: run[name] for name in RUN_FACTS}
        facts["data"] = _data(run["data"], run["data_files"])
        facts["precision"] = {name: run["precision"][name] for name in ("compute", "weights")}
        if run["adapter"]["rank"] is not None:
            facts["adapter"] = {name: run["adapter"][name] for name in ("name", "rank", "alpha")}
        parts.append(f"## {number}. {run['method']}\n\n    {command}\n\n{_facts(facts)}")
    return "\n\n".join(parts) + "\n"


def _facts(facts: Facts | None) -> str:
    """Return facts as a block of YAML, without those that are null."""
    if not facts:
        return "Not recorded."
    present = {name: value for name, value in facts.items() if value not in (None, {}, [])}
    text = yaml.safe_dump(
        present, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    return f"```yaml\n{text}```"


def _data(data: Facts | None, files: dict[str, str]) -> Facts:
    """Return facts about data. Files appear by name and hash, since paths are local."""
    if not data:
        return {}
    facts = {name: data.get(name) for name in ("kind", "tasks", "num_train", "num_heldout")}
    facts["sources"] = [
        {"file": Path(source["path"]).name, "sha256": files.get(source["path"])}
        if source.get("path")
        else {"hub_id": source["hub_id"], "revision": source.get("revision")}
        for source in (data, *data.get("sources", []))
        if source.get("path") or source.get("hub_id")
    ]
    return {name: value for name, value in facts.items() if value}
