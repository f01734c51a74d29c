"""The table of rules, row by row: a composition that each rule refuses, and the words it says."""

from __future__ import annotations

import time

import pytest

from launch import batch
from launch.batch import fitting_batches
from launch.check import RULES, check, refusals
from launch.compose import groups
from launch.errors import UserError
from launch.planner import shapes
from launch.rules.model import TOLERANCE
from launch.rules.warnings import rule_warnings
from launch.schema import Config
from tests.conftest import composed

NODES = ["runtime=slurm", "runtime.slurm.nodes=2", "runtime.slurm.interface=ib0"]

# rule -> (overrides that break it, words of message and remedy)
CODE = ["method=grpo", "topology=single", "data=code", "~method.rewards.reasoning_gym", "+method.rewards.code_tests=1.0"]
RAFT = [
    "hardware=mi300x",
    "model=qwen3_4b",
    "model.path=/m",
    "method=raft",
    "~method.rewards.reasoning_gym",
    "+method.rewards.accuracy=1.0",
]
BEST = ["method.selection.metric=eval_loss"]
BY_REWARD = ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "method.selection.metric=eval_reward"]
CASES = {
    "precision": (["hardware=mi210", "precision=fp8"], ["precision=fp8 on mi210", "gfx90a"]),
    "nf4_without_adapter": (["hardware=mi300x", "precision=nf4", "model=qwen3_4b"], ["adapter=none", "adapter=qlora"]),
    "qlora_without_nf4": (["hardware=mi300x", "adapter=qlora", "precision=bf16"], ["adapter=qlora with precision=bf16", "precision=nf4"]),
    "adapter_without_training": (
        ["method=evaluate", "adapter=lora"],
        ["method=evaluate: it trains none", "adapter=none, with model.path="],
    ),
    "adapter_keys": (["adapter=none", "adapter.rslora=true"], ["adapter.rslora under adapter=none", "adapter=lora"]),
    "adapter_dropout": (["adapter=lora", "adapter.dropout=1"], ["adapter.dropout=1", "share"]),
    "adapter_layers": (
        ["adapter=lora", "adapter.target_modules=[q_prj,v_proj]"],
        ["[q_prj,v_proj]: no linear layer is named q_prj. Did you mean q_proj", "adapter.target_modules=[v_proj], of q_proj, k_proj"],
    ),
    "nf4_sharded": (
        ["hardware=mi300x", "adapter=qlora", "precision=nf4", "model=qwen3_4b", "topology=fsdp"],
        ["nothing would be sharded", "topology=ddp"],
    ),
    "nf4_colocate": (
        ["hardware=mi300x", "adapter=qlora", "precision=nf4", "model=qwen3_4b", "method=grpo", "topology=colocate"],
        ["vLLM quantize", "topology=split"],
    ),
    "fp8_zero3": (["hardware=mi300x", "precision=fp8", "topology=zero3"], ["precision=fp8 with ZeRO-3", "topology=fsdp"]),
    "fp16_weights": (
        ["hardware=mi50", "precision=fp16", "precision.weights=fp16"],
        ["precision.weights=fp16", "refuses to unscale", "precision.weights=fp32"],
    ),
    "loss_scaling": (["hardware=mi50", "precision=fp16", "precision.loss_scaling=false"], ["torch.amp scales", "loss_scaling=true"]),
    "bench_without_gpu": (["hardware=cpu", "method=bench/gemm"], ["bench/gemm on a CPU", "smoke=true"]),
    "bench_dtypes": (["hardware=mi50", "method=bench/gemm", "method.args.dtypes=[bf16]"], ["dtypes=bf16 on mi50", "[fp32,fp16]"]),
    "bench_data": (["hardware=mi350x", "method=bench/gemm", "data=cups"], ["data=cups with method=bench/gemm", "Use: no data="]),
    "bench_lists": (
        ["hardware=mi350x", "method=bench/gemm", "method.args.shapes=[8192,8192,8192]"],
        ["shapes=[8192, 8192, 8192]: it lists lists of [m, n, k]", "shapes=[[8192,8192,8192]]"],
    ),
    "bench_empty_lists": (
        ["hardware=mi350x", "method=bench/gemm", "method.args.dtypes=[]"],
        ["method.args.dtypes=[]: nothing would be measured", "one or more in it, as in conf/method/bench/gemm.yaml"],
    ),
    "bench_environments": (
        ["hardware=mi350x", "method=bench/collectives", "method.args.settings=[{}]"],
        ["settings: {} sets no environment variables, each to a text,", "the run's own environment is measured in any case"],
    ),
    "bench_sizes": (
        ["hardware=mi350x", "method=bench/collectives", "method.args.min_bytes=16"],
        ["min_bytes=16, max_bytes=4294967296, factor=4", "min_bytes of at least 32 and at most max_bytes"],
    ),
    "bench_instances": (
        ["hardware=mi350x", "method=bench/vllm", "method.args.settings=[{instances: 2}]"],
        ["2 instances on one GPU with gpu_memory_utilization=unset", "gpu_memory_utilization: 0.4"],
    ),
    "bench_gate": (
        ["hardware=mi50", "method=bench/gemm", "method.args.fail_below=0.9"],
        ["fail_below=0.9 with method=bench/gemm on mi50", "of others: h100, h200", "recipes/bench/reference/gemm.yaml"],
    ),
    "bench_gate_rows": (
        ["hardware=mi350x", "method=bench/collectives", "method.args.fail_below=0.9"],
        ["on mi350x: figures were published, but of no row", "op all_reduce, bytes 8589934592, ranks 8"],
    ),
    "bench_gpu_counts": (
        ["hardware=mi300x", "method=bench/scaling", "method.args.num_gpus=[]"],
        ["num_gpus=[]: it lists numbers of GPUs", "num_gpus=[2,4]"],
    ),
    "bench_num_gpus": (
        ["hardware=mi300x", "method=bench/scaling", "method.args.num_gpus=[16]"],
        ["num_gpus=[16]: this run has 8", "topology.num_gpus=16"],
    ),
    "model_unused": (["hardware=mi300x", "method=bench/gemm", "model=qwen3_4b"], ["model=qwen3_4b", "would ignore the model"]),
    "precision_unused": (["hardware=mi300x", "method=bench/gemm", "precision=fp32"], ["precision=fp32", "rows name their own"]),
    "tune_rows": (["hardware=mi300x", "method=tune/batch", "data=hub", "data.hub_id=a/b"], ["would ignore them", "rows=data"]),
    "tune_full_rows": (
        ["hardware=mi300x", "method=tune/batch", "model=qwen3_4b", "method.args.recipe=grpo"],
        ["rows=full with recipe=grpo: it makes rows for sft and dpo", "method.args.rows=data"],
    ),
    "tune_settings": (
        ["hardware=mi350x", "method=tune/rccl", "method.args.settings=[{A: 1}]"],
        ["settings=[{'A': 1}] with method=tune/rccl: its trials are the settings", "method.args.space", "user_env"],
    ),
    "tune_for_rocm": (["hardware=h200", "method=tune/tunableop"], ["tune/tunableop on h200", "tune/inductor"]),
    "tune_inductor": (["hardware=mi50", "method=tune/inductor"], ["gfx906", "tune/batch"]),
    "evaluated_revision": (
        ["hardware=mi300x", "model=qwen3_4b", "model.revision=main", "method=evaluate"],
        ["model.revision=main with method=evaluate", "a commit of the hub", "model.path="],
    ),
    "generation_engine": (
        ["method=evaluate", "method.args.engine=vlm"],
        ["engine=vlm: no such engine", "Did you mean vllm", "transformers"],
    ),
    "engine_needs_vllm": (["hardware=mi50", "method=evaluate", "method.args.engine=vllm"], ["vLLM serves gfx906", "engine=transformers"]),
    "sampling_range": (["method=evaluate", "+method.args.top_p=0"], ["top_p=0: out of range", "at most 1"]),
    "greedy_samples": (
        ["method=evaluate", "method.args.samples_per_prompt=4"],
        ["samples_per_prompt=4 with temperature=0", "temperature=0.7"],
    ),
    "lm_eval_engine": (
        ["hardware=mi300x", "method=evaluate", "method.args.engine=vllm", "method.args.lm_eval_tasks=[gsm8k]"],
        ["lm_eval_tasks with engine=vllm", "engine=transformers"],
    ),
    "lm_eval_unused": (["method=evaluate", "+method.args.lm_eval_limit=4"], ["lm_eval_limit without lm_eval_tasks", "lm_eval_tasks=["]),
    "export_model": (["method=export"], ["method=export of model=tiny: its weights are random", "model.path=<run>"]),
    "export_adapter": (
        ["method=export", "model.path=m", "adapter=lora"],
        ["merges an adapter that is trained", "adapter.path=<run>/adapter"],
    ),
    "export_precision": (
        ["method=export", "model.path=m", "precision=bf16"],
        ["precision=bf16 with method=export", "method.args.weights="],
    ),
    "export_formats": (["method=export", "model.path=m", "method.args.formats=[]"], ["formats=[]: safetensors are written in any case"]),
    "export_gguf": (["method=export", "model.path=m", "method.args.formats=[gguf]"], ["gguf and no converter", "convert_hf_to_gguf.py"]),
    "export_gguf_8_bits": (
        ["method=export", "model.path=m", "method.args.formats=[gguf]", "method.args.gguf_converter=c.py", "method.args.weights=int8"],
        ["weights=int8 with gguf", "llama-quantize"],
    ),
    "export_license": (["method=export", "model.path=m", "method.args.license='my own'"], ["license='my own'", "apache-2.0"]),
    "export_push_to": (["method=export", "model.path=m", "method.args.push_to=model"], ["push_to=model: no repository", "<owner/name>"]),
    "export_push_private": (
        ["method=export", "model.path=m", "method.args.push_private=false"],
        ["push_private=false without push_to", "<owner/name>"],
    ),
    "export_push_container": (
        ["method=export", "model.path=m", "method.args.push_to=me/model", "runtime=docker", "runtime.secrets=[]"],
        ["push_to=me/model in a container that is not given HF_TOKEN", "runtime.secrets"],
    ),
    "raft_base": (["method=raft", "method.args.base=old"], ["method.args.base=old", "continued", "fresh"]),
    "raft_decay": (["method=raft", "method.args.learning_rate_decay=0"], ["learning_rate_decay=0", "up to 1"]),
    "raft_decides": (["method=raft", "method.args.sample.cycle=2"], ["method.args.sample.cycle", "method.args.cycles=N"]),
    "raft_adapter_path": (
        ["method=raft", "adapter=lora", "adapter.path=runs/a/b/adapter"],
        ["runs/a/b/adapter with method=raft", "model.path="],
    ),
    "sample_greedy": (["method=sample", "method.args.temperature=0"], ["all samples would be the same", "1.0"]),
    "sample_fraction": (["method=sample", "method.args.top_fraction=0"], ["top_fraction=0", "up to 1"]),
    "sample_threshold": (["method=sample", "method.args.threshold=2"], ["threshold=2", "from 0 to 1", "full scores only"]),
    "save_model": (
        ["hardware=mi300x", "method=bench/gemm", "save_model=false"],
        ["save_model=false with method=bench/gemm", "trains none"],
    ),
    "save_best": (["method.args.save_strategy=best"], ["save_strategy=best without", "metric=eval_loss method.args.save_strategy=steps"]),
    "schedule_evaluates": (
        ["method.args.lr_scheduler_type=greedy"],
        ["lr_scheduler_type=greedy without method.selection.metric", "method.selection.metric=eval_loss", "cosine"],
    ),
    "schedule_arguments": (
        ["method.args.lr_scheduler_type=cosine_with_min_lr", "method.args.lr_scheduler_kwargs={num_cycles: 1}"],
        ["cosine_with_min_lr without min_lr_rate or min_lr", "'method.args.lr_scheduler_kwargs={min_lr_rate: 0.1}'"],
    ),
    "losses": (
        ["method=dpo", "method.args.loss_type=[sigmoid,sft]", "method.args.loss_weights=[1.0]"],
        ["loss_weights=[1.0] with 2 loss(es)", "method.args.loss_weights=[1.0,1.0] for [sigmoid,sft]"],
    ),
    "tensor_parallel": (["topology.tensor_parallel=2"], ["tensor-parallel training is not offered", "topology=fsdp"]),
    "pipeline_parallel": (["topology.pipeline_parallel=2"], ["pipeline-parallel training is not offered", "zero3"]),
    "num_gpus": (["hardware=mi300x", "topology=ddp", "topology.num_gpus=9"], ["num_gpus=9", "has 8", "1 to 8"]),
    "num_processes": (["hardware=cpu", "topology=ddp", "topology.num_gpus=100000"], ["num_gpus=100000", "without GPUs", "1 to 1024"]),
    "single_is_one": (["hardware=mi300x", "topology=single", "topology.num_gpus=2"], ["topology=single", "ddp"]),
    "topology_of_method": (["hardware=mi300x", "method=evaluate", "topology=fsdp"], ["single, ddp", "topology=single"]),
    "several_ranks": (
        ["hardware=mi300x", "method=bench/collectives", "topology.num_gpus=1"],
        ["bench/collectives on one rank", "num_gpus=2"],
    ),
    "split_is_for_grpo": (["hardware=mi300x", "topology=split"], ["only grpo generates", "topology=ddp"]),
    "split_needs_vllm": (
        ["hardware=mi50", "hardware.gpus_per_node=4", "method=grpo", "topology=split", "precision=fp16"],
        ["gfx906", "transformers generates"],
    ),
    "bench_needs_vllm": (["hardware=mi50", "method=bench/vllm", "precision=fp16"], ["bench/vllm on mi50", "gfx906", "smoke=true"]),
    "split_needs_a_trainer": (
        ["hardware=mi300x", "method=grpo", "topology=split", "topology.num_gpus=2", "topology.servers=2"],
        ["none is left to train on"],
    ),
    "split_needs_a_server": (
        ["hardware=mi300x", "method=grpo", "topology=split", "topology.servers=0"],
        ["topology.servers=0", "at least 1"],
    ),
    "servers_without_split": (
        ["hardware=mi300x", "method=grpo", "topology=ddp", "topology.servers=1"],
        ["nothing would be served", "topology=split"],
    ),
    "server_keys": (
        ["hardware=mi300x", "method=grpo", "topology=ddp", "topology.server_memory_share=0.5"],
        ["server_memory_share", "has no server", "topology=split"],
    ),
    "colocate_arguments": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology=split", "method.args.vllm_gpu_memory_utilization=0.2"],
        ["only topology=colocate reads it", "topology.server_memory_share"],
    ),
    "overlap_without_correction": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "topology.overlap=true",
            "method.args.vllm_importance_sampling_correction=false",
        ],
        ["older weights", "vllm_importance_sampling_correction=true"],
    ),
    "overlap_on_one_gpu": (
        ["hardware=mi300x", "model=qwen3_0_6b", "method=grpo", "topology=split", "topology.num_gpus=1", "topology.overlap=true"],
        ["take turns", "overlap=false, or topology.num_gpus=2"],
    ),
    "staleness_without_stream": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.overlap=true", "topology.max_staleness=4"],
        ["max_staleness=4 without", "topology.overlap=stream"],
    ),
    "staleness_of_stream": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.overlap=stream", "topology.max_staleness=0"],
        ["1 step(s) old", "Use: topology.overlap=false"],
    ),
    "server_heads": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.server_tensor_parallel=3"],
        ["server_tensor_parallel=3", "32 heads", "divides"],
    ),
    "server_memory": (["hardware=mi300x", "method=grpo", "topology.server_memory_share=1.2"], ["server_memory_share=1.2", "up to 1"]),
    "server_cache": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.server_cache_gb=0.5"],
        ["server_cache_gb=0.5: one sequence as long as it serves takes 6.04 GB", "more of it, or a smaller topology.server_max_length"],
    ),
    "server_length": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology.server_max_length=512"],
        ["512 tokens and needs its prompt", "more than 512 and at most"],
    ),
    "numa_binding": (["hardware=cpu", "topology.numa_binding=node"], ["on a CPU", "topology.numa_binding=null"]),
    "offload_without_zero": (
        ["hardware=mi300x", "topology=ddp", "topology.zero.offload_optimizer=true"],
        ["needs ZeRO", "ignored", "zero2"],
    ),
    "fsdp_options_without_fsdp": (["hardware=mi300x", "topology=ddp", "topology.fsdp.cpu_offload=true"], ["ignored", "topology=fsdp"]),
    "two_checkpointings": (
        ["hardware=mi300x", "model=qwen3_4b", "topology=fsdp", "topology.fsdp.activation_checkpointing=true"],
        ["transformers refuses both", "gradient_checkpointing=false"],
    ),
    "strategy_of_topology": (["hardware=mi300x", "topology=ddp", "topology.strategy=fsdp"], ["contradicts", "topology.strategy=ddp"]),
    "debug_without_gpu": (["debug=memory_fault"], ["debug=memory_fault on a CPU", "debug=none"]),
    "profile_of_who_waits": (
        ["hardware=mi300x", "method=tune/batch", "profile=torch"],
        ["profile=torch with method=tune/batch", "waits", "the experiment that the tuning writes"],
    ),
    "memory_profile_without_gpu": (["profile=memory"], ["profile=memory on a CPU", "profile=torch", "memory_peak_gb"]),
    "rocprof_without_amd": (["hardware=h200", "profile=rocprof"], ["profile=rocprof on h200", "profile=torch"]),
    "rocprof_compute_alone": (
        ["hardware=mi300x", "topology=ddp", "profile=rocprof", "rocprof=compute", "method.args.save_strategy=no"],
        ["rocprof=compute on 8 ranks", "topology=single", "rocprof=v3"],
    ),
    "rocprof_compute_saves": (
        ["hardware=mi300x", "topology=single", "profile=rocprof", "rocprof=compute"],
        ["save_strategy=steps", "resume", "method.args.save_strategy=no"],
    ),
    "rocprof_program_unused": (["rocprof=sys"], ["rocprof=sys with profile=none", "ignored", "profile=rocprof rocprof=sys"]),
    "adapter_rank": (["adapter.rank=8"], ["adapter.rank=8 with adapter=none", "adapter=lora"]),
    "max_steps": (["method.args.max_steps=0"], ["max_steps=0", "at least one step", "-1"]),
    "epochs_and_steps": (["method.args.num_train_epochs=3"], ["max_steps=275", "max_steps=-1"]),
    "selection_method": (
        ["method=sample", "method.selection.metric=eval_loss"],
        ["method.selection.metric with method=sample", "sft or dpo or grpo or raft", "a phase of method=evaluate measures a model"],
    ),
    "selection_metric": (["method.selection.metric=eval_los"], ["eval_los with method=sft", "Did you mean eval_loss", "eval_mean_token"]),
    "selection_unused": (["method.selection.patience=2"], ["method.selection.patience without", "ignored", "metric=eval_loss"]),
    "selection_min_delta": ([*BEST, "method.selection.min_delta=0.1"], ["min_delta=0.1 without patience", "patience=3"]),
    "selection_heldout": ([*BEST, "data=jsonl", "data.path=a.jsonl"], ["with data=jsonl: no held-out rows", "data.heldout_fraction=0.1"]),
    "selection_streaming": (
        [*BEST, "data=jsonl", "data.path=a.jsonl", "data.heldout_fraction=0.1", "data.streaming=true"],
        ["all rows would be read", "data.heldout_path"],
    ),
    "selection_saves": ([*BEST, "method.args.save_strategy=epoch"], ["save_strategy=epoch", "save_strategy=steps", "share of all steps"]),
    "selection_weights_only": (
        [*BEST, "hardware=mi300x", "topology=fsdp", "method.args.save_only_model=true"],
        ["save_only_model=true with method.selection under topology=fsdp", "save_only_model=false"],
    ),
    "selection_overlap": ([*BY_REWARD, "topology=split", "topology.overlap=true"], ["generated at once", "topology.overlap=false"]),
    "selection_groups": (
        [*BY_REWARD, "topology=ddp", "method.args.num_generations_eval=3", "method.args.per_device_eval_batch_size=2"],
        ["num_generations_eval=3", "measure 16 completions at once", "num_generations_eval=1"],
    ),
    "selection_arguments": (["method.args.per_device_eval_batch_size=2"], ["per_device_eval_batch_size without", "metric=eval_loss"]),
    "groups_divide": (
        [
            "hardware=mi300x",
            "model=qwen3_4b",
            "method=grpo",
            "topology=split",
            "method.args.per_device_train_batch_size=4",
            "method.args.gradient_accumulation_steps=1",
            "method.args.num_generations=8",
        ],
        ["28 completions", "7 training rank(s)", "num_generations=8", "4 x 2 (56)", "num_generations=7"],
    ),
    "generation_divides": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology=split", "method.args.generation_batch_size=64"],
        ["generation_batch_size=64", "56 sequences", "7 training rank(s)", "generation_batch_size=56 or", "generation_batch_size=112"],
    ),
    "generation_twice": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "method.args.generation_batch_size=112", "method.args.steps_per_generation=2"],
        ["generation_batch_size=112 with steps_per_generation=2", "one of them"],
    ),
    "groups_and_smaller_batches": (
        ["method=grpo", "method.args.auto_find_batch_size=true"],
        ["auto_find_batch_size=true with method=grpo", "find=largest_batch"],
    ),
    "compile": (["hardware=mi50", "precision=fp32", "method.args.torch_compile=true"], ["gfx906", "torch_compile=false"]),
    "triton_kernels": (["hardware=mi50", "precision=fp32", "method.args.use_liger_kernel=true"], ["Triton", "gfx906"]),
    "compiled_layers_and_liger": (
        ["hardware=mi300x", "model=qwen3_4b", "step.compile=true", "method.args.use_liger_kernel=true"],
        ["step.compile=true", "use_liger_kernel=true", "one of them"],
    ),
    "compiled_layers_and_model": (
        ["hardware=mi300x", "model=qwen3_4b", "step.compile=true", "method.args.torch_compile=true"],
        ["step.compile=true", "torch_compile=true"],
    ),
    "compiled_layers_without_compiler": (["hardware=mi50", "precision=fp32", "step.compile=true"], ["gfx906", "step.compile=false"]),
    "fp8_eager": (["hardware=mi300x", "precision=fp8", "step.compile=false"], ["precision=fp8", "step.compile=false", "precision=bf16"]),
    "packed_without_kernel": (["hardware=mi50", "step.rows=packed"], ["packed_attention", "step.rows=grouped"]),
    "rows_packed_twice": (
        ["hardware=h100", "step.rows=packed", "method.args.packing=true"],
        ["step.rows=packed", "packing=true", "step.rows=padded"],
    ),
    "rows_of_method": (["hardware=h100", "method=dpo", "step.rows=packed"], ["step.rows=packed", "method=dpo", "grouped"]),
    "checkpointed_layers_unused": (
        ["step.checkpointed_layers=2", "method.args.gradient_checkpointing=false"],
        ["step.checkpointed_layers=2", "gradient_checkpointing=true"],
    ),
    "checkpointed_layers_range": (
        ["hardware=h100", "model=qwen3_4b", "step.checkpointed_layers=37"],
        ["step.checkpointed_layers=37", "36 layers"],
    ),
    "sequence_length": (["model=qwen3_4b", "method.args.max_length=50000"], ["50000 tokens", "qwen3_4b has"]),
    "rewards_needed": (["method=grpo", "topology=single", "~method.rewards.reasoning_gym"], ["nothing would be learned", "reasoning_gym"]),
    "rewards_unused": (["method.rewards.accuracy=1"], ["method=sft", "ignored", "method=grpo"]),
    "reward_unknown": (["method=grpo", "topology=single", "method.rewards.acuracy=1"], ["acuracy", "accuracy"]),
    "rewards_weigh_nothing": ([*CODE, "method.rewards.code_tests=0.0"], ["every weight is 0", "above 0"]),
    "reward_infinite": ([*CODE, "+method.rewards.format=1e999"], ["method.rewards.format=inf: no finite number", "=1.0"]),
    "reward_negative": (["method=sample", "+method.rewards.length=-0.5"], ["length", "below 0", "method=grpo"]),
    "reward_chain": (
        [*CODE, "method.reward_chain=[format,code_tests]"],
        ["format is no reward of method.rewards", "code_tests at most once"],
    ),
    "reward_pattern": ([*CODE, "+method.rewards.regex=1.0", "method.reward_pattern='('"], ["reward_pattern=(", "unterminated"]),
    "reward_pattern_unused": ([*CODE, "method.reward_pattern=a"], ["without the reward regex", "+method.rewards.regex=1.0"]),
    "reward_confined_unused": (
        ["method=grpo", "method.reward_confined=false"],
        ["reward_confined=false without a function of your own", "package.module.function"],
    ),
    "reward_column": (["method=grpo", "data=jsonl", "data.path=train.jsonl"], ["reasoning_gym with data=jsonl", "data=reasoning"]),
    "pairs_of_code": (["data=code", "method=dpo"], ["makes no preference pairs", "data=jsonl"]),
    "evaluation_of_code": (["data=code", "method=evaluate"], ["many programs are right", "method.rewards.code_tests=1.0"]),
    "sandbox_unused": (["method.sandbox.time_s=3"], ["without the reward code_tests", "+method.rewards.code_tests=1.0"]),
    "sandbox_under_slurm": ([*CODE, "runtime=slurm"], ["code_tests under runtime=slurm", "runtime=docker"]),
    "name": (["name=a/b"], ["name=a/b", "letters"]),
    "secret": (["user_env.HF_TOKEN=abc"], ["user_env.HF_TOKEN", "export HF_TOKEN"]),
    "seed": (["seed=4294967296"], ["4294967296", "seed=0"]),
    "reasoning_data": (["data.num_train=0"], ["num_train=0", "at least 1"]),
    "generation_data": (
        ["hardware=mi300x", "model=qwen3_4b", "method=grpo", "data.limit=6", "method.args.gradient_accumulation_steps=1"],
        ["6 problem(s)", "fewer than the 7 of one generation, 56 completions of 8", "data.num_train=7 or more"],
    ),
    "evaluation_data": (["method=evaluate", "data.num_heldout=0"], ["no held-out problems", "data.num_heldout="]),
    "data_path": (["data=jsonl"], ["without a file", "data.path="]),
    "data_hub": (["data=hub"], ["without a data set", "data.hub_id="]),
    "data_of_another_kind": (["data.path=train.jsonl"], ["data.path under data=reasoning", "ignored", "data=jsonl"]),
    "mask_in_user_env": (["hardware=mi300x", "user_env.HIP_VISIBLE_DEVICES=3"], ["same GPUs", "in your shell"]),
    "data_limit": (["data.limit=0"], ["data.limit=0"]),
    "model_source": (["model.init=pretrained"], ["no weights are named", "model.path="]),
    "model_path_and_random": (["model=qwen3_4b", "model.init=random", "model.path=/m"], ["model.path=/m", "ignored"]),
    "model_shape": (
        ["hardware=mi300x", "model=qwen3_4b", "model.num_layers=12"],
        [
            "model.num_layers=12: the shape counts 1600128512",
            "is 4022468096",
            "Qwen/Qwen3-4B is loaded",
            "no model.num_layers",
            "init=random",
        ],
    ),
    "model_revision": (
        ["hardware=mi300x", "model=qwen3_4b", "model.hub_id=me/mine", "model.revision=null"],
        ["model.hub_id=me/mine without model.revision", "model.revision=<its commit"],
    ),
    "model_hub_id": (
        ["hardware=mi300x", "model=qwen3_4b", "model.hub_id=Qwen/Qwen3-8B"],
        ["model.hub_id=Qwen/Qwen3-8B with model=qwen3_4b", "model.revision=1cfa9a720891 is a commit of Qwen/Qwen3-4B", "model=qwen3_8b,"],
    ),
    "find": (["find=largest_batch"], ["find=largest_batch", "mode=plan find=largest_batch"]),
    "data_preview": (["method=evaluate", "data.preview=5"], ["method=evaluate: it trains on no rows", "sft, dpo, grpo"]),
    "data_preview_alone": (["data.preview=5", "format=json"], ["data.preview=5 with format=json", "for a person"]),
    "data_sources": (["data=mix"], ["data=mix with 0 data.sources", "weight: 0.7"]),
    "data_source": (["data=mix", "data.sources=[{weight: 1.0}]"], ["data.sources[0] has neither path nor hub_id"]),
    "data_weights": (
        ["data=mix", "data.sources=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.7}]"],
        ["sum to 1.4", "0.5, 0.5"],
    ),
    "data_samples": (["data=samples", "data.path=a.jsonl"], ["data=samples with method=sft", "method=dpo data=samples"]),
    "data_of_samples": (
        ["method=sample", "data.filter.max_tokens=9"],
        ["max_tokens with method=sample", "data.curriculum, method.args.num_prompts"],
    ),
    "data_pairs_number": (
        ["method=dpo", "data=samples", "data.path=a.jsonl", "data.pairs_per_prompt=0"],
        ["pairs_per_prompt=0", "at least 1"],
    ),
    "data_pairs": (["data.pairs_per_prompt=2"], ["pairs_per_prompt=2 under data=reasoning", "data=samples"]),
    "data_streaming": (["data.streaming=true"], ["data.streaming=true with data=reasoning", "data=jsonl"]),
    "data_streaming_reference": (
        [
            "method=dpo",
            "data=jsonl",
            "data.path=a.jsonl",
            "data.streaming=true",
            "method.args.max_steps=9",
            "method.args.precompute_ref_log_probs=true",
        ],
        ["precompute_ref_log_probs=true with data.streaming=true", "data.streaming=false"],
    ),
    "data_streaming_steps": (
        ["data=jsonl", "data.path=a.jsonl", "data.streaming=true", "model=qwen3_0_6b"],
        ["a stream has no end", "method.args.max_steps=1000"],
    ),
    "shuffle_buffer": (["data.shuffle_buffer=5"], ["shuffle_buffer=5 without data.streaming", "data.streaming=true"]),
    "heldout_fraction": (["data=jsonl", "data.path=a.jsonl", "data.heldout_fraction=1.0"], ["heldout_fraction=1.0", "0.1"]),
    "heldout_twice": (["data.heldout_fraction=0.1"], ["held-out rows of its own", "data.num_heldout"]),
    "filter_regex": (["data.filter.regex.task='('"], ["data.filter.regex.task=(", "regular expression"]),
    "filter_lengths": (
        ["data.filter.min_tokens=100", "data.filter.max_tokens=10"],
        ["min_tokens=100 above max_tokens=10", "data.filter.min_tokens=10 data.filter.max_tokens=100"],
    ),
    "chat_template_twice": (["model.chat_template=a", "data.chat_template=b"], ["one would be ignored", "one of them"]),
    "curriculum_method": (["method=dpo", "data.curriculum=mixed"], ["curriculum=mixed with method=dpo", "sft, grpo, sample or raft"]),
    "curriculum_steps": (["data.curriculum=progressive", "model=qwen3_0_6b"], ["parts of the run", "method.args.max_steps=1000"]),
    "curriculum_packing": (["data.curriculum=mixed", "method.args.packing=true"], ["a packed row has many levels", "packing=false"]),
    "packing_length": (["method.args.packing=true", "method.args.max_length=null"], ["packing=true with max_length=null", "=1024"]),
    "curriculum_pass_rates": (["data.curriculum=adaptive"], ["no pass rates are measured", "data.pass_rates="]),
    "pass_rates_unused": (["data.pass_rates=r.json"], ["with data.curriculum=none: it would be ignored", "adaptive"]),
    "curriculum_args_unused": (["data.curriculum_args.earlier=0.2"], ["curriculum_args.earlier with", "data.curriculum=mixed"]),
    "curriculum_args": (["data.curriculum=mixed", "data.curriculum_args.earlier=1.5"], ["earlier=1.5", "below 1"]),
    "lr_scaling": (["method.lr_scaling=sqrt"], ["lr_reference_batch=None", "method.lr_reference_batch=32"]),
    "lr_scaling_unused": (
        ["method=evaluate", "method.lr_scaling=sqrt", "method.lr_reference_batch=8"],
        ["no learning rate of its own", "method.lr_scaling=none"],
    ),
    "task_unknown": (
        ["data.tasks=[{name: gcd}, {name: chain_summ}]"],
        ["data.tasks[1].name=chain_summ: data=reasoning has no such task. Did you mean chain_sum", "Use: chain_sum, or another"],
    ),
    "task_level": (
        ["data.tasks=[{name: gcd}, {name: chain_sum, level: 11}]"],
        ["data.tasks[1].level=11 (chain_sum): it has levels 0 to 10", "level: 0"],
    ),
    "task_field": (
        ["data.tasks=[{name: gcd, config: {min_number: 3}}]"],
        ["data.tasks[0].config.min_number: gcd has no such field. Did you mean min_numbers", "of gcd: max_numbers, max_value, min_numbers"],
    ),
    "task_weight": (
        ["data.tasks=[{name: chain_sum}, {name: gcd, weight: 0}]"],
        ["data.tasks[1].weight=0 (gcd)", "a weight above 0"],
    ),
    "task_worked": (
        ["data.tasks=[{name: gcd}, {name: chain_sum, worked: 0.5}]"],
        ["data.tasks[1].worked=0.5 (chain_sum)", "from 0 to 1", "only shuffled_cups has one", "worked=0 for answers alone"],
    ),
    "image_known": (["hardware=mi300x", "container.name=foo"], ["container=foo: no such image", "rocm", "container=custom"]),
    "docker_without_image": (["hardware=h200", "runtime=docker", "model=qwen3_4b"], ["h200", "container=custom", "runtime=local"]),
    "image_without_docker": (["runtime=local", "container=cpu"], ["container=cpu under runtime=local", "runtime=docker"]),
    "image_serves_gpu": (
        ["hardware=mi50", "precision=fp16", "container=rocm"],
        ["container=rocm on mi50", "gfx906", "container=rocm_gfx906", "container=custom"],
    ),
    "image_trl": (["hardware=mi300x", "container=seed_mi300x"], ["TRL 0.", "written for 1.16.0", "container=rocm"]),
    "custom_reference": (["container=custom", "container.reference=null"], ["container=custom", "container.reference="]),
    "docker_keys": (["runtime=local", "runtime.memory_gb=8"], ["runtime.memory_gb", "ignored", "runtime=docker"]),
    "custom_reference_form": (["container=custom", "container.reference='Foo bar@sha256:1'"], ["'Foo bar@sha256:1' names no image"]),
    "secret_names": (["runtime=docker", "container=cpu", "runtime.secrets=['my-key']"], ["runtime.secrets: 'my-key'", "names only"]),
    "slurm_keys": (
        ["hardware=mi300x", "runtime=docker", "runtime.slurm.nodes=2", "runtime.slurm.inner=docker"],  # and no interface: none follows
        ["runtime.slurm.nodes=2 under runtime=docker", "ignored", "runtime=slurm"],
    ),
    "slurm_nodes": (
        ["hardware=mi300x", "method=grpo", "topology=split", *NODES],
        ["topology=split on runtime.slurm.nodes=2", "one node", "topology=ddp or topology=fsdp"],
    ),
    "slurm_num_nodes": (
        ["hardware=mi300x", "topology=fsdp", "runtime=slurm", "runtime.slurm.nodes=1000000", "runtime.slurm.interface=ib0"],
        ["runtime.slurm.nodes=1000000", "a process on each", "1 to 1024"],
    ),
    "slurm_nodes_docker": (
        ["hardware=mi300x", "topology=ddp", "runtime.slurm.inner=docker", *NODES],
        ["runtime.slurm.inner=docker on 2 nodes", "runtime.slurm.python="],
    ),
    "slurm_interface": (
        ["hardware=mi300x", "topology=ddp", *NODES[:2]],
        ["without runtime.slurm.interface", "not guessed", "srun ip -br address", "docs/slurm.md"],
    ),
    "slurm_network_alone": (["runtime=slurm", "runtime.slurm.interface=ib0"], ["runtime.slurm.interface with one node", "nodes=2"]),
    "slurm_gid_index": (
        ["hardware=mi300x", "topology=ddp", "runtime.slurm.gid_index=3", *NODES],
        ["runtime.slurm.gid_index=3 without runtime.slurm.hca", "show_gids"],
    ),
    "slurm_empty": (["runtime=slurm", "runtime.slurm.partition=''"], ["runtime.slurm.partition=: an empty text", "a name"]),
    "slurm_gres": (["runtime=slurm", "runtime.slurm.gres='gpu:mi300x:4'"], ["gres=gpu:mi300x:4", "topology.num_gpus is its count"]),
    "slurm_options": (["runtime=slurm", "runtime.slurm.options=['--nodes=3']"], ["'--nodes=3' is decided by runtime.slurm.nodes"]),
    "slurm_time": (["runtime=slurm", "runtime.slurm.time=4h"], ["runtime.slurm.time=4h", "4:00:00"]),
    "slurm_time_early": (["runtime=slurm", "runtime.slurm.time=5"], ["runtime.slurm.time=5", "as it starts", "a longer time"]),
    "slurm_early_signal": (
        ["runtime=slurm", "runtime.stop_timeout_s=900"],
        ["early_signal_s=360 with runtime.stop_timeout_s=900", "above stop_timeout_s"],
    ),
}


