"""Read the shape of a model from the config.json of a directory or of the Hub."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.core.json_files import read_json
from launch.inputs import hybrid_counts
from launch.inputs.adapter_files import header
from launch.schema import Model, shapes

COMMIT = re.compile(r"[0-9a-f]{40}")
HEAD = "lm_head.weight"
MXFP4 = "mxfp4"
TEXT = re.compile(r"\blanguage_model\.|^lm_head\.")
LONGEST = 200  # characters of a library's message

# Key of model -> names in config.json, most of them transformers'; the first that is present
NAMES = {
    "architecture": ("model_type",),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "tied_embeddings": ("tie_word_embeddings",),
    "attention_bias": ("attention_bias",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "top_k_experts"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
SHAPE = tuple(key for key in NAMES if key != "max_positions")  # on which memory and speed depend
PROBLEMS = {  # error of huggingface_hub -> message and remedy
    "GatedRepoError": "access is restricted. Accept its license on the Hub, and set HF_TOKEN",
    "RepositoryNotFoundError": "no such repository. A private one needs HF_TOKEN",
    "RevisionNotFoundError": "it has no such revision. Use: a commit",
    "EntryNotFoundError": "it has no {name}",
    "RemoteEntryNotFoundError": "it has no {name}",
    "HFValidationError": "not a name of the Hub. Use: <owner/name>",
}
# transformers' values of keys that the config.json of google/gemma-3-4b-it leaves out
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
}
# Numbers that a plan needs and that do not follow from others
NEEDED = ("num_layers", "hidden_size", "num_heads", "vocab_size")


@dataclass(frozen=True)
class Found:
    """The shape in a config.json, by key of model, and the keys that the file lacks."""

    place: str  # the file, for messages
    shape: dict[str, Any]
    missing: tuple[str, ...] = ()
    commit: str | None = None  # of the Hub


def directory_of(path: str) -> Path:
    """Return the absolute directory of a model. A run has its model in a subdirectory."""
    folder = Path(path).expanduser().absolute()
    is_run = (folder / "record.json").is_file() and not (folder / "config.json").is_file()
    return folder / "model" if is_run else folder


def quantization_of(model: Model) -> str | None:
    """Return how the weights of a directory, or of OpenAI's models on the Hub, are quantized."""
    if not model.path:
        return MXFP4 if (model.hub_id or "").startswith("openai/gpt-oss-") else None
    content = read_json(directory_of(model.path) / "config.json") or {}
    quantization = content.get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def of_directory(path: str) -> Found | None:
    """Return the shape of the model in a directory; None if it has no readable config.json.

    launch/plan/check_files.py rejects such a directory.
    """
    folder = directory_of(path)
    content = read_json(folder / "config.json")
    if content is None or not isinstance(content.get("model_type"), str):
        return None
    return _found(f"{folder}/config.json", content, folder)


def of_hub(hub_id: str, revision: str | None, is_offline: bool) -> Found | str:
    """Return the shape of a Hub model and its commit, or why they cannot be read."""
    file = hub_file(hub_id, "config.json", revision, is_offline)
    if isinstance(file, str):
        return file
    content = read_json(file)
    if content is None or not isinstance(content.get("model_type"), str):
        return f"{file} has no model_type"
    return _found(f"config.json of {hub_id}", content, commit=file.parent.name)


def data_snapshot(hub_id: str, is_offline: bool) -> Path | str:
    """Return the folder of a Hub data set, named after its commit, or why it is missing.

    The Hub creates repositories with a .gitattributes, but their owners write README.md. The cache
    may have neither.
    """
    from huggingface_hub import constants

    readme = hub_file(hub_id, "README.md", None, is_offline, "dataset")
    if isinstance(readme, Path):
        return readme.parent
    other = hub_file(hub_id, ".gitattributes", None, is_offline, "dataset")
    if isinstance(other, Path):
        return other.parent
    folder = Path(constants.HF_HUB_CACHE, f"datasets--{hub_id.replace('/', '--')}")
    main, snapshots = folder / "refs/main", [*folder.glob("snapshots/*")]
    if main.is_file() and (newest := folder / "snapshots" / main.read_text()) in snapshots:
        return newest
    return snapshots[0] if len(snapshots) == 1 else readme


