"""Build the model and the tokenizer of a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import torch
from accelerate import PartialState
from huggingface_hub import snapshot_download, try_to_load_from_cache
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, PeftModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from launch.core.json_files import read_json
from recipes.models import adapters, delta_net, packed_attention, pretrained, vision
from recipes.models.low_precision import nf4_config, to_float8
from recipes.models.model_card import read_license
from recipes.rank import ranks
from recipes.rank.device import DTYPES, compute_dtype, device
from recipes.rank.files import place_directory
from recipes.rank.program import is_main_rank
from recipes.rank.rejections import rejections

RANDOM = "model_init"  # in the run directory

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
# TRL's assistant_only_loss trains on the {% generation %} block, the answer and its end token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    f"{{{{ '{ASSISTANT}' }}}}{{% generation %}}{{{{ message['content'] + '{END}' }}}}"
    f"{{% endgeneration %}}{{% else %}}{{{{ '{USER}' + message['content'] }}}}{{% endif %}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)
TRAINED_VOCABULARY = 512


def build_tokenizer(config: DictConfig, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or a Hub model. For random weights, train it on `texts`.

    Raises UserError if its files are damaged, missing, or do not match the model.
    """
    model, source = config.model, find_source(config)
    if source is None:
        tokenizer = train_tokenizer(texts, vocab_size=min(TRAINED_VOCABULARY, model.vocab_size))
    else:
        tokenizer = pretrained.load_tokenizer(config, source)
    template = model.chat_template or config.data.chat_template
    if template:
        # utf-8-sig drops a byte order mark, which would begin every text
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8-sig")
    if source is not None:
        pretrained.check_vocabulary(config, source, tokenizer)
    return tokenizer


def build_model(config: DictConfig) -> PreTrainedModel | PeftModel:
    """Return the model in the run's precision, with the adapter of `config.adapter.path`, if set.

    For an adapter, record the base's fingerprint in the run directory. Raises UserError if the
    model's files do not match, a package is missing, or the adapter has another base.
    """
    is_nf4 = config.precision.weights == "nf4"
    model, base = _nf4_model(config) if is_nf4 else (plain_model(config), None)
    if config.adapter.rank is not None:
        base = base or _fingerprint(config, model)
        adapters.record_base(Path(config.run_dir), base)
    if config.precision.compute == "fp8":
        multiple = OmegaConf.select(config, "trainer_args.pad_to_multiple_of")
        model = to_float8(model, pads=not isinstance(multiple, int))
    return adapters.load_adapter(model, config, base) if config.adapter.path else model


def plain_model(config: DictConfig, **kwargs) -> PreTrainedModel:
    """Return the model with weights in the dtype of `config.precision` (nf4: its compute dtype).

    Its configuration contains the license of the model card. Pretrained weights are on the CPU.
    Random weights depend on `config.seed`. They are drawn on a GPU, if there is one, since a CPU
    takes minutes for 8e9. from_pretrained gets `kwargs`. Raises UserError as build_model does.
    """
    set_seed(config.seed)  # for random weights, and for the adapter that the trainer will draw
    model, directory, weights = config.model, model_directory(config), config.precision.weights
    source = find_source(config)
    shape = model_config(model) if source is None else pretrained.read_config(config, source)
    kwargs = {
        "dtype": compute_dtype(config) if weights == "nf4" else DTYPES[weights],
        "attn_implementation": packed_attention.implementation(config, shape),
        **kwargs,
    }
    if source is None:
        # ZeRO-3 would draw each shard separately, so weights would depend on the strategy.
        unset_hf_deepspeed_config()
        with torch.device(device()), rejections("model", f"{model.architecture} of transformers"):
            random_model = AutoModelForCausalLM.from_config(shape, **kwargs)
        # Round, because DeepSpeed's fp32 copy starts from 16-bit weights. Without rounding, a first
        # step of 2e-5 changed the loss by 3.1 under ddp and fsdp and by 1.2 under ZeRO
        # (docs/results/topologies.md).
        for weight in random_model.parameters():
            weight.data = weight.data.to(compute_dtype(config)).to(weight.dtype)
        return random_model
    loaded = pretrained.load_model(config, source, shape, **kwargs)
    if torch.cuda.is_available():
        delta_net.check(loaded, device())
    if directory is None:
        # from_pretrained does not fetch the card, but a downloaded snapshot of the model has it.
        card = try_to_load_from_cache(model.hub_id, "README.md", revision=model.revision)
        directory = Path(card).parent if isinstance(card, str) else None
    if directory is not None and (license_name := read_license(directory)):
        loaded.config.license = license_name
    return loaded