def plus(overrides: list[str]) -> Config:
    """On the CPU unless the case names hardware."""
    base = [] if any(o.startswith("hardware=") for o in overrides) else ["hardware=cpu"]
    return composed(*base, *overrides)


def test_every_rule_has_a_case():
    assert sorted(rule.name for rule in RULES) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_rule_refuses_and_says_why(name):
    overrides, words = CASES[name]
    config = plus(overrides)
    found = refusals(config)
    assert [rule.name for rule in found] == [name]
    with pytest.raises(UserError) as raised:
        check(config)
    for word in words:
        assert word in str(raised.value)
    assert "Use: " in str(raised.value)
    assert ".. Use" not in str(raised.value)


@pytest.mark.parametrize("method", groups()["method"])
def test_every_rule_is_asked_under_every_method(method):
    """Whatever arguments it has."""
    given = ["topology.overlap=true", "topology.fsdp.activation_checkpointing=true"]
    config = composed("hardware=mi300x", "topology=fsdp", f"method={method}", *given)
    with pytest.raises(UserError, match=r"topology\.overlap under topology=fsdp: it has no server"):
        check(config)


QWEN = ["hardware=mi300x", "model=qwen3_4b"]
COMMIT = "model.revision=" + "a" * 40


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.num_parameters=7"], "model.num_parameters is 7, and Qwen/Qwen3-4B is loaded as it is. Use: no model.num_parameters."),
        (["model.num_layers=35", "model.path=/m"], "model.num_parameters=3921537280 where the model of that directory has it."),
        (["model.num_parameters=3990000000"], None),  # as rounded as a published count may be
        (["model.num_layers=12", "model.num_parameters=1600128512", "model.hub_id=me/small", COMMIT], None),
        (["model.num_layers=12", "model.init=random"], None),
        (
            ["model.hub_id=me/tuned"],
            "model.revision=1cfa9a720891 is a commit of Qwen/Qwen3-4B. Use: model=<of the same shape> model.hub_id=",
        ),
        (["model.hub_id=me/tuned", COMMIT], None),
        (["model.hub_id=Qwen/Qwen3-8B", COMMIT], "memory and speed would be those of Qwen/Qwen3-4B. Use: model=qwen3_8b"),
        (["model.hub_id=me/tuned", "model.path=/m"], None),  # which wins
        (["model.revision=null", "method=evaluate"], "model.hub_id=Qwen/Qwen3-4B without model.revision"),
        (["model.name=mine", "model.num_layers=12"], "model=mine: the shape counts 1600128512 parameters"),
        (["model.name=mine", "model.hub_id=me/mine"], None),  # of a file that is not in conf/: nothing says what its revision is of
    ],
)
def test_a_model_that_is_loaded_is_the_one_that_is_planned(overrides, said):
    found = [
        f"{rule.message(config)}. Use: {rule.remedy(config)}." for config in [composed(*QWEN, *overrides)] for rule in refusals(config)
    ]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize("name", groups()["model"])