@functools.cache  # a sweep or a pipeline reads it many times
def hub_file(
    hub_id: str, name: str, revision: str | None, is_offline: bool, repo_type: str = "model"
) -> Path | str:
    """Return a file of a Hub repository, in a folder named after its commit, or why it is missing.

    Without a revision, it is the commit in the cache, or else the newest. So the runs of a sweep or
    a pipeline get the same one. Only this file is downloaded. Without a network, a branch is the
    commit that was downloaded last.
    """
    # The import takes half a second, and few plans need it.
    from httpx import HTTPError
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    problem = f"HF_HUB_OFFLINE is set, and the cache has no {name} of it"
    download = functools.partial(
        hf_hub_download, hub_id, name, revision=revision, repo_type=repo_type
    )

    def cached() -> str | None:
        try:
            return download(local_files_only=True)
        except (OSError, ValueError):
            return None

    file = cached() if is_offline or not revision or COMMIT.fullmatch(revision) else None
    if file is None and not is_offline:
        try:
            # Without a network, this fails immediately. The download would retry five times.
            get_hf_file_metadata(hf_hub_url(hub_id, name, revision=revision, repo_type=repo_type))
            file = download()  # remembers a branch's commit
        except (OSError, ValueError, HTTPError) as error:
            file, text = cached(), " ".join(str(error).split())[:LONGEST]
            reached = f"the Hub cannot be reached ({text})"
            problem = PROBLEMS.get(type(error).__name__, reached).replace("{name}", name)
    return Path(file) if file else problem


def _found(
    place: str, content: dict[str, Any], folder: Path | None = None, commit: str | None = None
) -> Found:
    """Return the shape. A model of text and images has the text's values in a separate object.

    The headers of the weights in `folder` are read only for what config.json does not state.
    """
    text = content.get("text_config")
    values = {**content, **(text if isinstance(text, dict) else {})}
    values |= {key: content[key] for key in NAMES["tied_embeddings"] if key in content}
    values = DEFAULTS.get(str(values.get("model_type")), {}) | values
    shape: dict[str, Any] = {}
    for key, names in NAMES.items():
        value = next((values[name] for name in names if values.get(name) is not None), None)
        if isinstance(value, list):  # one value per layer
            value = max((each for each in value if isinstance(each, int)), default=None)
        if value is not None:
            shape[key] = value
    missing = tuple(k for k in NEEDED if not isinstance(shape.get(k), int) or shape[k] < 1)
    if missing:
        return Found(place, shape, missing, commit)
    hidden, heads = shape["hidden_size"], shape["num_heads"]
    layers = shapes.ARCHITECTURES.get(shape["architecture"], shapes.GENERIC)
    is_known = shape["architecture"] in shapes.ARCHITECTURES
    is_complete = is_known and "tied_embeddings" in shape
    tensors = {} if folder is None or is_complete else _tensors(folder)
    is_moe = bool(shape.get("num_experts"))
    if is_moe and values.get("moe_intermediate_size"):  # the other is of dense layers
        shape["intermediate_size"] = values["moe_intermediate_size"]
    defaults = {
        "intermediate_size": 4 * hidden,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "tied_embeddings": HEAD not in tensors if tensors else layers.tied,
        "max_positions": 2048,
        "num_experts": 0,
        "experts_per_token": 1 if is_moe else 0,
    }
    shape = {**defaults, **shape}
    shape["attention_bias"] = shape["architecture"] == "qwen2" or bool(shape.get("attention_bias"))
    rope = values.get("rope_parameters") or {}
    shape["rope_theta"] = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    shape["rms_norm_eps"] = float(values.get("rms_norm_eps") or 1e-6)
    fields = {field.name for field in dataclasses.fields(Model)}
    model = Model(**{key: value for key, value in shape.items() if key in fields})
    shape["num_parameters"] = hybrid_counts.parameters(values) or shapes.parameters(model)
    is_quantized = "quantization_config" in content
    is_counted = is_known or shape["architecture"] in hybrid_counts.LAYERS
    if tensors and not is_counted and not is_quantized:
        # Next to a vision tower, the text's names have a prefix.
        parts = [name for name in tensors if not isinstance(text, dict) or TEXT.search(name)]
        shape["num_parameters"] = sum(tensors[name] for name in parts)
    return Found(place, shape, (), commit)


def _tensors(folder: Path) -> dict[str, int]:
    """Return the number of elements of each tensor in the weights; {} if a file is damaged."""
    tensors: dict[str, int] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in header(file)[1].items():
                if name != "__metadata__":
                    tensors[name] = math.prod(tensor["shape"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return tensors
