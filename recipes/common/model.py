"""The model and the tokenizer of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import PartialState
from huggingface_hub import snapshot_download, try_to_load_from_cache
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, PeftModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from recipes.common import adapters, attention
from recipes.common.device import DTYPES, compute_dtype, device
from recipes.common.errors import UserError, near
from recipes.common.files import place_directory
from recipes.common.low_precision import nf4, to_float8
from recipes.common.model_card import stated_license
from recipes.common.program import is_main_rank, rank

RANDOM = "model_init"  # in the run directory

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
# What TRL's assistant_only_loss needs stands between the generation markers: the answer and the token that ends it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT + "' }}{% generation %}{{ message['content'] + '" + END + "' }}{% endgeneration %}"
    "{% else %}{{ '" + USER + "' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)
TRAINED_VOCABULARY = 512


def build_tokenizer(config: DictConfig, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of `config.model`: that of its directory or of the hub, and for random weights one trained on `texts`.

    Raises UserError where the directory or the hub has none.
    """
    model, directory = config.model, model_directory(config)
    if directory is not None:
        _check_directory(directory)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    elif model.init == "random":
        tokenizer = train_tokenizer(texts, vocab_size=min(TRAINED_VOCABULARY, model.vocab_size))
    else:
        tokenizer = _from_hub(AutoTokenizer, model)
    template = model.chat_template or config.data.chat_template
    if template:
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return tokenizer


def build_model(config: DictConfig) -> PreTrainedModel | PeftModel:
    """The model of `config.model` as `config.precision` trains it, with the adapter of `config.adapter.path` where one is given.

    In the run of an adapter its base is noted in the run directory.

    Raises UserError for a directory without safetensors, a model the hub does not give, a package that the precision needs and that is
    not installed, and an adapter of another base.
    """
    if config.precision.weights == "nf4":
        model, base = _quantized(config)
    else:
        model, base = plain_model(config), None
    if config.adapter.rank is not None:
        base = base or _fingerprint(config, model)
        adapters.note_base(Path(config.run_dir), base)
    if config.precision.compute == "fp8":
        model = to_float8(model, pads=not isinstance(OmegaConf.select(config, "trainer_args.pad_to_multiple_of"), int))
    return adapters.load_adapter(model, config, base) if config.adapter.path else model


def plain_model(config: DictConfig, **kwargs) -> PreTrainedModel:
    """The model of `config.model` with parameters in the dtype that `config.precision` keeps them in (of nf4: its compute dtype).

    What is saved of it states the licence that the model's own card does. It is on the CPU where it is pretrained. Random weights follow
    from `config.seed` and, where there is a GPU, are drawn on it: a CPU needs minutes for 8e9 of them. `kwargs` go to from_pretrained.

    Raises UserError for a directory without safetensors, and a model the hub does not give.
    """
    set_seed(config.seed)  # for random weights, and for the adapter that the trainer will draw
    model, kwargs = config.model, {"dtype": _dtype(config), "attn_implementation": attention.implementation(config), **kwargs}
    directory = model_directory(config)
    if directory is None and model.init == "random":
        unset_hf_deepspeed_config()  # ZeRO-3 would draw each rank's part, and other weights than every other strategy
        with torch.device(device()):
            return _rounded(AutoModelForCausalLM.from_config(model_config(model), **kwargs), compute_dtype(config))
    if directory is None:
        loaded = _from_hub(AutoModelForCausalLM, model, use_safetensors=True, **kwargs)
        # Weights are fetched without their card: it is there where a whole snapshot was.
        card = try_to_load_from_cache(model.hub_id, "README.md", revision=model.revision)
        directory = Path(card).parent if isinstance(card, str) else None
    else:
        loaded = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, use_safetensors=True, **kwargs)
    if directory is not None and (stated := stated_license(directory)):
        loaded.config.license = stated
    return loaded