def test_every_model_counts_well_within_the_tolerance(name):
    model = composed("hardware=cpu", f"model={name}").model
    one_layer = shapes.layer_parameters(model)
    assert abs(shapes.parameters(model) - model.num_parameters) < TOLERANCE * model.num_parameters < one_layer


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan"])
@pytest.mark.parametrize("data", ["reasoning", "code"])
def test_a_task_without_a_weight(data, weight):
    name = {"reasoning": "gcd", "code": "lists"}[data]
    found = refusals(composed(f"data={data}", f"data.tasks=[{{name: {name}, weight: {weight}}}]"))
    assert [rule.name for rule in found] == ["task_weight"]


@pytest.mark.parametrize(("data", "worked", "refused"), [("reasoning", -0.1, 1), ("reasoning", 1, 0), ("code", 0.5, 1), ("code", 0, 0)])
def test_a_share_of_worked_rows(data, worked, refused):
    name = {"reasoning": "shuffled_cups", "code": "lists"}[data]
    found = refusals(composed(f"data={data}", f"data.tasks=[{{name: {name}, worked: {worked}}}]"))
    assert [rule.name for rule in found] == ["task_worked"] * refused


@pytest.mark.parametrize(
    ("data", "task", "said"),
    [
        ("code", "name: strigns", "data.tasks[0].name=strigns: data=code has no such task. Did you mean strings"),
        ("code", "name: lists, level: 10", "data.tasks[0].level=10 (lists): it has levels 0 to 9"),
        ("code", "name: lists, config: {a: 1}", "data.tasks[0].config.a: lists has no such field"),
        ("reasoning", "name: gcd, level: -1", "data.tasks[0].level=-1 (gcd): it has levels 0 to 3"),
        ("reasoning", "name: acre, level: 1", "data.tasks[0].level=1 (acre): it has no curriculum"),
        ("reasoning", "name: shuffled_cups, level: -1, config: {cups: 5}", "data.tasks[0].level=-1 (shuffled_cups): it has no curriculum"),
        ("reasoning", "name: shuffled_cups, level: 7, config: {cups: 5}", None),
        ("reasoning", "name: acre", None),
    ],
)
def test_a_task_that_its_data_does_not_have(data, task, said):
    found = refusals(config := composed(f"data={data}", f"data.tasks=[{{{task}}}]"))
    assert [rule.message(config)[: len(said)] for rule in found] == [said] if said else found == []


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan"])
def test_a_source_without_a_weight(weight):
    sources = f"data.sources=[{{path: a.jsonl, weight: 1}}, {{path: b.jsonl, weight: {weight}}}]"
    found = {rule.name: rule.message(composed("data=mix", sources)) for rule in refusals(composed("data=mix", sources))}
    assert found["data_source"] == f"data.sources[1].weight={weight}"


