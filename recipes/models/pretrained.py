"""Load the files of a pretrained model, and check that they agree before the first step."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import transformers
from omegaconf import DictConfig, OmegaConf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from launch.core.errors import UserError
from recipes.models import vision
from recipes.rank.program import say

MXFP4_NAMES = "down_proj_blocks", "gate_up_proj_blocks"
LONGEST = 400  # characters of a library's message
SUGGESTED = 4  # tokens in a remedy


class Source(NamedTuple):
    """A directory, or a repository and a commit on the Hub, as from_pretrained accepts them."""

    name: str
    revision: str | None = None


@contextlib.contextmanager
def file_errors(config: DictConfig) -> Iterator[None]:
    """Report an error of reading the model's files as a UserError that names their key.

    Libraries raise many types for damaged files. Only RuntimeErrors, such as a full GPU memory,
    have other causes.
    """
    try:
        yield
    except (UserError, MemoryError, RuntimeError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:LONGEST].rstrip(".")
        if not isinstance(error, OSError | ValueError | ImportError):
            text = f"{type(error).__name__}: {text}"
        remedy = "model.path=<directory of a complete model>"
        remedy += "" if config.model.path else ", or model.init=random"
        if isinstance(error, ImportError):
            remedy = "pip install with the package that it names, or a model that does not need it"
        raise UserError(
            f"{key_of(config)} cannot be loaded by transformers {transformers.__version__}: "
            f"{text}. Use: {remedy}."
        ) from error


def key_of(config: DictConfig) -> str:
    """Return the override that selects the model's files."""
    model = config.model
    if model.path or not model.hub_id:
        return f"model.path={model.path}"
    return f"model.hub_id={model.hub_id} at revision {model.revision}"


def read_config(config: DictConfig, source: Source) -> PretrainedConfig:
    """Return transformers' configuration of the model, or of its text part. Raises UserError."""
    with file_errors(config):
        shape = AutoConfig.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=False
        )
    return vision.text_part(shape)


def load_model(
    config: DictConfig, source: Source, shape: PretrainedConfig, **kwargs: Any
) -> PreTrainedModel:
    """Return the model of `read_config`, whose configurations can be saved. Raises UserError.

    Without this check, weights that are missing from the files would silently be random.
    """
    content, key_mapping = _config_json(config, source), None
    is_mxfp4 = (content.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    if is_mxfp4:  # its kernels have no gradient
        kwargs = {"quantization_config": Mxfp4Config(dequantize=True), **kwargs}
    if vision.is_part(shape, content):
        key_mapping = vision.TEXT_NAMES
        say(f"{key_of(config)}: the vision tower is not loaded, and stays as it is")
    with file_errors(config):
        model, info = AutoModelForCausalLM.from_pretrained(
            source.name,
            config=shape,
            revision=source.revision,
            key_mapping=key_mapping,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the message below has names and shapes
            output_loading_info=True,
            **kwargs,
        )
        # Save names of the text model. transformers 5.17 would lose dequantized experts.
        if key_mapping or is_mxfp4:
            renamings, dropped = model._weight_conversions, {*vision.TEXT_NAMES, *MXFP4_NAMES}
            model._weight_conversions = [r for r in renamings if not {*r.source_patterns} & dropped]
        if is_mxfp4:  # experts become bf16, whatever dtype says
            for weight in model.parameters():
                weight.data = weight.data.to(kwargs["dtype"])
        if model.can_generate():
            make_savable(model.generation_config)
    problems = [f"{name} has shape {[*a]}, not {[*b]}" for name, a, b in info["mismatched_keys"]]
    problems += [f"{name} is missing" for name in info["missing_keys"]]
    if problems:
        raise UserError(
            f"{key_of(config)}: its weights do not match its config.json in {len(problems)} "
            f"tensors: {min(problems)}. Use: the config.json of these weights, whose model_type is "
            f"not {model.config.model_type} or whose sizes differ."
        )
    return model


def make_savable(generation: GenerationConfig) -> None:
    """Remove values that take no effect, with which transformers does not save a model.

    An example is a temperature with do_sample=false. Generation stays the same.
    """
    try:
        generation.validate(strict=True)
    except ValueError as error:
        names = re.findall(r"^- `(\w+)`:", str(error), re.MULTILINE)
        if not names:
            raise
        defaults = GenerationConfig()
        for name in names:
            setattr(generation, name, getattr(defaults, name))
        say(f"generation_config.json: {', '.join(names)} have no effect and are not saved")


def load_tokenizer(config: DictConfig, source: Source) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with an end token if the method trains. Raises UserError.

    method.args.eos_token and pad_token replace the tokenizer's.
    """
    with file_errors(config):
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=False
        )
    for name in ("eos_token", "pad_token"):
        if token := OmegaConf.select(config, f"trainer_args.{name}"):
            setattr(tokenizer, name, token)
    if tokenizer.eos_token is None and OmegaConf.select(config, "method.kind") == "trainer":
        tokenizer.eos_token = _end_token(config, source, tokenizer)
    return tokenizer


def _end_token(config: DictConfig, source: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the end token that the model's other files name. Raises UserError if none does."""
    name, revision = source
    ids = _config_json(config, source).get("eos_token_id")
    # Some models have no generation_config.json.
    with file_errors(config), contextlib.suppress(OSError):
        ids = GenerationConfig.from_pretrained(name, revision=revision).eos_token_id or ids
    for number in ids if isinstance(ids, list) else [ids]:
        if number is not None and (token := tokenizer.convert_ids_to_tokens(number)):
            say(f"{key_of(config)}: the tokenizer has no eos_token, so {token} ends answers")
            return str(token)
    tokens = ", ".join([*tokenizer.get_added_vocab()][-SUGGESTED:]) or "none"
    by_argument = "'method.args.eos_token=\"<token>\"', or " * (config.method.name == "sft")
    raise UserError(
        f"{key_of(config)}: the tokenizer has no eos_token, so a model would not learn to stop. "
        f'Use: {by_argument}"eos_token" in its tokenizer_config.json. Added tokens: {tokens}.'
    )


def check_vocabulary(
    config: DictConfig, source: Source, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise UserError if a token that the run uses has no row in the model's embedding.

    Added tokens that neither the chat template nor padding uses are allowed: Gemma 3's tokenizer
    has one for images, and the embedding of its text-only models has none.
    """
    size = _config_json(config, source).get("vocab_size") or math.inf
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= size}
    added, template = tokenizer.get_added_vocab(), str(tokenizer.chat_template)
    special = (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token)
    used = [
        token for token in beyond if token not in added or token in special or token in template
    ]
    if used:
        token = min(used, key=beyond.__getitem__)
        raise UserError(
            f"{key_of(config)}: the tokenizer has {token!r} with id {beyond[token]}, but the "
            f"model's embedding has only {size} rows (vocab_size in config.json). Use: the "
            "tokenizer of this model, or the model saved after resize_token_embeddings()."
        )


def _config_json(config: DictConfig, source: Source) -> dict[str, Any]:
    """Return the content of config.json, which may be of a type that transformers does not know.

    A model of text and images has the text's values in a separate object.
    """
    with file_errors(config):
        content, _ = PretrainedConfig.get_config_dict(source.name, revision=source.revision)
    return {**content, **(content.get("text_config") or {})}
