"""List the changes that may make a run fit. launch/search/fit.py tries them."""

from __future__ import annotations

from collections.abc import Iterator

from launch.config.choose import with_value
from launch.config.compose import leaf
from launch.estimate import memory
from launch.estimate.batch_counts import ACCUMULATION, batch
from launch.estimate.rank_state import OPTIMIZERS, has_reference
from launch.machine import placement
from launch.rules.topology import longest
from launch.rules.warnings import adapter_rate
from launch.schema import Config
from launch.schema.trainer_args import known, value, value_or_none

Remedy = tuple[list[str], str]  # overrides and their cost

FP16_PRICE = "fp16 needs loss scaling; watch for NaN"
SHARES = (0.5, 0.3, 0.15)  # of memory, for a server that shares its GPU with a trainer
SHARES_ALONE = (0.9, 0.95)  # for an engine that has its GPU to itself; AMD's guide uses 0.98


def remedies(config: Config) -> Iterator[Remedy]:
    """Yield the possible remedies, cheapest first. Remedies that change results come last."""
    topology, precision = config.topology, config.precision
    trains, has_nf4 = config.method.trains, "nf4" in config.hardware.precisions
    trains_all, replicated = config.adapter.rank is None, topology.strategy in ("none", "ddp")
    cost = "same results"
    if value_or_none(config, "gradient_checkpointing") is False:
        yield ["method.args.gradient_checkpointing=true"], f"{cost}, with a third more computation"
    if topology.name == "colocate" and not value(config, "vllm_enable_sleep_mode"):
        sleeps = "vLLM frees its memory during training"
        yield ["method.args.vllm_enable_sleep_mode=true"], f"{cost}: {sleeps}"
    if placement.shares_gpu(config):
        turns = ["topology=colocate", "method.args.vllm_enable_sleep_mode=true"]
        yield turns, "vLLM and the trainer use the GPU by turns"
    may_precompute = value_or_none(config, "precompute_ref_log_probs") is False
    if may_precompute and has_reference(config) and not value(config, "sync_ref_model"):
        freed = "the reference scores all rows first and is then freed"
        yield ["method.args.precompute_ref_log_probs=true"], f"{cost}: {freed}"
    if config.hardware.gpus_per_node > 1 and replicated:
        yield _sharded(config)
    if topology.strategy == "fsdp" and has_reference(config):  # FSDP gathers the whole reference
        zero3 = "topology.strategy=zero3" if topology.servers else "topology=zero3"
        yield [zero3], f"{cost}, with DeepSpeed"
    runs_vllm = value_or_none(config, "engine") == "vllm"
    is_service = config.method.kind == "service"
    if topology.servers or runs_vllm or is_service:
        yield from _engine_sizes(config)
    if is_service:
        yield from _wider_replicas(config)
    if topology.servers:
        yield from _other_servers(config)
    yield from _offloads(config)
    # bitsandbytes supports the GPUs with nf4. Sharded moments are small anyway.
    has_optim = "optim" in known(config) and OPTIMIZERS.get(value(config, "optim")) == 2
    if trains_all and replicated and has_nf4 and has_optim:
        yield ["method.args.optim=adamw_8bit"], "AdamW's moments are rounded to 8 bits"
    if precision.weights == "fp32":
        yield _half_weights(config)
    rate = adapter_rate(with_value(config, "adapter.rank", 1))
    rates = [rate] if rate else []
    if trains_all and trains:
        yield ["adapter=lora", *rates], "trains about 1% of the parameters"
    if config.adapter.name in ("none", "lora") and trains and has_nf4:
        cost = "trains about 1% of the parameters and rounds the rest to 4 bits"
        yield ["adapter=qlora", "precision=nf4", *rates], cost
    for key in ("max_length", "max_completion_length"):
        if batch(config).sequence >= 512 and (most := value_or_none(config, key)):
            yield [f"method.args.{key}={int(most) // 2}"], "truncates longer rows"
    if runs_vllm:
        cost = "slower, but needs no memory for the longest possible sequence"
        yield ["method.args.engine=transformers"], cost