ROWS = ["data=jsonl", "data.path=train.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "names", "remedy"),
    [
        (
            ["method=evaluate", *ROWS, "data.num_heldout=5"],
            ["evaluation_data", "data_of_another_kind"],
            "data.heldout_path=<file.jsonl> or",
        ),
        ([*RAFT, *ROWS, "data.num_heldout=5"], ["data_of_another_kind"], "data.heldout_fraction=0.1"),
        ([*ROWS, "data.num_train=5"], ["data_of_another_kind"], "data=reasoning, or data.num_train=null where an experiment"),
        ([*ROWS, "data.tasks=[{name: gcd}]"], ["data_of_another_kind"], "data=reasoning, or data.tasks=[] where an experiment"),
        (["data=mix", "data.sources=[{path: a, weight: 1.0}]", "data.num_train=5"], ["data_of_another_kind"], "data=reasoning"),
        (["data=hub", "data.hub_id=a/b", "data.num_heldout=5"], ["data_of_another_kind"], "data.heldout_split="),
    ],
)
def test_what_only_generated_data_reads(overrides, names, remedy):
    """Ignored, or with num_heldout the end of the run where its held-out rows are read."""
    config = composed(*overrides)
    assert [rule.name for rule in refusals(config)] == names
    with pytest.raises(UserError, match=r"data\.(num_heldout|num_train|tasks) under data=") as raised:
        check(config)
    assert remedy in str(raised.value)


