"""Completions of a batch of prompts by the run's model: with transformers, or with vLLM offline in this process, on one GPU.

The same prompts in the same order with the same seed give the same samples. Both engines take token ids that are made here, and end at
the same tokens; their samples differ from one another, since they draw differently.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from recipes.common.checkpoint import HEARTBEAT
from recipes.common.data import load_train, texts
from recipes.common.device import compute_dtype, device
from recipes.common.errors import UserError, near
from recipes.common.model import build_model, build_tokenizer, model_directory, write_random
from recipes.common.program import TORCHRUN

ENGINES = ("transformers", "vllm")
BEAT_EVERY_S = 1.0
Prompt = str | list[dict[str, str]]  # text, or messages that the chat template renders


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 takes the likeliest (greedy); `top_k` 0 and `top_p` 1 cut nothing. Raises UserError."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"method.args.max_new_tokens={self.max_new_tokens}: it must be at least 1.")
        if self.temperature < 0:
            raise UserError(f"method.args.temperature={self.temperature}: it must be 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"method.args.top_p={self.top_p}: it must be above 0 and at most 1 (1 cuts nothing).")
        if self.top_k < 0:
            raise UserError(f"method.args.top_k={self.top_k}: it must be 0 (cuts nothing) or more.")


@dataclass(frozen=True)
class Sample:
    """One completion. `num_tokens` counts the one that ends it; `finished`: it ended by itself, and was not cut off."""

    text: str
    num_tokens: int
    finished: bool


TOO_LONG = Sample("", 0, False)  # of a prompt that leaves no position for a first token


def beat_by_token(model: PreTrainedModel, heartbeat: Path, clock: Callable[[], float] = time.monotonic) -> RemovableHandle:
    """Touch `heartbeat` now and then as tokens are embedded, until the handle is removed: transformers says nothing until a whole batch
    is generated, which takes longer than a hang where tokens are slow. The embedding is there whatever wraps the model."""
    last = -BEAT_EVERY_S

    def beat(*_: object) -> None:
        nonlocal last
        if clock() - last >= BEAT_EVERY_S:
            last = clock()
            heartbeat.touch()

    return model.get_input_embeddings().register_forward_hook(beat)


class Generator(ABC):
    """Call it with prompts and a seed: one sample a prompt, in their order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, positions: int, own: GenerationConfig) -> None:
        """`positions`: tokens of prompt and completion together that the model has places for. `own`: the model's configuration."""
        self.tokenizer, self.sampling, self.positions, self.ends = tokenizer, sampling, positions, ends(tokenizer, own)

    def __call__(self, prompts: list[Prompt], seed: int) -> list[Sample]:
        """A prompt that fills the model's context gives TOO_LONG. Raises UserError for messages where there is no chat template."""
        # A prompt's samples stand beside one another: it is rendered once for all of them.
        encoded = [ids for prompt, same in itertools.groupby(prompts) for ids in [self.encode(prompt)] * len(list(same))]
        fitting = [n for n, ids in enumerate(encoded) if len(ids) < self.positions]
        samples = [TOO_LONG] * len(prompts)
        if fitting:
            limits = [min(self.sampling.max_new_tokens, self.positions - len(encoded[n])) for n in fitting]
            for n, sample in zip(fitting, self.generate([encoded[n] for n in fitting], limits, seed), strict=True):
                samples[n] = sample
        return samples

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids. Plain text gets the special tokens that its tokenizer begins a text with; a chat template has its own."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if not self.tokenizer.chat_template:
            raise UserError("the prompts are messages, and the model's tokenizer has no chat template. Use prompts of plain text.")
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def sample(self, ids: list[int]) -> Sample:
        """Of what was generated, with whatever pads it after its end."""
        end = next((n for n, token in enumerate(ids) if token in self.ends), None)
        kept = ids if end is None else ids[: end + 1]
        return Sample(self.tokenizer.decode(kept, skip_special_tokens=True), len(kept), end is not None)

    @abstractmethod
    def generate(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[Sample]:
        """Of token ids; at most `limits` new ones each."""


class TransformersGenerator(Generator):
    """One padded batch a call: what is called with decides how much memory it takes."""

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
        tokenizer.padding_side = "left"  # a batch's prompts must end where its completions begin
        on_cpu = config.trainer_args.get("use_cpu", False)
        self.model = build_model(config).to("cpu" if on_cpu else device()).eval()
        super().__init__(tokenizer, sampling, self.model.config.max_position_embeddings, self.model.generation_config)
        self.dtype = compute_dtype(config)
        beat_by_token(self.model, Path(config.run_dir) / HEARTBEAT)
        self.model.generation_config = GenerationConfig()  # the model's own changes what is not given: Qwen2.5 has a penalty

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[Sample]:
        set_seed(seed)
        where, sampling = self.model.device, self.sampling
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(where)
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        with self.autocast():
            outputs = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max(limits),
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.ends,
                # Given also where they cut nothing: a GenerationConfig that is not told takes the 50 likeliest.
                **({"do_sample": True, **drawn} if sampling.temperature else {"do_sample": False}),
            )
        generated = outputs[:, inputs["input_ids"].shape[1] :].tolist()
        return [self.sample(ids[:limit]) for ids, limit in zip(generated, limits, strict=True)]

    def autocast(self) -> torch.autocast:
        """Weights that are kept in fp32 compute in the precision of the run."""
        return torch.autocast(self.model.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


class VllmGenerator(Generator):
    """vLLM batches by itself, so a call may hold any number of prompts. Each has a seed of its own, drawn from the call's."""

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
        source, revision = _source(config, tokenizer)
        positions = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False).max_position_embeddings
        super().__init__(tokenizer, sampling, positions, _generation_config(source, revision))
        on_cpu, cache_gb = config.trainer_args.get("use_cpu", False), config.topology.server_cache_gb
        with _no_rank():
            from vllm import LLM  # in the GPU images and after `make vllm` only

            self.llm = LLM(
                source,
                revision=revision,
                tokenizer_revision=revision,
                dtype=str(compute_dtype(config)).removeprefix("torch."),
                seed=config.seed,
                max_model_len=positions,
                gpu_memory_utilization=config.topology.server_memory_share,
                kv_cache_memory_bytes=int(cache_gb * 1e9) if cache_gb else None,
                generation_config="vllm",  # as above
                # A CPU has no graphs to capture, and compiling for it takes minutes.
                **{"enforce_eager": on_cpu, **engine_args(config)},
            )

    def generate(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[Sample]:
        from vllm import SamplingParams, TokensPrompt  # as above

        sampling, rng = self.sampling, random.Random(seed)
        how = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=limit,
                seed=rng.getrandbits(31),
                stop_token_ids=self.ends,
                detokenize=False,
            )
            for limit in limits
        ]
        done = self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], how, use_tqdm=False)
        return [self.sample(list(one.outputs[0].token_ids)) for one in done]