def _offloads(config: Config) -> Iterator[Remedy]:
    offloads = (
        ("fsdp", "fsdp.cpu_offload", "weights and optimizer"),
        ("zero2", "zero.offload_optimizer", "the optimizer"),
        ("zero3", "zero.offload_optimizer", "the optimizer"),
        ("zero3", "zero.offload_parameters", "the weights"),
    )
    for strategy, key, parts in offloads:
        if config.topology.strategy == strategy and not leaf(config, f"topology.{key}"):
            gb = sum(memory.offloaded_gb(with_value(config, f"topology.{key}", True)).values())
            price = f"same results, slower: the host stores {parts}, {gb:.0f} GB in all"
            yield [f"topology.{key}=true"], price


def _sharded(config: Config) -> Remedy:
    """Return FSDP over the same ranks, or over all GPUs of the node if only one GPU trains now."""
    slower = "ranks exchange weights"
    if config.topology.name == "colocate":
        slower += "; transformers generates, which is slower"
    if config.topology.servers or config.topology.strategy == "ddp":
        key = "topology.strategy" if config.topology.servers else "topology"
        return [f"{key}=fsdp"], f"same results, but {slower}"
    ranks = config.hardware.gpus_per_node
    accumulation, rest = divmod(batch(config).accumulation, ranks)
    if config.effective_batch is not None:
        return ["topology=fsdp"], f"same results on {ranks} GPUs, but {slower}"
    if rest:
        cost = f"{ranks} GPUs, so {ranks} times the sequences per step, and {slower}"
        return ["topology=fsdp"], cost
    overrides = ["topology=fsdp", f"{ACCUMULATION}={accumulation}"]
    return overrides, f"same results on {ranks} GPUs, but {slower}"


def _half_weights(config: Config) -> Remedy:
    """Return 16-bit weights in the dtype of the products, or in one that the GPU supports."""
    compute, cost = config.precision.compute, "weights are rounded to 16 bits"
    if config.method.trains and config.adapter.rank is None:
        cost += ", which loses small updates"
    low = "bf16" if "bf16" in config.hardware.precisions else "fp16"
    if compute != "fp32":
        return [f"precision.weights={low if compute == 'fp8' else compute}"], cost
    if low == "fp16" and config.method.trains:
        cost += f"; {FP16_PRICE}"
    return [f"precision={low}", f"precision.weights={low}"], cost


def _engine_sizes(config: Config) -> Iterator[Remedy]:
    """Yield remedies for a vLLM engine: shorter sequences, and its memory share."""
    topology, shared = config.topology, placement.shares_gpu(config)
    length = topology.server_max_length or config.model.max_positions
    shorter = max(2048, 2 * longest(config))
    cost = (
        f"the cache need not hold a sequence of {length} tokens; same results if a prompt and its "
        f"completion have at most {shorter}"
    )
    cut = [([f"topology.server_max_length={shorter}"], cost)] * (shorter < length)
    is_service = config.method.kind == "service"  # whose requests may be long
    yield from () if is_service else cut
    if topology.server_cache_gb:
        cost = "vLLM sizes its cache by topology.server_memory_share"
        yield ["topology.server_cache_gb=null"], cost
    elif shared:
        for share in SHARES:
            cost = "same results, but vLLM and the trainer divide their GPU differently"
            yield [f"topology.server_memory_share={share}"], cost
    else:
        for share in SHARES_ALONE:
            if topology.server_memory_share < share:
                cost = "same results; nothing else may use the GPU"
                yield [f"topology.server_memory_share={share}"], cost
    yield from cut if is_service else ()


def _wider_replicas(config: Config) -> Iterator[Remedy]:
    """Yield remedies for a service: replicas on several GPUs."""
    gpus = placement.num_gpus(config)
    for parallel in (2, 4, 8):
        if config.topology.server_tensor_parallel < parallel <= gpus:
            cost = f"same results from {gpus // parallel} replica(s) on {parallel} GPUs each"
            yield [f"topology.server_tensor_parallel={parallel}"], cost


def _other_servers(config: Config) -> Iterator[Remedy]:
    """Yield remedies for a server: its own GPU, or several if one is left for training."""
    topology, gpus = config.topology, placement.num_gpus(config)
    if placement.shares_gpu(config) and config.hardware.gpus_per_node > 1:
        yield ["topology.num_gpus=2"], "same results, with one GPU each for server and trainer"
    for parallel in (2, 4, 8):
        trainers = gpus - topology.servers * parallel
        if topology.server_tensor_parallel < parallel and trainers > 0:
            fewer = "" if config.effective_batch is not None else ", so a step has fewer sequences"
            cost = f"{gpus - trainers} GPUs serve and {trainers} train{fewer}"
            yield [f"topology.server_tensor_parallel={parallel}"], cost