def test_rows_of_ones_own_in_an_experiment_that_generates_them():
    raft = ["experiment=strix_halo_raft", "~method.rewards.reasoning_gym", "+method.rewards.accuracy=1.0"]
    assert "data_of_another_kind" in [rule.name for rule in refusals(composed(*raft, *ROWS))]
    assert "data_of_another_kind" not in [rule.name for rule in refusals(composed(*raft, *ROWS, "data.tasks=[]"))]
    full = ["experiment=mi350x_qwen3_8b_full", *ROWS]
    assert "data_of_another_kind" not in [rule.name for rule in refusals(composed(*full, "data.num_train=null"))]


GRPO_OF_CODE = ["method=grpo", "topology=single", "data=code"]


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        (GRPO_OF_CODE, ["data=reasoning", "~method.rewards.reasoning_gym +method.rewards.code_tests=1.0"]),
        ([*CODE, "+method.rewards.accuracy=1.0"], ["~method.rewards.accuracy"]),
        ([*CODE, "+method.rewards.regex=1.0"], [r"method.reward_pattern='\d+'", "~method.rewards.regex"]),
        (["method=grpo", "topology=single", "+method.rewards.code_tests=1.0"], ["~method.rewards.code_tests"]),
        (["method=grpo", "topology=single", "+method.rewards.regex=1.0"], [r"method.reward_pattern='\d+'"]),
    ],
)
def test_a_reward_that_the_rows_lack_is_refused_with_what_is_not(given, remedies):
    config = composed("hardware=mi300x", "model=qwen3_4b", *given)
    [said] = [rule.refusal(config).replace(" '~", " ~").replace("' +", " +") for rule in refusals(config)]
    for remedy in remedies:
        assert remedy in said.partition(" Use: ")[2]
        assert refusals(composed("hardware=mi300x", "model=qwen3_4b", *given, *remedy.split())) == []


def test_the_reward_that_is_proposed_where_there_is_none_fits_the_rows():
    [rule] = refusals(config := composed("hardware=mi300x", "model=qwen3_4b", *GRPO_OF_CODE, "~method.rewards.reasoning_gym"))
    assert rule.remedy(config).startswith("method.rewards.code_tests=1.0;")


