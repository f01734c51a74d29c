"""Generate completions of a batch of prompts on one GPU, with transformers or vLLM.

The same prompts in the same order with the same seed give the same samples. Both engines get the
same token ids and stop at the same tokens, but their samples differ.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.hooks import RemovableHandle
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from launch.core.errors import UserError
from recipes.data.data_load import load, texts
from recipes.models.model_build import build_model, build_tokenizer, model_directory, write_random
from recipes.rank.device import compute_dtype, device
from recipes.rank.program import TORCHRUN
from recipes.training.checkpoint import HEARTBEAT

BEAT_EVERY_S = 1.0
Prompt = str | list[dict[str, str]]  # text, or messages that the chat template renders


@dataclass(frozen=True)
class Sample:
    """Hold a completion. `num_tokens` includes the end token; `finished` is False if truncated."""

    text: str
    num_tokens: int
    finished: bool


TOO_LONG = Sample("", 0, False)  # the prompt leaves no position for a first token


def beat_by_token(
    model: PreTrainedModel, heartbeat: Path, clock: Callable[[], float] = time.monotonic
) -> RemovableHandle:
    """Touch `heartbeat` whenever tokens are embedded, until the returned handle is removed.

    transformers reports nothing until a whole batch is generated, which can take longer than the
    watchdog's limit. The hook is on the embedding because every wrapped model calls it.
    """
    last = -BEAT_EVERY_S

    def beat(*_: object) -> None:
        nonlocal last
        if clock() - last >= BEAT_EVERY_S:
            last = clock()
            heartbeat.touch()

    return model.get_input_embeddings().register_forward_hook(beat)


class Generator(ABC):
    """Generate one sample for each prompt, in order, from a seed."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        args: Any,
        positions: int,
        own: GenerationConfig,
    ) -> None:
        """Create a generator for a model.

        `args` has max_new_tokens, temperature (0 is greedy), top_p and top_k (1 and 0 are off).
        `positions` is the length of the model's context, for prompt and completion together. `own`
        is the model's generation configuration.
        """
        self.tokenizer, self.args, self.positions = tokenizer, args, positions
        self.ends = ends(tokenizer, own)

    def __call__(self, prompts: list[Prompt], seed: int) -> list[Sample]:
        """Return a sample for each prompt, or TOO_LONG for one that fills the model's context.

        Raises UserError for messages without a chat template.
        """
        encoded: list[list[int]] = []
        # A prompt's samples are adjacent, so encode it once for all of them.
        for prompt, same in itertools.groupby(prompts):
            encoded += [self.encode(prompt)] * len(list(same))
        fitting = [n for n, ids in enumerate(encoded) if len(ids) < self.positions]
        samples = [TOO_LONG] * len(prompts)
        if not fitting:
            return samples
        room = [self.positions - len(encoded[n]) for n in fitting]
        limits = [min(self.args.max_new_tokens, tokens) for tokens in room]
        generated = self.generate([encoded[n] for n in fitting], limits, seed)
        for n, sample in zip(fitting, generated, strict=True):
            samples[n] = sample
        return samples

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises UserError if the chat template fails.

        The tokenizer adds its special tokens to plain text only, since a chat template has its own.
        """
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        try:
            text = self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        except (ValueError, jinja2.TemplateError) as error:  # ValueError if there is none
            raise UserError(f"{error} Use: model.chat_template=<file.jinja>.") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def sample(self, ids: list[int]) -> Sample:
        """Return the sample of generated ids, without padding after the end token."""
        end = next((n for n, token in enumerate(ids) if token in self.ends), None)
        completion = ids if end is None else ids[: end + 1]
        text = self.tokenizer.decode(completion, skip_special_tokens=True)
        return Sample(text, len(completion), end is not None)

    @abstractmethod
    def generate(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[Sample]:
        """Return a sample for each list of token ids, of at most `limits` new tokens each."""


class TransformersGenerator(Generator):
    """Generate each call's prompts as one padded batch."""

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
        tokenizer.padding_side = "left"  # so that all completions of a batch start together
        on_cpu = config.trainer_args.get("use_cpu", False)
        self.model = build_model(config).to("cpu" if on_cpu else device()).eval()
        positions = self.model.config.max_position_embeddings
        super().__init__(tokenizer, args, positions, self.model.generation_config)
        self.dtype = compute_dtype(config)
        beat_by_token(self.model, Path(config.run_dir) / HEARTBEAT)
        # The model's own configuration would add defaults, such as Qwen2.5's repetition penalty.
        self.model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[Sample]:
        set_seed(seed)
        device, args = self.model.device, self.args
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(device)
        draws: dict[str, Any] = {"do_sample": False}
        if args.temperature:
            # Pass both even if they are off, since GenerationConfig's default is the top 50.
            draws = {"do_sample": True, "temperature": args.temperature}
            draws |= {"top_k": args.top_k, "top_p": args.top_p}
        with self.autocast():
            outputs = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max(limits),
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.ends,
                **draws,
            )
        generated = outputs[:, inputs["input_ids"].shape[1] :].tolist()
        return [self.sample(ids[:limit]) for ids, limit in zip(generated, limits, strict=True)]

    def autocast(self) -> torch.autocast:
        """Return a context that computes in the run's precision, since weights may be fp32."""
        return torch.autocast(
            self.model.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )


class VllmGenerator(Generator):
    """Generate with vLLM, which batches the prompts; each prompt's seed follows from the call's."""

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
        directory, revision = model_directory(config), None
        if directory is None and config.model.init == "random":
            directory = write_random(config, tokenizer)  # since vLLM needs files
        source = str(directory)
        if directory is None:
            source, revision = config.model.hub_id, config.model.revision
        positions = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=False
        ).max_position_embeddings
        try:
            defaults = GenerationConfig.from_pretrained(source, revision=revision)
        except OSError:  # some models have none
            defaults = GenerationConfig()
        super().__init__(tokenizer, args, positions, defaults)
        on_cpu = config.trainer_args.get("use_cpu", False)
        cache_gb = config.topology.server_cache_gb
        # Hide torchrun's variables, since with them vLLM's process would act as a rank.
        removed = {name: os.environ.pop(name) for name in list(os.environ) if TORCHRUN.match(name)}
        try:
            from vllm import LLM

            self.llm = LLM(
                source,
                revision=revision,
                tokenizer_revision=revision,
                dtype=str(compute_dtype(config)).removeprefix("torch."),
                seed=config.seed,
                max_model_len=positions,
                gpu_memory_utilization=config.topology.server_memory_share,
                kv_cache_memory_bytes=int(cache_gb * 1e9) if cache_gb else None,
                generation_config="vllm",  # ignore the model's own
                # A CPU has no graphs to capture, and compiling for it takes minutes.
                **{"enforce_eager": on_cpu, **engine_args(config)},
            )
        except ImportError as error:
            raise UserError(
                f"method.args.engine=vllm: vLLM cannot be imported where the ranks run ({error}). "
                "Use an image that has it (containers/build.py lists them), on a CPU `make vllm`;"
                " or method.args.engine=transformers."
            ) from error
        finally:
            os.environ.update(removed)

    def generate(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[Sample]:
        from vllm import SamplingParams, TokensPrompt  # not installed everywhere

        args, rng = self.args, random.Random(seed)
        parameters = [
            SamplingParams(
                temperature=args.temperature,
                top_p=args.top_p,
                top_k=args.top_k,
                max_tokens=limit,
                seed=rng.getrandbits(31),
                stop_token_ids=self.ends,
                detokenize=False,
            )
            for limit in limits
        ]
        token_prompts = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        requests = self.llm.generate(token_prompts, parameters, use_tqdm=False)
        return [self.sample(list(request.outputs[0].token_ids)) for request in requests]


def engine_args(config: DictConfig) -> dict[str, Any]:
    """Return topology.server_args for vLLM's engine, without null values."""
    arguments = OmegaConf.to_container(config.topology.server_args)
    return {name: value for name, value in arguments.items() if value is not None}


def build_generator(config: DictConfig, args: Any) -> Generator:
    """Return the generator of `method.args.engine`, with the run's model and tokenizer.

    Raises UserError if vLLM is missing, or if there is no model or tokenizer to load.
    """
    generators = {"transformers": TransformersGenerator, "vllm": VllmGenerator}
    generator = generators[config.trainer_args.get("engine", "transformers")]
    is_random = model_directory(config) is None and config.model.init == "random"
    tokenizer = build_tokenizer(config, texts(load(config.data, "sft").rows) if is_random else [])
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return generator(config, tokenizer, args)


def ends(tokenizer: PreTrainedTokenizerBase, model: GenerationConfig) -> list[int]:
    """Return the ids that end a completion: the tokenizer's, and one or more of the model's."""
    ids = model.eos_token_id
    tokens = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}
    return sorted(tokens - {None})