def engine_args(config: DictConfig) -> dict[str, Any]:
    """Return further arguments of vLLM's engine: topology.server_args, which the launcher has checked. null leaves one out."""
    given = OmegaConf.to_container(config.topology.server_args)
    return {name: value for name, value in given.items() if value is not None}


def build_generator(config: DictConfig, sampling: Sampling) -> Generator:
    """The engine of `method.args.engine` with the model and tokenizer of `config.model`.

    Raises UserError for an unknown engine, for vLLM where it is not installed, and where there is no model or tokenizer to load.
    """
    engine = config.trainer_args.get("engine", "transformers")
    if engine not in ENGINES:
        raise UserError(f"method.args.engine={engine}: no such engine. {near(engine, ENGINES)}")
    if engine == "vllm":
        check_vllm()
    made = model_directory(config) is None and config.model.init == "random"
    tokenizer = build_tokenizer(config, texts(load_train(config.data, "sft")) if made else [])
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return (VllmGenerator if engine == "vllm" else TransformersGenerator)(config, tokenizer, sampling)


def check_vllm() -> None:
    """Raises UserError where vLLM cannot be imported."""
    try:
        import vllm  # noqa: F401  (takes seconds, and this process needs it next)
    except ImportError as error:
        raise UserError(
            f"method.args.engine=vllm: vLLM cannot be imported where the ranks run ({error}). Use an image that holds it "
            "(containers/build.py lists them), on a CPU `make vllm`; or method.args.engine=transformers."
        ) from error


def ends(tokenizer: PreTrainedTokenizerBase, model: GenerationConfig) -> list[int]:
    """The tokens that end a completion: the tokenizer's and those of the model, which chat models have several of."""
    own = model.eos_token_id
    found = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return sorted({token for token in found if token is not None})


def _generation_config(source: str, revision: str | None) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source, revision=revision)
    except OSError:  # a model may have none
        return GenerationConfig()


def _source(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """Directory or hub name, and revision, that vLLM loads from. Random weights are written into the run directory first."""
    directory = model_directory(config)
    if directory is None and config.model.init == "random":
        directory = write_random(config, tokenizer)
    return (str(directory), None) if directory is not None else (config.model.hub_id, config.model.revision)


@contextlib.contextmanager
def _no_rank() -> Iterator[None]:
    """Without torchrun's variables: vLLM's own process would take itself for a rank of ours, and wait for a store that is not its."""
    removed = {name: os.environ.pop(name) for name in list(os.environ) if TORCHRUN.match(name)}
    try:
        yield
    finally:
        os.environ.update(removed)