def test_a_composition_that_works_is_not_refused():
    assert refusals(composed("hardware=mi300x", "method=grpo", "model=qwen3_4b")) == []
    vllm = ["hardware=mi300x", "model=qwen3_4b", "method=evaluate", "method.args.engine=vllm", "topology.server_memory_share=0.5"]
    assert refusals(composed(*vllm)) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["topology=single"], "one of the node's 8 GPUs evaluates"),
        (["data.num_heldout=500"], None),
        (
            ["data.num_heldout=300"],
            "in batches of 64: 3 of 8 ranks stay idle; method.args.batch_size=38 gives each one",
        ),
        (["data.num_heldout=500", "data.limit=64"], "64 held-out problems in batches of 64: 7 of 8 ranks"),
        (["data.num_heldout=500", "method.args.lm_eval_tasks=[gsm8k]"], "the first of 8 ranks asks them alone"),
    ],
)
def test_ranks_that_an_evaluation_leaves_idle(overrides, said):
    found = [
        line
        for line in rule_warnings(composed("hardware=mi300x", "model=qwen3_4b", "method=evaluate", *overrides))
        if "rank" in line or "idle" in line
    ]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_filters_by_length_that_an_evaluation_does_not_read():
    lengths = ["data.filter.max_tokens=512", "data.filter.min_tokens=2"]
    said = "data.filter.min_tokens, max_tokens: lengths in tokens"
    assert [line for line in rule_warnings(composed("method=evaluate", *lengths)) if line.startswith(said)]
    assert not [line for line in rule_warnings(composed("method=sft", *lengths)) if said in line]
    assert not [line for line in rule_warnings(composed("method=evaluate", "data.filter.levels=[0]")) if said in line]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["topology.strategy=foo"], "topology.strategy=foo: it takes none, ddp"),
        (["precision.compute=bf61"], "Did you mean bf16"),
        (["precision.weights=foo"], "precision.weights=foo"),
        (["hardware.attention=sdap"], "Did you mean sdpa"),
        (["data.kind=foo"], "data.kind=foo"),
        (["model.architecture=qwen"], "model.architecture=qwen"),
        (["model.num_kv_heads=0"], "model.num_kv_heads=0: out of range. Use: at least 1"),
        (["topology.num_gpus=0"], "topology.num_gpus=0: out of range"),
        (["method.args.num_train_epochs=inf"], "num_train_epochs=inf: no finite number"),
        (["method.args.num_train_epochs=0"], "num_train_epochs=0: out of range"),
        (["model.num_parameters=0"], "model.num_parameters=0: out of range. Use: at least 1"),
        (["topology.server_tensor_parallel=0"], "topology.server_tensor_parallel=0"),
        (["topology.server_memory_share=0"], "topology.server_memory_share=0"),
        (["topology.server_max_length=1"], "topology.server_max_length=1"),
        (["topology.fsdp.reduce_dtype=fp16"], "topology.fsdp.reduce_dtype=fp16: it takes fp32, bf16"),
        (["price_per_gpu_hour=-1"], "price_per_gpu_hour=-1.0: out of range. Use: at least 0 and at most 1000000000."),
        (["price_per_gpu_hour=1e308"], "price_per_gpu_hour=1e+308: out of range. Use: at least 0 and at most 1000000000."),
        (["hardware.gpus_per_node=1000000"], "hardware.gpus_per_node=1000000: out of range. Use: at least 1 and at most 1024."),
        (
            ["hardware=mi350x", "method=bench/collectives", "method.args.timeout_s=0"],
            "timeout_s=0: out of range. Use: above 0 and at most 86400.",
        ),
        (["method=grpo", "method.args.num_generations=1000000000"], "num_generations=1000000000: out of range. Use: at least 2 and"),
        (["method=raft", "method.args.cycles=100000"], "method.args.cycles=100000: out of range. Use: at least 1 and at most 500."),
        (["method.args.per_device_train_batch_size=1000000000000000000"], "train_batch_size=1000000000000000000: out of range"),
        (["effective_batch=1000000000000000000"], "effective_batch=1000000000000000000: out of range"),
        (["runtime.hang_timeout_s=0"], "runtime.hang_timeout_s=0"),
        (["runtime.max_restarts=-1"], "runtime.max_restarts=-1"),
        (["hardware.memory_gb=-5"], "hardware.memory_gb=-5"),
        (["adapter=lora", "adapter.rank=0"], "adapter.rank=0"),
        (["method.args.per_device_train_batch_size=0"], "per_device_train_batch_size=0"),
        (["method.args.logging_steps=0"], "logging_steps=0"),
        ([*BEST, "method.selection.patience=0"], "method.selection.patience=0: out of range. Use: at least 1"),
        ([*BEST, "method.selection.min_delta=-1"], "method.selection.min_delta=-1"),
        (["method.args.eval_strategy=stepps"], "decided elsewhere; set method.selection.metric=eval_loss instead"),
        ([*BEST, "method.args.eval_steps=10"], "set method.args.save_steps=; a model that was measured is saved"),
        ([*BEST, "method.args.greater_is_better=true"], "set method.selection.metric= instead"),
        (["method=grpo", "method.args.num_generations=0"], "num_generations=0: out of range. Use: at least 2"),
        (["method=grpo", "method.args.steps_per_generation=0"], "steps_per_generation=0"),
        (["method=evaluate", "method.args.batch_size=0"], "batch_size=0"),
        (["runtime.stop_timeout_s=0"], "runtime.stop_timeout_s=0"),
        (["container=cpu", "runtime.memory_gb=0"], "runtime.memory_gb=0"),
        (["container=cpu", "runtime.shm_gb=0.01"], "runtime.shm_gb=0.01"),
        (["container=cpu", "runtime.shm_gb=inf"], "runtime.shm_gb=inf"),
        (["container=cpu", "runtime.memory_gb=nan"], "runtime.memory_gb=nan"),
        (["method.args.learning_rate=-1e-4"], "learning_rate=-0.0001: out of range. Use: at least 0."),
        (["method.args.weight_decay=-0.1"], "weight_decay=-0.1"),
        (["method.args.warmup_steps=-1"], "warmup_steps=-1"),
        (["method.args.max_grad_norm=-1"], "max_grad_norm=-1"),
        (["method.args.save_steps=0"], "save_steps=0: out of range. Use: above 0."),
        (["method.args.save_steps=2.5"], "save_steps=2.5: no whole number. Use: 2; a number below 1 is a share"),
        (["method.args.save_total_limit=-1"], "save_total_limit=-1"),
        (["method.args.adam_beta1=1"], "adam_beta1=1: out of range. Use: at least 0 and below 1."),
        (["method.args.adam_beta2=-0.1"], "adam_beta2=-0.1"),
        (["method.args.label_smoothing_factor=1.0"], "label_smoothing_factor=1.0"),
        (["method.args.dataset_num_proc=0"], "dataset_num_proc=0: out of range. Use: at least 1."),
        (["method=dpo", "method.args.beta=0"], "method.args.beta=0: out of range. Use: above 0."),
        (["method=grpo", "method.args.beta=-0.1"], "method.args.beta=-0.1: out of range. Use: at least 0."),
        (["method=grpo", "method.args.temperature=0"], "temperature=0: out of range. Use: above 0."),
        (["method=grpo", "method.args.top_p=1.5"], "top_p=1.5: out of range. Use: above 0 and at most 1."),
        (["method=grpo", "method.args.epsilon=-0.1"], "epsilon=-0.1"),
        (["method=tune/vllm", "method.args.space.num_scheduler_steps=[1,8]"], "space: num_scheduler_steps is gone from vLLM. Instead: "),
        (["method=tune/batch", "method.args.recipe=dpo", "method.args.beta=0"], "method.args.beta=0: out of range"),
        (["method.args.lr_scheduler_type=cosin"], "lr_scheduler_type=cosin: unknown. Did you mean cosine? It takes linear, "),
        (["method.args.optim=adamw"], "optim=adamw: unknown. Did you mean adamw_torch? It takes"),
        (["method.args.save_strategy=step"], "save_strategy=step: unknown. Did you mean steps"),
        (["method.args.packing_strategy=bdf"], "packing_strategy=bdf: unknown. Did you mean bfd"),
        (["method.args.loss_type=nl"], "loss_type=nl: unknown. Did you mean nll"),
        (["method=dpo", "method.args.loss_type=[sigmoid,stf]"], "loss_type=stf: unknown. Did you mean sft"),
        (
            ["method=dpo", "method.args.loss_type=[]"],
            "loss_type=[]: no loss, and nothing would be trained. Use: method.args.loss_type=[sig",
        ),
        (["method=grpo", "method.args.loss_type=drgrpo"], "loss_type=drgrpo: unknown. Did you mean dr_grpo"),
    ],
)
def test_values_out_of_their_list_or_range(overrides, said):
    with pytest.raises(UserError) as raised:
        check(plus(overrides))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["method.args.learning_rate=0", "method.args.warmup_steps=0.1", "method.args.max_grad_norm=0", "method.args.save_total_limit=0"],
        ["method.args.save_steps=0.5", "method.args.logging_steps=2.0", "method.args.adam_beta1=0", "method.args.loss_type=dft"],
        ["method=grpo", "method.args.top_p=1", "method.args.min_p=null", "method.args.beta=0", "method.args.epsilon_high=5"],
        ["method=evaluate", "method.args.temperature=0"],
        ["method=dpo", "method.args.loss_type=[sigmoid,sft]", "method.args.loss_weights=[1.0,0.5]"],
        ["method.args.ddp_backend='cpu:gloo,cuda:nccl'"],
        ["method.args.lr_scheduler_type=cosine_with_min_lr", "method.args.lr_scheduler_kwargs={min_lr: 1e-6}"],
        ["method.args.lr_scheduler_type=warmup_stable_decay", "method.args.lr_scheduler_kwargs={num_decay_steps: 10}"],
        ["method.args.lr_scheduler_type=reduce_lr_on_plateau", *BEST],
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(overrides):
    check(plus(overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["topology=zero2", "topology.zero.offload_parameters=true"],
            "topology.zero.offload_parameters=true under topology=zero2: it needs zero3; ZeRO-2 keeps all parameters on every GPU. Use: "
            "topology=zero3, or no topology.zero.offload_parameters.",
        ),
        (["topology=ddp", "topology.zero.offload_parameters=true"], "under topology=ddp: it needs zero3, and would be ignored. Use: "),
        (["topology=zero3", "topology.zero.offload_parameters=true", "topology.zero.offload_optimizer=true"], None),
        (["runtime=docker", "runtime.slurm.inner=docker"], "runtime.slurm.inner=docker under runtime=docker: it would be ignored."),
        (
            ["runtime=slurm", "runtime.memory_gb=8"],
            "runtime.memory_gb under runtime.slurm.inner=local: it would be ignored. Use: runtime.slurm.inner=docker.",
        ),
        (["runtime=slurm", "container=rocm"], "under runtime.slurm.inner=local: it would be ignored. Use: runtime.slurm.inner=docker, or"),
        (["runtime=slurm", "runtime.slurm.inner=docker", "container=none"], "runtime.slurm.inner=docker without an image: mi300x has"),
        (["runtime=slurm", "runtime.slurm.inner=docker", "container=none"], "or runtime.slurm.inner=local."),
        (
            [
                *["runtime=slurm", "runtime.slurm.inner=docker", "container=rocm"],
                *["method=export", "method.args.push_to=me/model", "runtime.secrets=[]"],
            ],
            "among runtime.secrets; or runtime.slurm.inner=local.",
        ),
        (
            ["method=grpo", "topology=ddp", "topology.server_tensor_parallel=2"],
            "topology.server_tensor_parallel=2 under topology=ddp: nothing would be served. Use: topology=split, or no topology.server_te",
        ),
        (
            ["topology=ddp", "topology.servers=2"],
            "topology.servers=2 under topology=ddp: nothing would be served. Use: no topology.servers.",
        ),
        (["method=grpo", "hardware=mi50", "topology=ddp", "topology.servers=2"], "nothing would be served. Use: no topology.servers."),
        (
            ["topology=single", "topology.num_gpus=4"],
            "num_gpus=4. Use: topology=ddp or fsdp or zero2 or zero3.",
        ),
        (["method=evaluate", "topology=single", "topology.num_gpus=4"], "Use: topology=ddp."),
        (["method=tune/inductor", "topology=single", "topology.num_gpus=4"], "Use: topology.num_gpus=1: method=tune/inductor runs on one."),
        (["method=evaluate", "topology.fsdp.cpu_offload=true"], "it would be ignored. Use: no topology.fsdp.*."),
        (["method=evaluate", "topology.zero.offload_optimizer=true"], "would be ignored. Use: no topology.zero.offload_optimizer."),
        (["method=evaluate", "topology.zero.offload_parameters=true"], "would be ignored. Use: no topology.zero.offload_parameters."),
        (["method=evaluate", "topology.tensor_parallel=2"], "is not offered. Use: topology.tensor_parallel=1."),
        (["topology.pipeline_parallel=2"], "Use: topology.pipeline_parallel=1; topology=fsdp or topology=zero3 holds a model that one GPU"),
        (["method=grpo", "topology=single", "topology.num_gpus=4"], "Use: topology=ddp or fsdp or zero2 or zero3 or split."),
        (
            ["method=grpo", "topology=colocate", "topology.num_gpus=4"],
            "topology.num_gpus=4 under topology=colocate: several GPUs need a strategy. Use: topology.strategy=ddp or topology.strategy=fs",
        ),
        (["method=grpo", "topology=colocate", "topology.strategy=ddp"], "topology.strategy=ddp under topology=colocate: one contradicts"),
        (["method=grpo", "method.rewards.acuracy=1"], "no such reward. Did you mean accuracy? Use: "),
        ([*BEST[:-1], "method.selection.metric=evalloss"], "no such figure of held-out rows. Did you mean eval_loss? Use: "),
    ],
)
def test_words_of_a_refusal(overrides, said):
    config = composed("hardware=mi300x", "model=qwen3_4b", *overrides)
    if said is None:
        return check(config)
    with pytest.raises(UserError) as raised:
        check(config)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "rules"),
    [
        (["method=bench/gemm", "method.args.shapes=[[8192,8192]]"], ["bench_lists"]),
        (["method=bench/gemm", "method.args.shapes=[[8192,8192,0]]"], ["bench_lists"]),
        (["method=bench/gemm", "method.args.shapes=[[8192,8192,8192]]"], []),
        (["method=bench/attention", "method.args.heads=[[32,8]]"], ["bench_lists"]),
        (["method=bench/gemm", "method.args.shapes=[]", "method.args.fail_below=0.9"], ["bench_empty_lists"]),
        (["method=bench/precision", "method.args.precisions=[]"], ["bench_empty_lists"]),
        (
            ["hardware=strix_halo", "method=bench/precision", "method.args.precisions=[bf16]", "method.args.fail_below=0.9"],
            ["bench_gate_rows"],
        ),
        (["hardware=strix_halo", "method=bench/precision", "method.args.precisions=[bf16,nf4]", "method.args.fail_below=0.9"], []),
        (["method=bench/vllm", "method.args.settings=[]"], ["bench_empty_lists"]),
        (["method=bench/dataloader", "method.args.steps=[]"], ["bench_empty_lists"]),
        (["method=tune/batch", "method.args.checkpointing=[]"], ["bench_empty_lists"]),
        (["method=tune/inductor", "method.args.candidates=[]"], ["bench_empty_lists"]),
        (["method=tune/inductor", "method.args.candidates=null"], []),  # all
        (["method=tune/vllm", "model=qwen3_8b", "method.args.settings=[]"], ["tune_settings"]),
        (["method=tune/vllm", "model=qwen3_8b", "~method.args.settings"], []),
        (["method=tune/vllm", "model=qwen3_8b", "method.args.settings=[{max_num_seqs: 3}]"], ["tune_settings"]),
        (["method=tune/vllm", "method.args.lengths=[1024,128]"], ["bench_lists"]),
        (["method=bench/vllm", "method.args.settings=[{instances: 2, gpu_memory_utilization: 0.6}]"], ["bench_instances"]),
        (
            ["method=bench/vllm", "+method.args.base.gpu_memory_utilization=0.6", "method.args.settings=[{instances: 2}]"],
            ["bench_instances"],
        ),
        (["method=bench/vllm", "method.args.settings=[{instances: 2, gpu_memory_utilization: 0.5}]"], []),
        (["method=tune/batch", "method.args.max_length=null"], ["tune_full_rows"]),
        (["method=tune/batch", "method.args.max_length=null", "method.args.rows=data"], []),
        (["method=tune/batch", "method.args.recipe=grpo", "method.args.rows=data"], []),
    ],
)
def test_what_a_rank_would_refuse(overrides, rules):
    assert [rule.name for rule in refusals(composed("hardware=mi350x", "topology=single", *overrides))] == rules


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        (["programs=[]", "fail_below=0.9"], ["bench_empty_lists"]),
        (["ranks=[]"], ["bench_gpu_counts"]),
        (["ranks=[1,2]"], ["bench_gpu_counts"]),
        (["dtypes=[]", "settings=[]"], []),  # the hardware's, and the run's own environment
        (["settings=[3]"], ["bench_environments"]),
        (["settings=[{NCCL_ALGO: [Ring]}]"], ["bench_environments"]),
        (["settings=[{1: 2}]"], ["bench_environments"]),
        (["settings=[{NCCL_NVLS_ENABLE: true}]"], ["bench_environments"]),
        (["settings=[{NCCL_ALGO: null}]"], []),
        (["min_bytes=2048", "max_bytes=1024"], ["bench_sizes"]),
        (["factor=1", "fail_below=0.9"], ["bench_sizes"]),
        (["min_bytes=0"], ["bench_sizes"]),
        (["min_bytes=31"], ["bench_sizes"]),
        (["min_bytes=32", "max_bytes=32"], []),
        (["min_bytes=8", "ranks=[2]"], []),
    ],
)
def test_collectives_that_a_rank_would_refuse(given, rules):
    found = refusals(composed("hardware=mi350x", "method=bench/collectives", *(f"method.args.{one}" for one in given)))
    assert [rule.name for rule in found] == rules


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["hardware=mi350x", "method=bench/collectives", "method.args.max_bytes=8589934592"], False),
        (["hardware=mi350x", "method=bench/collectives", "method.args.max_bytes=8589934592", "method.args.ops=[broadcast]"], True),
        (["hardware=mi350x", "method=bench/collectives", "method.args.max_bytes=8589934592", "topology.num_gpus=4"], True),
        (["hardware=mi300x", "method=bench/collectives"], False),
        (["hardware=mi350x", "method=bench/gemm"], False),
        (["hardware=mi350x", "method=bench/gemm", "method.args.dtypes=[fp32]"], True),
        (["hardware=mi350x", "method=bench/gemm", "method.args.shapes=[[1,1,1]]"], True),
        (["hardware=mi350x", "method=bench/finetune", "model=qwen3_8b"], False),
        (["hardware=mi350x", "method=bench/finetune", "model=qwen3_8b", "topology=single"], True),
        (["hardware=mi350x", "method=bench/matmul"], False),
        (["hardware=mi350x", "method=bench/scaling"], False),
    ],
)
def test_a_gate_over_rows_that_nobody_published(overrides, refused):
    assert [rule.name for rule in refusals(composed(*overrides, "method.args.fail_below=0.9"))] == ["bench_gate_rows"] * refused


@pytest.mark.parametrize(("name", "refused"), [("vllm", True), ("collectives", True), ("gemm", False)])
def test_a_profile_of_a_benchmark_that_starts_processes(name, refused):
    found = refusals(composed("hardware=mi300x", f"method=bench/{name}", "profile=torch"))
    assert [rule.name for rule in found] == ["profile_of_who_waits"] * refused


def test_every_refusal_is_said_at_once():
    config = composed("hardware=mi50", "precision=bf16", "topology=split", "seed=-1")
    with pytest.raises(UserError) as raised:
        check(config)
    assert str(raised.value).count("Use: ") == len(refusals(config)) >= 3


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("server_cache_gb=2", "server_keys"),
        ("server_max_length=200", "server_keys"),
        ("server_memory_share=1.2", "server_keys"),
        ("server_tensor_parallel=3", "servers_without_split"),
    ],
)
def test_a_key_of_a_server_that_is_not_there_is_refused_once(given, name):
    """Also where a server would refuse its value."""
    assert [rule.name for rule in refusals(composed(*QWEN, "topology=ddp", f"topology.{given}"))] == [name]
    assert [rule.name for rule in refusals(composed(*QWEN, "method=grpo", "topology=split", f"topology.{given}"))] != [name]


def test_an_overlap_without_a_server_is_refused_once():
    given = ["method=grpo", "topology=ddp", "topology.overlap=true", "method.args.vllm_importance_sampling_correction=false"]
    assert [rule.name for rule in refusals(composed(*QWEN, *given))] == ["server_keys"]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (["servers=8"], "topology.servers=7"),
        (["server_tensor_parallel=8"], "topology.server_tensor_parallel=4"),  # 7 GPUs, and 32 heads
        (["servers=2", "server_tensor_parallel=4"], "topology.servers=1 or topology.server_tensor_parallel=2"),
        (["servers=3", "num_gpus=2"], "topology.servers=1 or topology.num_gpus=4"),
        (["servers=2", "num_gpus=1"], "topology.servers=1 or topology.num_gpus=3"),
        (["servers=16", "server_tensor_parallel=16"], "topology.servers=1 topology.server_tensor_parallel=1"),
    ],
)
def test_servers_that_take_every_gpu(given, remedy):
    """Each remedy is taken."""
    split = ["hardware=mi350x", "model=qwen3_4b", "method=grpo", "topology=split", *(f"topology.{one}" for one in given)]
    [rule] = refusals(composed(*split))
    assert (rule.name, rule.remedy(composed(*split))) == ("split_needs_a_trainer", remedy)
    assert [refusals(composed(*split, *taken.split(" "))) for taken in remedy.split(" or ")] == [[]] * len(remedy.split(" or "))