def _nf4_model(config: DictConfig) -> tuple[PreTrainedModel, str]:
    """Return the model with its linear layers in nf4, and its fingerprint.

    Quantization needs files, so the main rank writes random weights for all ranks. Every rank must
    call this function.
    """
    kwargs = {
        "quantization_config": nf4_config(compute_dtype(config)),
        "device_map": {"": device()},
    }
    if model_directory(config) is not None or config.model.init != "random":
        model = plain_model(config, **kwargs)
        return model, _fingerprint(config, model)
    ranks = PartialState()
    directory = Path(config.run_dir) / ".random_weights"  # visible to ranks on other nodes
    if is_main_rank():
        plain_model(config).save_pretrained(directory)
    ranks.wait_for_everyone()
    model = plain_model(OmegaConf.merge(config, {"model": {"path": str(directory)}}), **kwargs)
    base = adapters.fingerprint_of_files(directory)
    ranks.wait_for_everyone()
    if is_main_rank():
        shutil.rmtree(directory)
    model.name_or_path = model.config._name_or_path = ""  # not the removed directory
    return model, base


def _fingerprint(config: DictConfig, model: PreTrainedModel) -> str:
    """Return the fingerprint, of files if possible: loaded weights may be sharded or in 4 bits."""
    directory = local_files(config)
    return adapters.fingerprint_of_files(directory) if directory else adapters.fingerprint_of(model)


def local_files(config: DictConfig) -> Path | None:
    """Return the directory of the loaded model, or None for random weights."""
    directory = model_directory(config)
    if directory is None and config.model.init != "random":
        hub_id, revision = config.model.hub_id, config.model.revision
        directory = Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    return directory


def whole_model(config: DictConfig, shape: PretrainedConfig) -> Path | None:
    """Return the directory of the model whose text part has this shape; None if it has no tower."""
    directory = local_files(config)
    content = read_json(directory / "config.json") if directory else None
    if not content or not vision.is_part(shape, content):
        return None
    if not model_directory(config):  # loading the text fetched no configuration of images
        with contextlib.suppress(OSError, httpx.HTTPError):
            hub_id, revision = config.model.hub_id, config.model.revision
            snapshot_download(hub_id, revision=revision, allow_patterns=vision.PROCESSORS)
    return directory


def write_random(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write random weights and their tokenizer for vLLM, which needs files. Return the directory.

    Every rank calls this. The main rank writes, since transformers writes weights only there.
    """
    target = Path(config.run_dir) / RANDOM
    model = plain_model(config)  # in 16 or 32 bits, regardless of the run's precision
    if is_main_rank():
        staged = target.with_name(f".{target.name}.staging")
        shutil.rmtree(staged, ignore_errors=True)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        place_directory(staged, target)
    ranks.broadcast(None)  # the others wait
    return target


def model_directory(config: DictConfig) -> Path | None:
    """Return model.path, or the directory of write_random if that has been called, or None."""
    if config.model.path:
        return Path(config.model.path)
    directory = Path(config.run_dir) / RANDOM
    return directory if directory.is_dir() else None


def find_source(config: DictConfig) -> pretrained.Source | None:
    """Return where the model's files are; None for random weights that are not written."""
    directory, model = model_directory(config), config.model
    if directory is not None:
        return pretrained.Source(str(directory))
    return None if model.init == "random" else pretrained.Source(model.hub_id, model.revision)


def model_config(model: DictConfig) -> AutoConfig:
    """Return transformers' configuration for the shape in conf/model. Raises UserError."""
    experts = {}
    if getattr(model, "num_experts", 0):  # configurations of earlier versions have no such key
        experts = dict.fromkeys(("num_experts", "num_local_experts"), model.num_experts)
        experts["num_experts_per_tok"] = model.experts_per_token
        experts["moe_intermediate_size"] = model.intermediate_size
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.architecture == "gemma3_text":  # has one of each type of layer
        rope = dict.fromkeys(("full_attention", "sliding_attention"), rope)
    with rejections("model", f"{model.architecture} of transformers"):
        return AutoConfig.for_model(
            model.architecture,
            num_hidden_layers=model.num_layers,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            tie_word_embeddings=model.tied_embeddings,
            attention_bias=model.attention_bias,
            max_position_embeddings=model.max_positions,
            rope_parameters=rope,
            rms_norm_eps=model.rms_norm_eps,
            pad_token_id=None,  # the defaults of some types exceed a small vocabulary
            # transformers' 0.02 suits widths near 2500. At width 128, the first layers would
            # contribute almost nothing, and the model would learn arithmetic late.
            initializer_range=model.hidden_size**-0.5,
            **experts,
        )


def adapter_config(config: DictConfig) -> LoraConfig | None:
    """Return the PEFT configuration of a new adapter, or None if no new adapter is needed."""
    adapter = config.adapter
    if adapter.rank is None or adapter.path:
        return None
    layers = OmegaConf.to_container(adapter)["target_modules"]
    if getattr(config.model, "num_experts", 0) and layers == "all-linear":
        # PEFT would adapt the experts too, with tensors that adapters.merge does not know.
        layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=layers,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on `texts`. Equal texts give equal tokenizers.

    Each digit is a token, so that a number always has the same tokens. Tokens may contain spaces,
    so that a phrase that all texts share becomes one token.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (PAD, USER, ASSISTANT, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )
