"""Generate completions of a batch of prompts on one GPU, with transformers or vLLM.

Samples depend only on the prompts, their order and the seed. Both engines get the same token ids
and stop at the same tokens, but their samples differ.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from transformers.generation.streamers import BaseStreamer

from launch.core.errors import UserError
from recipes.data.data_load import run_texts
from recipes.data.data_messages import render
from recipes.models.model_build import build_model, build_tokenizer, find_source, write_random
from recipes.models.pretrained import Source, file_errors
from recipes.rank.device import compute_dtype, device
from recipes.rank.program import TORCHRUN
from recipes.training.checkpoint import HEARTBEAT

BEAT_EVERY_S = 1.0
Prompt = str | list[dict[str, str]]  # text, or messages for the chat template


@dataclass(frozen=True)
class Sample:
    """A completion. `num_tokens` includes the end token; `finished` is False if truncated."""

    text: str
    num_tokens: int
    finished: bool


@dataclass
class SamplingConfig:
    """Arguments of methods that sample. A temperature of 0 is greedy; top_k of 0 is off."""

    output_dir: str
    seed: int = 0
    engine: str = "transformers"
    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    use_cpu: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chat_template_kwargs = dict(self.chat_template_kwargs)  # not a DictConfig


TOO_LONG = Sample("", 0, False)  # the prompt fills the model's context


def beat_by_token(
    model: PreTrainedModel, heartbeat: Path, clock: Callable[[], float] = time.monotonic
) -> RemovableHandle:
    """Touch `heartbeat` at every forward pass, until the returned handle is removed.

    transformers returns only after a complete batch, which can take longer than the watchdog's
    limit. The hook is on the embedding, which every wrapper of a model calls.
    """
    last = -BEAT_EVERY_S

    def beat(*_: object) -> None:
        nonlocal last
        if clock() - last >= BEAT_EVERY_S:
            last = clock()
            heartbeat.touch()

    return model.get_input_embeddings().register_forward_hook(beat)


class SampleGenerator(ABC):
    """Generate one sample for each prompt."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        args: Any,
        positions: int,
        defaults: GenerationConfig,
    ) -> None:
        """Create a generator for a model.

        `args` has max_new_tokens, temperature (0 is greedy), top_p and top_k (1 and 0 are off).
        `positions` is the length of the model's context in tokens. Only the end tokens
        of `defaults`, the model's generation configuration, are used.
        """
        self.tokenizer, self.args, self.positions = tokenizer, args, positions
        self.ends = end_tokens(tokenizer, defaults)

    def __call__(
        self, prompts: list[Prompt], seed: int, streamer: BaseStreamer | None = None
    ) -> list[Sample]:
        """Return a sample for each prompt; TOO_LONG if it fills the context. Raises UserError.

        If there is only one prompt, `streamer` gets its tokens, and then each new token.
        """
        encoded: list[list[int]] = []
        # Equal prompts are adjacent, so encode each only once.
        for prompt, group in itertools.groupby(prompts):
            encoded += [self.encode(prompt)] * len(list(group))
        fitting = [n for n, ids in enumerate(encoded) if len(ids) < self.positions]
        samples = [TOO_LONG] * len(prompts)
        if not fitting:
            return samples
        available = [self.positions - len(encoded[n]) for n in fitting]
        limits = [min(self.args.max_new_tokens, tokens) for tokens in available]
        generated = self.generate([encoded[n] for n in fitting], limits, seed, streamer)
        for n, sample in zip(fitting, generated, strict=True):
            samples[n] = sample
        return samples

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises RowError if the chat template fails.

        The tokenizer adds special tokens only to text, since a chat template contains its own.
        """
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        (text,) = self.render([prompt])
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def render(self, prompts: list[list[dict[str, str]]]) -> list[str]:
        """Return the text of prompts that are messages. Raises RowError as encode does."""
        options = {"tokenize": False, "add_generation_prompt": True}
        return render(self.tokenizer, prompts, **options, **self.args.chat_template_kwargs)

    def sample(self, ids: list[int]) -> Sample:
        """Return a sample from generated ids. Remove padding after the end token."""
        end = next((n for n, token in enumerate(ids) if token in self.ends), None)
        completion = ids if end is None else ids[: end + 1]
        text = self.tokenizer.decode(completion, skip_special_tokens=True)
        return Sample(text, len(completion), end is not None)

    @abstractmethod
    def generate(
        self,
        prompts: list[list[int]],
        limits: list[int],
        seed: int,
        streamer: BaseStreamer | None = None,
    ) -> list[Sample]:
        """Return a sample for each list of token ids, with at most `limits[n]` new tokens."""


class TransformersGenerator(SampleGenerator):
    """Generate with transformers, in one padded batch."""

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
        tokenizer.padding_side = "left"  # so that all completions start at the same position
        on_cpu = config.trainer_args.get("use_cpu", False)
        self.model = build_model(config).to("cpu" if on_cpu else device()).eval()
        positions = self.model.config.max_position_embeddings
        super().__init__(tokenizer, args, positions, self.model.generation_config)
        self.dtype = compute_dtype(config)
        beat_by_token(self.model, Path(config.run_dir) / HEARTBEAT)
        # The model's own configuration would add defaults, such as Qwen2.5's repetition penalty.
        self.model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        limits: list[int],
        seed: int,
        streamer: BaseStreamer | None = None,
    ) -> list[Sample]:
        set_seed(seed)
        device, args = self.model.device, self.args
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(device)
        sampling: dict[str, Any] = {"do_sample": False}
        if args.temperature:
            # Always pass top_k, because GenerationConfig's default is 50.
            # transformers rejects a temperature of 1 that is an int.
            sampling = {"do_sample": True, "temperature": float(args.temperature)}
            sampling |= {"top_k": args.top_k, "top_p": args.top_p}
        with self.autocast():
            outputs = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max(limits),
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.ends,
                streamer=streamer,
                **sampling,
            )
        generated = outputs[:, inputs["input_ids"].shape[1] :].tolist()
        return [self.sample(ids[:limit]) for ids, limit in zip(generated, limits, strict=True)]

    def autocast(self) -> torch.autocast:
        """Return a context that computes in the run's precision, even with fp32 weights."""
        return torch.autocast(
            self.model.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )


class VllmGenerator(SampleGenerator):
    """Generate with vLLM. Each prompt's seed is derived from the call's seed."""

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, args: Any) -> None:
        name, revision = vllm_source(config, tokenizer)
        with file_errors(config):
            positions = AutoConfig.from_pretrained(
                name, revision=revision, trust_remote_code=False
            ).max_position_embeddings
        positions = min(positions, config.topology.server_max_length or positions)
        try:
            defaults = GenerationConfig.from_pretrained(name, revision=revision)
        except OSError:  # some models have no generation_config.json
            defaults = GenerationConfig()
        super().__init__(tokenizer, args, positions, defaults)
        self.num_streamed = 0
        on_cpu = config.trainer_args.get("use_cpu", False)
        cache_gb = config.topology.server_cache_gb
        # With torchrun's variables, vLLM's process would act as a rank.
        hidden = {name: os.environ.pop(name) for name in list(os.environ) if TORCHRUN.match(name)}
        try:
            from vllm import LLM

            self.llm = LLM(
                name,
                revision=revision,
                tokenizer_revision=revision,
                dtype=str(compute_dtype(config)).removeprefix("torch."),
                seed=config.seed,
                max_model_len=positions,
                gpu_memory_utilization=config.topology.server_memory_share,
                kv_cache_memory_bytes=int(cache_gb * 1e9) if cache_gb else None,
                generation_config="vllm",  # ignore the model's defaults
                # On a CPU there are no graphs to capture, and compilation takes minutes.
                **{"enforce_eager": on_cpu, **engine_args(config)},
            )
        except ImportError as error:
            raise UserError(
                f"method.args.engine=vllm: vLLM cannot be imported ({error}). Use an image with "
                "vLLM (python containers/build.py lists images), `make vllm` on a CPU, or "
                "method.args.engine=transformers."
            ) from error
        finally:
            os.environ.update(hidden)

    def generate(
        self,
        prompts: list[list[int]],
        limits: list[int],
        seed: int,
        streamer: BaseStreamer | None = None,
    ) -> list[Sample]:
        from vllm import SamplingParams, TokensPrompt  # may be missing

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
        if streamer is not None:
            streamer.put(torch.tensor(prompts[0]))
            return [self.stream(token_prompts[0], parameters[0], streamer)]
        requests = self.llm.generate(token_prompts, parameters, use_tqdm=False)
        return [self.sample(list(request.outputs[0].token_ids)) for request in requests]

    def stream(self, prompt: Any, parameters: Any, streamer: BaseStreamer) -> Sample:
        """Return a sample of a prompt, and pass its tokens to `streamer` as they come.

        vLLM's LLM.generate returns only complete samples. If `streamer` raises, abort the request.
        """
        engine, ids = self.llm.llm_engine, list[int]()
        self.num_streamed += 1
        request = f"stream-{self.num_streamed}"
        engine.add_request(request, prompt, parameters)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():  # with all tokens so far
                    new = list(output.outputs[0].token_ids)[len(ids) :]
                    ids += new
                    if new:
                        streamer.put(torch.tensor(new))
        except BaseException:
            engine.abort_request([request])
            raise
        streamer.end()
        return self.sample(ids)


def engine_args(config: DictConfig) -> dict[str, Any]:
    """Return topology.server_args for vLLM's engine, without null values."""
    arguments = OmegaConf.to_container(config.topology.server_args)
    return {name: value for name, value in arguments.items() if value is not None}


def build_generator(config: DictConfig, args: Any) -> SampleGenerator:
    """Return the generator of `method.args.engine`, with the run's model and tokenizer.

    Raises UserError if vLLM, the model or the tokenizer is missing.
    """
    generators = {"transformers": TransformersGenerator, "vllm": VllmGenerator}
    generator = generators[config.trainer_args.get("engine", "transformers")]
    tokenizer = run_tokenizer(config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return generator(config, tokenizer, args)


def run_tokenizer(config: DictConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer; for random weights, train one on the run's data."""
    is_random = find_source(config) is None
    return build_tokenizer(config, run_texts(config) if is_random else [])


def vllm_source(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Return the source of the model for vLLM, which needs files. Write random weights first."""
    return find_source(config) or Source(str(write_random(config, tokenizer)))


def end_tokens(tokenizer: PreTrainedTokenizerBase, defaults: GenerationConfig) -> list[int]:
    """Return the ids of the tokens that end a completion, the tokenizer's and the model's."""
    ids = defaults.eos_token_id
    tokens = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}
    return sorted(tokens - {None})