@pytest.mark.parametrize("pair", [(8, 1), (1, 8), (2, 4)])
def test_seven_ranks_and_groups_of_eight_that_divide(pair):
    """notes of TRL 1.16: on seven ranks 4x1 and 1x4 fail; these pass."""
    config = composed(
        "hardware=mi300x",
        "model=qwen3_4b",
        "method=grpo",
        "topology=split",
        f"method.args.per_device_train_batch_size={pair[0]}",
        f"method.args.gradient_accumulation_steps={pair[1]}",
        "method.args.num_generations=8",
    )
    assert refusals(config) == []


@pytest.mark.parametrize(
    ("arguments", "remedies"),
    [
        (["per_device_train_batch_size=4", "generation_batch_size=4"], ["Use: method.args.generation_batch_size=8;", "num_generations=4"]),
        (
            ["per_device_train_batch_size=4", "generation_batch_size=12"],
            ["generation_batch_size=8 or method.args.generation_batch_size=16"],
        ),
        (["per_device_train_batch_size=3", "steps_per_generation=3"], ["per_device_train_batch_size x steps_per_generation", "2 x 4 (8)"]),
    ],
)
def test_remedies_for_groups_change_what_was_given(arguments, remedies):
    with pytest.raises(UserError) as raised:
        check(
            composed(
                "hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology=single", *(f"method.args.{given}" for given in arguments)
            )
        )
    assert "do not divide by method.args.num_generations=8" in str(raised.value)
    assert all(remedy in str(raised.value) for remedy in remedies)


def test_groups_of_any_size_are_answered_at_once():
    """Trying every pair up to 20,000 took 46 s."""
    config = composed("hardware=mi300x", "model=qwen3_4b", "method=grpo", "topology=single", "method.args.num_generations=10000000")
    began = time.process_time()
    assert fitting_batches(config) == [(8, 1_250_000), (10, 1_000_000), (5, 2_000_000)]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("size", [8, 12, 16, 24, 36, 48])
@pytest.mark.parametrize("per_device", [3, 4, 8])
@pytest.mark.parametrize("group", [4, 8])
def test_what_trl_says_of_generation_batches_the_rules_say(size, per_device, group):
    """On one rank; whole_generations' values are taken."""
    from trl import GRPOConfig

    def refused_by_trl(size: int) -> bool:
        given = {"per_device_train_batch_size": per_device, "generation_batch_size": size, "num_generations": group}
        try:
            GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **given)
        except ValueError as error:
            return "must be divisible by" in str(error)
        return False

    arguments = {"per_device_train_batch_size": per_device, "generation_batch_size": size, "num_generations": group}
    config = composed("hardware=cpu", "method=grpo", "topology=single", *(f"method.args.{name}={n}" for name, n in arguments.items()))
    ours = {rule.name for rule in refusals(config)}
    assert bool(ours) is refused_by_trl(size)
    assert ours <= {"groups_divide", "generation_divides"}
    assert not any(refused_by_trl(n) for n in batch.whole_generations(config))


WARNINGS = {
    "shows rows where mode=plan is left out": ["hardware=cpu", "data.preview=5", "mode=plan"],
    "twice as slow": ["hardware=strix_halo", "adapter=qlora", "precision=nf4", "model=qwen3_8b"],
    "rccl#1270": ["hardware=mi300x", "topology=ddp", "topology.num_gpus=4"],
    "collectives of 7 GPUs": ["hardware=mi350x", "method=grpo", "topology=split"],
    "expandable_segments hangs": ["hardware=mi300x", "user_env.PYTORCH_ALLOC_CONF='expandable_segments:True'"],
    "expandable_segments with vLLM": [
        "hardware=h200",
        "method=grpo",
        "topology=colocate",
        "user_env.PYTORCH_ALLOC_CONF='expandable_segments:True'",
    ],
    "supported natively": ["hardware=strix_halo", "user_env.HSA_OVERRIDE_GFX_VERSION=11.0.0"],
    "accelerate holds weights that train in fp32": ["hardware=mi300x", "topology=fsdp", "precision=bf16", "precision.weights=bf16"],
    "asks for no cores, and many clusters give such a job one, for all 8 rank(s) of a node": ["hardware=mi300x", "runtime=slurm"],
    "pinned memory hang": ["hardware=strix_halo", "hardware.dataloader.num_workers=2"],
}


@pytest.mark.parametrize(("words", "overrides"), WARNINGS.items())
def test_warning(words, overrides):
    config = composed(*overrides)
    assert refusals(config) == []
    assert any(words in line for line in rule_warnings(config))


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        *((["hardware=mi300x", "topology=ddp", f"topology.num_gpus={n}"], n if 1 < n < 8 else None) for n in range(1, 9)),
        (["hardware=mi300x", "method=grpo", "topology.num_gpus=4"], 3),
        (["hardware=mi300x", "method=grpo", "topology.servers=2"], 6),
        (["hardware=mi300a", "topology=ddp", "topology.num_gpus=3"], 3),
        (["hardware=mi300a", "topology=ddp"], None),
        (["hardware=h200", "topology=ddp", "topology.num_gpus=4"], None),
        (["hardware=mi300x", "method=evaluate", "topology.num_gpus=4"], None),  # its ranks do not wait for one another
    ],
)
def test_fewer_gpus_than_a_board_has_are_warned_of(overrides, ranks):
    found = [line for line in rule_warnings(composed("model=qwen3_4b", *overrides)) if "rccl#1270" in line]
    assert [line.split(" GPUs")[0] for line in found] == ([f"collectives of {ranks}"] if ranks else [])


@pytest.mark.parametrize("option", ["--exclusive", "--exclusive=user", "--excl", "--cpus-per-task=16", "--cpus-per-gpu=8"])
def test_a_job_that_asks_for_cores_is_not_warned(option):
    asked = ["hardware=cpu", "runtime=slurm"]
    assert len(rule_warnings(composed(*asked, "runtime.slurm.options=['--mem=0']"))) == 1
    assert rule_warnings(composed(*asked, f"runtime.slurm.options=['--mem=0','{option}']")) == []


def test_no_warning_where_there_is_nothing_to_warn_of():
    assert rule_warnings(composed("hardware=mi300x", "topology=ddp")) == []


@pytest.mark.parametrize("name", ["PATH", "HOME", "HIP_VISIBLE_DEVICES", "MINE"])
def test_a_secret_that_the_plan_sets_itself_is_refused(name):
    found = refusals(composed("container=cpu", "hardware=cpu", f"runtime.secrets=[{name}]", "user_env.MINE=1"))
    assert [rule.name for rule in found] == ["secret_names"]


@pytest.mark.parametrize(
    ("reference", "good"),
    [
        ("ubuntu", True),
        ("127.0.0.1:5000/me/mine:1.0", True),
        (f"ghcr.io/a/b@sha256:{'0' * 64}", True),
        ("Foo/Bar:1", False),
        ("", False),
        ("../x", False),
        ("foo@sha256:zzz", False),
    ],
)
def test_references(reference, good):
    found = refusals(composed("hardware=cpu", "container=custom", f"container.reference='{reference}'"))
    assert ([rule.name for rule in found] == []) is good