def _quantized(config: DictConfig) -> tuple[PreTrainedModel, str]:
    """The model with its linear layers in nf4, and its fingerprint. Only files can be read in 4 bits: random weights are written first.

    The main rank draws and writes them for all: transformers writes nothing on another. Every rank takes part.
    """
    kwargs = {"quantization_config": nf4(compute_dtype(config)), "device_map": {"": device()}}
    if model_directory(config) is not None or config.model.init != "random":
        model = plain_model(config, **kwargs)
        return model, _fingerprint(config, model)
    ranks, written = PartialState(), Path(config.run_dir) / ".random_weights"  # ranks on other nodes see the run directory
    if is_main_rank():
        plain_model(config).save_pretrained(written)
    ranks.wait_for_everyone()
    model = plain_model(OmegaConf.merge(config, {"model": {"path": str(written)}}), **kwargs)
    base = adapters.fingerprint_of_files(written)
    ranks.wait_for_everyone()
    if is_main_rank():
        shutil.rmtree(written)
    model.name_or_path = model.config._name_or_path = ""  # not that of a directory that is gone
    return model, base


def _fingerprint(config: DictConfig, model: PreTrainedModel) -> str:
    """From the files where there are some: what is in memory may be in 4 bits, or a rank's part."""
    directory = model_directory(config)
    if directory is None and config.model.init != "random":
        directory = Path(snapshot_download(config.model.hub_id, revision=config.model.revision, local_files_only=True))
    return adapters.fingerprint_of_files(directory) if directory else adapters.fingerprint_of(model)


def _rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights of the precision they compute in, as published ones are, whatever dtype holds them.

    DeepSpeed's fp32 copy starts from 16-bit weights, those of the other strategies from what they are given: with digits that 16 bits
    do not hold, a first step of 2e-5 moved loss by 3.1 under ddp and fsdp and by 1.2 under ZeRO (docs/results/topologies.md).
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    return model


def write_random(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Random weights and their tokenizer in the run directory, for vLLM, which reads a model from files only. Of several ranks that write
    the same at once the first one's stay."""
    target = Path(config.run_dir) / RANDOM
    staged = target.with_name(f".{target.name}.{rank()}.staging")
    shutil.rmtree(staged, ignore_errors=True)
    model = plain_model(config)  # in 16 or 32 bits, whatever precision the run trains it in
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    place_directory(staged, target)
    return target


def model_directory(config: DictConfig) -> Path | None:
    """Where the weights lie on a disk: those the user names, or random ones that write_random has written."""
    made = Path(config.run_dir) / RANDOM
    return Path(config.model.path) if config.model.path else made if made.is_dir() else None


def model_config(model: DictConfig) -> AutoConfig:
    """The configuration of transformers for the shape that conf/model states."""
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
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=model.rms_norm_eps,
        # transformers' 0.02 is that of widths near 2500; at 128 it leaves the first layers silent and arithmetic unlearnt for long.
        initializer_range=model.hidden_size**-0.5,
    )


def adapter_config(config: DictConfig) -> LoraConfig | None:
    """The peft configuration of a new adapter, or None where all parameters train or build_model has loaded the adapter."""
    adapter = config.adapter
    if adapter.rank is None or adapter.path:
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules if isinstance(adapter.target_modules, str) else list(adapter.target_modules),
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`; equal texts give equal tokenizers.

    Digits stay single tokens, so that a number is spelt the same way wherever it stands; merges may cross spaces, so that a
    phrase all problems share becomes one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (PAD, USER, ASSISTANT, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE)


def _dtype(config: DictConfig) -> torch.dtype:
    weights = config.precision.weights
    if weights not in (*DTYPES, "nf4"):
        raise UserError(f"precision.weights={weights}: unknown. {near(weights, [*DTYPES, 'nf4'])}")
    return DTYPES.get(weights, compute_dtype(config))  # nf4: of what is not quantized


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise UserError(f"model.path={path}: there is no config.json in it. Give a directory that save_pretrained wrote.")
    if not any(path.glob("*.safetensors")):
        found = ", ".join(sorted(p.name for p in path.iterdir())[:5])
        raise UserError(
            f"model.path={path}: there are no .safetensors weights in it ({found}). Pickled weights can run code when they are loaded and "
            "are refused; convert them with save_pretrained."
        )


def _from_hub(auto_class: type, model: DictConfig, **kwargs):
    if model.hub_id is None or model.revision is None:
        raise UserError(f"model={model.name} has no hub_id with a revision: give model.path=<directory>, or model.init=random.")
    try:
        return auto_class.from_pretrained(model.hub_id, revision=model.revision, trust_remote_code=False, **kwargs)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model {model.hub_id} at {model.revision} could not be had: {reason} Give model.path=<directory>, or model.init=random."
        ) from error
