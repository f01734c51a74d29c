"""Test every rule with a composition that it rejects, and with words of its remedy."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from launch.config.compose import groups
from launch.config.conditions import table
from launch.core.errors import UserError
from launch.rules import limits
from launch.rules import setting_rules as tables
from launch.rules.check import check, refusals
from launch.rules.warnings import rule_warnings
from launch.schema import Config
from tests.conftest import composed

# Words in capitals stand for overrides. A line that starts with a space continues the one before.
WORDS = {
    "AMD": "hardware=mi300x",
    "QWEN": "hardware=mi300x model=qwen3_4b",
    "GRPO": "hardware=mi300x model=qwen3_4b method=grpo",
    "CODE": "method=grpo topology=single data=code ~method.rewards.reasoning_gym "
    "+method.rewards.code_tests=1.0",
    "FILE": "data=jsonl data.path=a.jsonl",
    "BEST": "method.selection.metric=eval_loss",
    "EXPORT": "method=export model.path=m",
    "NODES": "hardware=mi300x runtime=slurm runtime.slurm.nodes=2 runtime.slurm.interface=ib0",
}
# rule | overrides that break only this rule | words of the remedy
CASES = r"""
precision | hardware=mi210 precision=fp8 | precision=bf16
nf4_without_adapter | QWEN precision=nf4 | adapter=qlora
topology_of_nf4 | QWEN adapter=qlora precision=nf4 topology=fsdp | topology=ddp
topology_of_nf4 | GRPO adapter=qlora precision=nf4 topology=colocate | topology=split
topology_of_fp8 | AMD precision=fp8 topology=zero3 | topology=fsdp
fp16_weights | hardware=mi50 precision=fp16 precision.weights=fp16 | precision.weights=fp32
compiler | hardware=mi50 precision=fp32 method.args.torch_compile=true | torch_compile=false
compiler | AMD topology=zero3 step.compile=true | topology=fsdp
bench_lists | AMD method=bench/gemm method.args.shapes=[[8192,8192,0]] | =[[8192,8192,8192]]
bench_lists | AMD method=bench/gemm method.args.dtypes=[] | conf/method/bench/gemm.yaml
bench_lists | AMD method=tune/inductor method.args.candidates=[] | null for all
bench_lists | AMD method=bench/collectives 'method.args.settings=[{NCCL_NVLS_ENABLE: true}]' | [{
tf32 | AMD topology=ddp method.args.tf32=true | method.args.tf32=null
tune_for_rocm | hardware=h200 method=tune/tunableop | tune/inductor
tune_for_rocm | hardware=cpu method=tune/miopen | tune/inductor
evaluated_revision | QWEN model.revision=main method=evaluate | model.path=
heldout_rows | method=evaluate data.num_heldout=0 | data.num_heldout=
lm_eval_engine | AMD method=evaluate method.args.engine=vllm method.args.lm_eval_tasks=[gsm8k]
 | engine=transformers
raft_decides | method=raft method.args.sample.cycle=2 | method.args.cycles=N
export_gguf | EXPORT method.args.formats=[gguf] | convert_hf_to_gguf.py
export_gguf_8_bits | EXPORT method.args.formats=[gguf] method.args.gguf_converter=c.py
 method.args.weights=int8 | llama-quantize
eval_steps | method.selection.metric=eval_loss method.args.eval_steps=30 | method.args.eval_steps=50
server_cache | GRPO topology.server_cache_gb=0.5 | or a smaller topology.server_max_length
server_heads | GRPO topology=split topology.server_tensor_parallel=3 | server_tensor_parallel=4
service_gpus | QWEN method=serve topology=single topology.server_tensor_parallel=2
 | topology.server_tensor_parallel=1
service_network | QWEN method=serve runtime=docker runtime.network=none | runtime.network=bridge
server_length | GRPO topology.server_max_length=512 | at least 513 and at most 40960
server_length | QWEN method=evaluate method.args.engine=vllm topology.server_max_length=512
 | topology.server_max_length=513
filter_lengths | data.filter.min_tokens=100 data.filter.max_tokens=10
 | max_tokens=100 (at least 100); or data.filter.min_tokens=10
num_gpus | AMD topology=ddp topology.num_gpus=9
 | num_gpus=8 (at least 1 and at most 8); or hardware.gpus_per_node=9
single_is_one | AMD topology=single topology.num_gpus=2 | topology=ddp
topology_of_method | AMD method=evaluate topology=fsdp | topology=single
topology_of_method | AMD topology=split | topology=ddp
vllm | hardware=mi50 method=bench/vllm precision=fp16 | smoke=true
vllm | hardware=cpu method=grpo topology=split | smoke=true
vllm | AMD method=serve container=rocm_train | container=rocm
split_needs_a_trainer | GRPO topology=split topology.num_gpus=2 topology.servers=2 | servers=1
split_needs_a_server | GRPO topology=split topology.servers=0 | at least 1
overlap_without_correction | GRPO topology.overlap=true
 method.args.vllm_importance_sampling_correction=false | sampling_correction=true
overlap_on_one_gpu | GRPO model=qwen3_0_6b topology=split topology.num_gpus=1 topology.overlap=true
 | overlap=false, or topology.num_gpus=2
staleness_of_stream | GRPO topology.overlap=stream topology.max_staleness=0 | topology.overlap=false
kv_heads | model.num_heads=4 model.num_kv_heads=3 | num_kv_heads=1 or model.num_kv_heads=2
head_dim | model.head_dim=15 | model.head_dim=14 or model.head_dim=16
flex_on_a_cpu | hardware=cpu hardware.attention=flex_attention | hardware.attention=sdpa
workers_needed | hardware=cpu hardware.dataloader.num_workers=0
 method.args.dataloader_prefetch_factor=2 | num_workers=2
offloading_on_a_cpu | hardware=cpu method.args.activation_offloading=true | =false
two_checkpointings | QWEN topology=fsdp topology.fsdp.activation_checkpointing=true
 | gradient_checkpointing=false
strategy_of_topology | AMD topology=ddp topology.strategy=fsdp | topology.strategy=ddp
profile_of_waiting_method | AMD method=tune/batch profile=torch | profile the experiment
profile_of_waiting_method | AMD method=bench/collectives profile=torch | profile=none
profile_of_vllm | AMD method=bench/vllm profile=memory | profile=torch
rocprof_compute_alone | AMD topology=ddp profile=rocprof rocprof=compute
 method.args.save_strategy=no | topology=single
selection_metric | method.selection.metric=eval_los | eval_mean_token
selection_metric | method=raft ~method.rewards.reasoning_gym +method.rewards.length=1
 method.selection.metric=accuracy | method.selection.metric=reward
heldout_rows | BEST FILE | data.heldout_fraction=0.1
selection_streaming | BEST FILE data.heldout_fraction=0.1 data.streaming=true | data.heldout_path
quantized_model | AMD model=gpt_oss_20b method=grpo topology=split | topology=ddp
documents_of_delta_nets | AMD model.architecture=qwen3_5_text method.args.packing=true
 | method.args.packing=false
weights_only_checkpoints | method.args.save_only_model=true | save_only_model=false
selection_saves | BEST method.args.save_strategy=epoch | save_strategy=steps
selection_overlap | GRPO method.selection.metric=eval_reward topology=split topology.overlap=true
 | topology.overlap=false
groups_divide | GRPO topology=split method.args.per_device_train_batch_size=4
 method.args.gradient_accumulation_steps=1 method.args.num_generations=8 | num_generations=7
fp8_eager | AMD precision=fp8 step.compile=false | precision=bf16
fp8_eager | AMD method=grpo topology=single precision=fp8 | topology=colocate
rows_of_gpu | hardware=mi50 step.rows=packed | step.rows=grouped
rows_packed_twice | hardware=h100 step.rows=packed method.args.packing=true | step.rows=padded
rows_packed_twice | hardware=h100 step.rows=grouped method.args.padding_free=true | rows=padded
rows_of_method | hardware=h100 method=dpo step.rows=packed | grouped
checkpointed_layers_range | hardware=h100 model=qwen3_4b step.checkpointed_layers=37 | at most 36
sequence_length | model=qwen3_4b method.args.max_length=50000 | max_length=40960 (at most 40960)
optimizer_arguments | method.args.optim_args='"rank=2"' | '~method.args.optim_args'
optimizer_arguments | method.args.optim=sgd method.args.optim_args='"momentun=1"'
 | momentum, dampening
optimizer_arguments | method.args.optim=sgd method.args.optim_args=momentum | <name>=<value>
optimizer_arguments | +method.args.optim_target_modules=[q_proj] | galore_adamw
smoothing_of_robust | method=dpo method.args.loss_type=[robust] method.args.label_smoothing=0.5
 | label_smoothing=0.1
smoothing_of_exo_pair | method=dpo method.args.loss_type=[sigmoid,exo_pair] | label_smoothing=0.001
generation_arguments | method=grpo topology=single 'method.args.generation_kwargs={typical: 1}'
 | ~method.args.generation_kwargs
weighted_loss | method=dpo method.args.use_weighting=true method.args.loss_type=[hinge]
 | without hinge
weighted_loss | method=dpo method.args.use_weighting=true method.args.loss_type=[sigmoid,sft]
 | use_weighting=false
rewards_needed | method=grpo topology=single ~method.rewards.reasoning_gym | reasoning_gym
rewards_needed | CODE method.rewards.code_tests=0.0 | code_tests=1.0
reward_unknown | method=grpo topology=single method.rewards.acuracy=1 | accuracy
reward_negative | method=sample +method.rewards.length=-0.5 | method=grpo
reward_chain | CODE method.reward_chain=[format,code_tests] | code_tests at most once
reward_column | method=grpo data=jsonl data.path=train.jsonl method.rewards.reasoning_gym=1.0
 | data=reasoning
reward_column | method=evaluate data=ultrachat +method.rewards.accuracy=1.0 | method.rewards={
data_of_method | data=code method=dpo | data=jsonl
sandbox_in_job | CODE runtime=slurm | runtime=docker
sandbox_in_job | CODE runtime=kubernetes container=rocm | runtime=docker
terminal_in_pod | method=chat runtime=kubernetes container=cpu | runtime=local
secret | user_env.DB_PASS=abc | runtime.pass_env=[DB_PASS]
mask_in_user_env | AMD user_env.HIP_VISIBLE_DEVICES=3 | in your shell
rank_in_user_env | user_env.PET_NNODES=2 | topology.num_gpus
adapter_layers | adapter=lora adapter.target_modules=[] | [q_proj,v_proj]
adapter_layers | adapter=lora adapter.target_modules=q_proj | [q_proj,v_proj]
adapter_layers | AMD model=mixtral_8x7b adapter=lora adapter.target_modules=[up_proj] | [q_proj,k_
custom_reference | AMD container=custom | container.reference=
model_source | model.init=pretrained | model.path=
model_shape | QWEN model.num_layers=12 | init=random
model_hub_id | AMD model=qwen3_32b model.hub_id=me/mine
 model.revision=9216db5781bf21249d130ec9da846c4624c16137 | model.revision=<its commit
data_source | data.num_train=null | data.num_train=1000
data_source | data=jsonl | data.path=
data_source | data=hub | data.hub_id=<owner/name>
data_source | data=mix 'data.sources=[{weight: 1.0}]' | {path: a.jsonl
data_source | data=mix
 'data.sources=[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.7}]' | 0.5, 0.5
data_of_method | data=samples data.path=a.jsonl | method=dpo data=samples
data_streaming | data.streaming=true | data=jsonl
data_streaming | FILE data.streaming=true data.deduplicate=exact | data.streaming=false
max_steps_needed | FILE data.streaming=true model=qwen3_0_6b | method.args.max_steps=1000
heldout_twice | data.heldout_fraction=0.1 | data.num_heldout
heldout_twice | FILE data.heldout_path=b.jsonl data.heldout_fraction=0.1 | one of data.num_heldout
chat_template_twice | model.chat_template=a data.chat_template=b | data.chat_template=null
curriculum_packing | data.curriculum=mixed method.args.packing=true | packing=false
task | 'data.tasks=[{name: gcd}, {name: chain_summ}]' | 'data.tasks=[{name: chain_sum, level: 0}]'
task | 'data.tasks=[{name: gcd}, {name: chain_sum, level: 11}]' | level: 0
task | data=reasoning 'data.tasks=[{name: acre, level: 1}]' | level: 0
task | 'data.tasks=[{name: shuffled_cups, level: -1, config: {cups: 5}}]' | level: 0
task | 'data.tasks=[{name: gcd, config: {min_number: 3}}]' | of gcd: max_numbers, max_value
task | 'data.tasks=[{name: gcd}, {name: chain_sum, worked: 0.5}]' | worked: 0 for answers only
image | hardware=h200 runtime=docker model=qwen3_4b | container=custom
numerics_of_low_precision | AMD method=bench/numerics precision=fp8 | precision=bf16
image | hardware=mi50 precision=fp16 container=rocm | container=rocm_gfx906
image | AMD container=seed_mi300x | container=rocm
image | AMD runtime=slurm runtime.slurm.container=docker container=none
 | runtime.slurm.container=none
slurm_nodes | NODES method=grpo topology=colocate | topology=ddp, fsdp
nodes_network | NODES topology=ddp runtime.slurm.container=docker runtime.network=bridge
 | runtime.network=host
slurm_interface | NODES topology=ddp runtime.slurm.interface=null | srun ip -br address
slurm_options | runtime=slurm "runtime.slurm.options=['--nodes=3']" | --exclusive
slurm_time_early | runtime=slurm runtime.slurm.time=5 | runtime.slurm.early_signal_s=60
slurm_time_early | runtime=slurm runtime.slurm.time=1 | a longer time.
slurm_early_signal | runtime=slurm runtime.stop_timeout_s=900 | at least 901
"""
# overrides | the key that nothing reads
UNREAD = """
find=largest_batch | find
hardware_report=true | hardware_report
AMD method=bench/gemm save_model=false | save_model
method=evaluate adapter=lora | adapter=lora
adapter=none adapter.rslora=true | adapter.rslora
adapter.rank=8 | adapter.rank
adapter=lora adapter.rank=null | adapter=lora
AMD adapter=qlora precision=bf16 | adapter.quantize_base
method=dpo +method.args.label_smoothing=0.1 | method.args.label_smoothing
method=dpo +method.args.f_alpha_divergence_coef=0.7 | method.args.f_alpha_divergence_coef
method=dpo +method.args.discopop_tau=0.1 | method.args.discopop_tau
method=dpo +method.args.ref_model_sync_steps=8 | method.args.ref_model_sync_steps
method=grpo +method.args.sapo_temperature_pos=2 | method.args.sapo_temperature_pos
method=grpo +method.args.vespo_k_pos=2 | method.args.vespo_k_pos
method=grpo +method.args.entropy_target=0.1 | method.args.entropy_target
'method.args.liger_kernel_config={swiglu: true}' | method.args.liger_kernel_config
method.args.gradient_checkpointing=false
 'method.args.gradient_checkpointing_kwargs={use_reentrant: false}'
 | method.args.gradient_checkpointing_kwargs
method.args.trackio_space_id=a | method.args.trackio_space_id
method.args.hub_model_id=a/b | method.args.hub_model_id
method=grpo method.args.vllm_structured_outputs_regex=a | method.args.vllm_structured_outputs_regex
GRPO topology=colocate method.args.vllm_server_timeout=9 | method.args.vllm_server_timeout
method.args.packing_strategy=wrapped | method.args.packing_strategy
method.args.lr_scheduler_type=constant 'method.args.lr_scheduler_kwargs={num_cycles: 2}'
 | method.args.lr_scheduler_kwargs
method.args.lr_scheduler_type=constant_with_warmup
 'method.args.lr_scheduler_kwargs={num_cycles: 2}' | method.args.lr_scheduler_kwargs
method=evaluate method.args.samples_per_prompt=4 | method.args.samples_per_prompt
EXPORT adapter=lora | adapter=lora
profile=memory | profile
hardware=h200 profile=rocprof | profile
data.curriculum=adaptive | data.curriculum
method.lr_scaling=sqrt | method.lr_scaling
EXPORT method.args.gguf_converter=c.py | method.args.gguf_converter
method.lr_reference_batch=8 | method.lr_reference_batch
runtime=docker container=cpu container.reference=a@sha256:b | container.reference
AMD method=bench/gemm data=cups | data=cups
QWEN method=bench/gemm | model=qwen3_4b
AMD method=bench/gemm precision=fp32 | precision=fp32
AMD method=tune/batch data=hub data.hub_id=a/b data.revision=c | data=hub
AMD method=tune/rccl 'method.args.settings=[{A: 1}]' | method.args.settings
AMD method=tune/vllm 'method.args.settings=[{max_num_seqs: 8}]' | method.args.settings
method=evaluate +method.args.lm_eval_limit=4 | method.args.lm_eval_limit
EXPORT precision=bf16 | precision=bf16
EXPORT method.args.push_private=false | method.args.push_private
method=raft adapter=lora adapter.path=runs/a/b/adapter | adapter.path
GRPO topology=ddp topology.servers=1 | topology.servers
GRPO topology=ddp topology.server_memory_share=0.5 | topology.server_memory_share
GRPO topology=ddp topology.server_cache_gb=2 | topology.server_cache_gb
GRPO topology=ddp topology.server_tensor_parallel=3 | topology.server_tensor_parallel
GRPO topology=split method.args.vllm_gpu_memory_utilization=0.2
 | method.args.vllm_gpu_memory_utilization
GRPO topology.overlap=true topology.max_staleness=4 | topology.max_staleness
hardware=cpu topology.numa_binding=node | topology.numa_binding
AMD topology=ddp topology.zero.offload_optimizer=true | topology.zero.offload_optimizer
AMD topology=zero2 topology.zero.offload_parameters=true | topology.zero.offload_parameters
AMD topology=ddp topology.fsdp.cpu_offload=true | topology.fsdp.cpu_offload
AMD topology=ddp +topology.server_args.max_num_seqs=8 | topology.server_args
debug=memory_fault | debug
AMD debug=compile step.compile=false | debug
rocprof=sys | rocprof
AMD profile=rocprof rocprof=sys rocprof_counters=[SQ_WAVES] | rocprof_counters
method.args.num_train_epochs=3 | method.args.num_train_epochs
method=sample method.selection.metric=eval_loss | method.selection.metric
method.selection.patience=2 | method.selection.patience
BEST method.selection.min_delta=0.1 | method.selection.min_delta
method.args.per_device_eval_batch_size=2 | method.args.per_device_eval_batch_size
step.checkpointed_layers=2 method.args.gradient_checkpointing=false | step.checkpointed_layers
method.rewards.accuracy=1 | method.rewards
CODE method.reward_pattern=a | method.reward_pattern
method=grpo method.reward_confined=false | method.reward_confined
method.sandbox.time_s=3 | method.sandbox.time_s
data.path=train.jsonl | data.path
method=evaluate data.preview=5 | data.preview
data.preview=5 format=json | data.preview
method=sample data.filter.max_tokens=9 | data.filter.max_tokens
data.pairs_per_prompt=2 | data.pairs_per_prompt
data.shuffle_buffer=5 | data.shuffle_buffer
method=dpo data.curriculum=mixed | data.curriculum
data.pass_rates=r.json | data.pass_rates
data.curriculum_args.earlier=0.2 | data.curriculum_args.earlier
method=sample data.curriculum=adaptive data.curriculum_args.memory=0.5 | data.curriculum_args.memory
method=evaluate method.lr_scaling=sqrt method.lr_reference_batch=8 | method.lr_scaling
runtime=local container=cpu | container=cpu
runtime=local runtime.memory_gb=8 | runtime.memory_gb
runtime=local runtime.secrets=[MY_TOKEN] | runtime.secrets
AMD runtime=apptainer runtime.shm_gb=8 | runtime.shm_gb
AMD runtime=docker runtime.slurm.nodes=2 runtime.slurm.container=docker | runtime.slurm.nodes
runtime=slurm runtime.slurm.interface=ib0 | runtime.slurm.interface
AMD runtime=kubernetes container=rocm runtime.network=host | runtime.network
AMD runtime=kubernetes container=rocm runtime.slurm.nodes=2 | runtime.slurm.nodes
runtime=local runtime.kubernetes.claim=team | runtime.kubernetes.claim
NODES topology=ddp runtime.slurm.gid_index=3 | runtime.slurm.gid_index
CODE data=hub data.hub_id=a/b data.revision=c data.heldout_path=a.jsonl | data.heldout_path
data.answer_pattern=a | data.answer_pattern
method=dpo data=samples data.path=samples.jsonl data.system_prompt=a | data.system_prompt
data.hub_id=a/b | data.hub_id
data.revision=c | data.revision
data.split=test | data.split
QWEN model.init=random model.hub_id=me/mine | model.hub_id
model.revision=c | model.revision
FILE data.num_train=5 | data.num_train
'data.sources=[{path: a.jsonl, weight: 1.0}]' | data.sources
"""
# overrides | words of the message about one value
VALUES = r"""
QWEN method=serve method.args.port=0 | method.args.port=0: out of range. Use: at least 1
name=a/b | name=a/b: invalid format. Use at most 100
CODE +method.rewards.regex=1.0 "method.reward_pattern='('"
 | pattern=(: not a regular expression (missing )
EXPORT method.args.push_to=model
 | push_to=model: invalid format. Use a Hub repository, for example
runtime=slurm runtime.slurm.time=abc | runtime.slurm.time=abc: invalid format. Use minutes
runtime=slurm runtime.slurm.gres='gpu:mi300x:4' | runtime.slurm.gres=gpu:mi300x:4: invalid format
method=evaluate method.args.engine=vlm | method.args.engine=vlm: it must be one of
method.args.max_steps=0 | Use: at least 1 and at most 2147483647, or -1 to use num_train_epochs.
AMD hardware.packed_attention=flashattn | must be one of null, varlen, flash_attention_2, sdpa
GRPO topology.overlap=steam | topology.overlap=steam: it must be one of null, false, true, stream
seed=4294967296 | seed=4294967296: out of range
adapter=lora adapter.rank=9999999999999999999 | at most 2147483647
model=tiny model.hidden_size=9999999999999999999999 | at most 2147483647
method.args.max_steps=9999999999999999999 | at most 2147483647, or -1
runtime.stop_timeout_s=9999999999999999999 | at most 31536000
data.num_train=9999999999999999999 | at most 2147483647
'data.tasks=[{name: gcd, worked: -0.1}]' | data.tasks[0].worked=-0.1: out of range
precision.compute=bf61 | precision.compute=bf61: it must be one of fp32, fp16,
price_per_gpu_hour=1e308 | Use: at least 0 and at most 1000000000.
method.args.eval_strategy=stepps | Use: method.selection.metric=eval_loss.
method.args.adam_beta1=1 | adam_beta1=1: out of range. Use: at least 0 and below 1.
method=dpo method.args.beta=0 | method.args.beta=0: out of range. Use: above 0.
method=grpo method.args.beta=-0.1 | method.args.beta=-0.1: out of range. Use: at least 0.
method=tune/batch method.args.recipe=dpo method.args.beta=0 | method.args.beta=0: out of range
method=tune/vllm method.args.space.num_scheduler_steps=[1,8] | num_scheduler_steps was removed
method.args.lr_scheduler_type=cosin | unknown. Did you mean cosine? Use one of linear,
method=dpo method.args.loss_type=[sigmoid,stf] | loss_type=stf: unknown. Did you mean sft
adapter=lora adapter.target_modules=[q_prj,v_proj] | adapter.target_modules[0]=q_prj: it must be
adapter=lora adapter.target_modules=q_projs | it must be one of all-linear, q_proj, k_proj
runtime=docker container=cpu runtime.secrets=[my-key] | runtime.secrets[0]=my-key: invalid format
runtime=docker container=cpu runtime.secrets=[PATH] | runtime.secrets[0]=PATH: invalid format
method.args.ddp_backend=foo | method.args.ddp_backend=foo: unknown. Use one of
method=dpo method.args.loss_type=[discopop] method.args.discopop_tau=0 | Use: above 0.
method=dpo method.args.ld_alpha=1.5 | Use: at least 0 and at most 1.
method.args.include_num_input_tokens_seen=al | Did you mean all
method.args.torch_compile_backend=inductr | Did you mean inductor?
method.args.dataloader_multiprocessing_context=frok | Did you mean fork
GRPO method.args.vllm_model_impl=transformer | Did you mean transformers
AMD method=tune/rccl method.args.space.PATH=[a] | method.args.space.PATH: a variable must start
AMD method=tune/vllm method.args.space.max_num_seq=[1] | no such argument. Did you mean max_num_seqs
AMD method=tune/vllm method.args.space.kv_cache_dtype=[fp9] | kv_cache_dtype=fp9: unknown.
AMD method=bench/vllm method.args.base={max_num_sqs:1} | Did you mean max_num_seqs
AMD method=bench/vllm method.args.settings=[{},{max_num_seqs:many}] | accepts int
GRPO 'method.args.generation_kwargs={num_return_sequences: 2}' | Use: method.args.num_generations=.
GRPO method.args.vllm_importance_sampling_mode=token_mas | Did you mean token_mask
"""
VALID = """
QWEN method=serve topology.server_tensor_parallel=4 topology.server_args={max_num_seqs:512}
 topology.server_max_length=4096
QWEN method=chat method.args.engine=vllm topology.server_memory_share=0.5
method.args.learning_rate=0 method.args.warmup_steps=0.1 method.args.max_grad_norm=0
 method.args.save_steps=0.5 method.args.logging_steps=2.0 method.args.adam_beta1=0
method=grpo method.args.top_p=1 method.args.min_p=null method.args.beta=0
method=evaluate method.args.temperature=0
method=dpo method.args.loss_type=[sigmoid,sft] method.args.loss_weights=[1.0,0.5]
method=dpo method.args.loss_type=[robust] method.args.label_smoothing=0.49
 method.args.optim=rmsprop 'method.args.optim_args="alpha=0.9,momentum=0.1"'
method.args.optim=galore_adamw +method.args.optim_target_modules=all-linear
method.args.lr_scheduler_type=cosine_with_min_lr
 'method.args.lr_scheduler_kwargs={min_lr: 1e-6}'
BEST method.args.lr_scheduler_type=reduce_lr_on_plateau
GRPO
QWEN method=evaluate method.args.engine=vllm topology.server_memory_share=0.5
 topology.server_max_length=4096
AMD topology=zero3 topology.zero.offload_parameters=true topology.zero.offload_optimizer=true
AMD method=tune/batch method.args.recipe=grpo method.args.rows=data
AMD method=tune/inductor method.args.candidates=null
AMD method=bench/gemm method.args.shapes=[[8192,8192,8192]] profile=torch
AMD method=bench/vllm profile=torch
AMD method=bench/vllm 'method.args.settings=[{VLLM_X: 1, instances: 2, label: a, dtype: null}]'
AMD method=tune/vllm 'method.args.space.cudagraph_capture_sizes=[[1,2],[4]]'
AMD method=tune/rccl method.args.space.HSA_NO_SCRATCH_RECLAIM=[1]
method.args.ddp_backend=gloo
AMD method=bench/collectives method.args.dtypes=[] method.args.settings=[]
AMD method=bench/collectives 'method.args.settings=[{NCCL_ALGO: null}]'
'data.tasks=[{name: shuffled_cups, level: 7, config: {cups: 5}, worked: 1}]'
GRPO topology=split method.args.per_device_train_batch_size=2
 method.args.gradient_accumulation_steps=4 method.args.num_generations=8
"""


def rows(table: str) -> list[list[str]]:
    lines = re.sub(r"\n ", " ", table.strip()).splitlines()
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def config_of(text: str) -> Config:
    """Compose overrides, on the CPU unless they name hardware."""
    for word, overrides in WORDS.items():
        text = re.sub(rf"\b{word}\b", overrides, text)
    return composed(*(["hardware=cpu"] if "hardware=" not in text else []), *shlex.split(text))


def refusal(config: Config) -> str:
    with pytest.raises(UserError) as raised:
        check(config)
    return str(raised.value)


@pytest.mark.parametrize(("name", "overrides", "remedy"), rows(CASES))
def test_rule_rejects_with_a_remedy(name, overrides, remedy):
    config = config_of(overrides)
    assert [rule.name for rule in refusals(config)] == [name]
    message, _, use = refusal(config).partition(" Use: ")
    assert remedy in use
    assert not message.endswith("..")


@pytest.mark.parametrize(("overrides", "key"), rows(UNREAD))
def test_a_key_that_nothing_reads(overrides, key):
    config = config_of(overrides)
    [rule] = refusals(config)
    assert rule.name == "unread"
    assert rule.message.startswith((f"{key} takes no effect", f"{key}, ", f"{key}=", f"{key}: "))


def test_every_rule_has_a_case():
    source = "".join(file.read_text() for file in Path(tables.__file__).parent.glob("*.py"))
    names = {*re.findall(r'Refusal\(\s*"(\w+)"', source), *limits.ROWS}
    names |= {row["rule"] for row in table(tables.__file__, "conflicts")}
    assert names == {name for name, *_ in rows(CASES)} | {"unread"}
    configs = [config_of(overrides) for overrides, _ in rows(UNREAD)]
    for row in table(tables.__file__, "unread"):
        assert any(list(tables.unread_row(config, row)) for config in configs), row


@pytest.mark.parametrize("method", groups()["method"])
def test_every_rule_reads_every_method(method):
    """Rules read arguments that a method may lack."""
    overrides = ["topology.overlap=true", "topology.fsdp.activation_checkpointing=true"]
    config = composed("hardware=mi300x", "topology=fsdp", f"method={method}", *overrides)
    assert re.search(r"topology\.overlap takes? no effect", refusal(config))


@pytest.mark.parametrize(("overrides", "words"), rows(VALUES))
def test_value_outside_its_list_or_range(overrides, words):
    assert words in refusal(config_of(overrides))


@pytest.mark.parametrize("overrides", [overrides for [overrides] in rows(VALID)])
def test_composition_that_works(overrides):
    check(config_of(overrides))


def test_refusals_are_shown_together():
    config = composed("hardware=mi50", "precision=bf16", "topology=split", "data=jsonl")
    assert refusal(config).count("Use: ") == len(refusals(config)) >= 3


@pytest.mark.parametrize(("overrides", "words"), [
    ("model.num_parameters=7", "model.num_parameters=7"),
    ("model.num_layers=35 model.path=/m", "model.num_parameters=3921537280"),
    ("model.num_parameters=3990000000", None),  # a rounded published count
    ("model.num_layers=12 model.init=random", None),
    ("model.init=random model.hub_id=null model.revision=null", None),
    ("model=qwen3_32b model.hub_id=me/tuned", None),  # the newest
    ("model=qwen3_32b model.hub_id=me/tuned model.revision="
     "9216db5781bf21249d130ec9da846c4624c16137", "is a commit of Qwen/Qwen3-32B."),
    ("model.hub_id=me/tuned", None),  # the newest
    (f"model.hub_id=me/tuned model.revision={'a' * 40}", None),
    (f"model.hub_id=Qwen/Qwen3-8B model.revision={'a' * 40}", None),  # is model=qwen3_8b
    ("model.hub_id=me/tuned model.path=/m", None),  # model.path has precedence
    ("model=qwen3_32b model.revision=null method=evaluate", None),
    ("model.name=mine model.num_layers=12", "model=mine"),
    ("model.name=mine model.hub_id=me/mine", None),  # conf/model has no revision to compare
])  # fmt: skip
def test_the_model_that_is_loaded_is_the_one_that_is_planned(overrides, words):
    config = config_of(f"QWEN {overrides}")
    messages = [*map(str, refusals(config))]
    assert len(messages) == (words is not None)
    assert words is None or words in messages[0]


@pytest.mark.parametrize(("overrides", "remedies"), [
    ("method=grpo topology=single data=code method.rewards.reasoning_gym=1.0",
     ["data=reasoning"]),
    ("CODE +method.rewards.accuracy=1.0", ["~method.rewards.accuracy"]),
    ("CODE +method.rewards.regex=1.0", [r"method.reward_pattern='\d+'", "~method.rewards.regex"]),
])  # fmt: skip
def test_remedies_for_a_reward_that_the_rows_lack_work(overrides, remedies):
    config = config_of(f"QWEN {overrides}")
    message = refusal(config).replace(" '~", " ~").replace("' +", " +")
    for remedy in remedies:
        assert remedy in message.partition(" Use: ")[2]
        check(config_of(f"QWEN {overrides} {remedy}"))


@pytest.mark.parametrize(("overrides", "remedy"), [
    ("servers=8", "topology.servers=7"),
    ("server_tensor_parallel=8", "topology.server_tensor_parallel=4"),  # 7 GPUs, 32 heads
    ("servers=3 topology.num_gpus=2", "topology.servers=1 or topology.num_gpus=4"),
    ("servers=16 topology.server_tensor_parallel=16",
     "topology.servers=1 topology.server_tensor_parallel=1"),
])  # fmt: skip
def test_remedies_for_servers_that_take_every_gpu_work(overrides, remedy):
    split = f"GRPO topology=split topology.{overrides}"
    [rule] = refusals(config_of(split))
    assert (rule.name, rule.remedy) == ("split_needs_a_trainer", remedy)
    for override in remedy.split(" or "):
        check(config_of(f"{split} {override}"))


# overrides | words of the warning, or none
WARNINGS = """
QWEN data=auto | data=ultrachat
QWEN data=auto method=dpo | data=ultrafeedback
QWEN data=arithmetic | data=ultrachat
hardware=mi300x model=smollm2_135m data=auto method=grpo | data=gsm8k
GRPO data=auto topology=split | none
QWEN data=auto model.init=random | none
QWEN data=ultrachat | none
data.preview=5 mode=plan | Without mode=plan
QWEN data=gsm8k 'data.columns={prompt: problem, answer: solution}' | names only answer, question
QWEN data=gsm8k data.columns.answer=question | none
QWEN data=gsm8k data.hub_id=me/mine data.revision=null data.columns.prompt=problem | none
hardware=mi50 precision=fp16 adapter=lora precision.weights=bf16 | Use: precision.weights=fp16
hardware=strix_halo adapter=qlora precision=nf4 model=qwen3_8b | twice as slow
hardware=strix_halo precision=fp16 model=qwen3_1_7b | less stable
AMD topology=ddp topology.num_gpus=4 | collectives of 4 GPUs
GRPO topology=split | none
hardware=mi300a topology=ddp topology.num_gpus=3 | collectives of 3 GPUs
QWEN adapter=lora | method.args.learning_rate=0.0002.
GRPO adapter=dora topology=colocate | method.args.learning_rate=1e-05.
QWEN adapter=lora method.args.learning_rate=2e-5 data=ultrachat | none
GRPO adapter=lora topology=colocate method.args.learning_rate=2e-4 | 20 times
GRPO adapter=lora topology=colocate method.args.learning_rate=1e-4 | 10 times
GRPO adapter=lora topology=colocate method.args.learning_rate=9e-5 | none
GRPO topology=colocate method.args.learning_rate=2e-4 | none
experiment=mi350x_qwen3_8b_lora | none
AMD topology=ddp | none
hardware=mi300a topology=ddp | none
hardware=h200 topology=ddp topology.num_gpus=4 | none
AMD topology=ddp user_env.PYTORCH_ALLOC_CONF='expandable_segments:True' | expandable_segments hangs
hardware=h200 method=grpo topology=colocate user_env.PYTORCH_ALLOC_CONF='expandable_segments:True'
 | expandable_segments with vLLM
AMD topology=ddp method.args.torch_compile_mode=reduce-overhead | max-autotune-no-cudagraphs
AMD topology=ddp method.args.torch_compile_mode=default | none
AMD topology=ddp user_env.TORCH_ROCM_FA_PREFER_CK=1 | Compare its gradients
AMD topology=ddp user_env.TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 | in TF32
hardware=h200 topology=ddp method.args.tf32=true | none
hardware=h200 topology=ddp method.args.torch_compile_mode=max-autotune | none
hardware=strix_halo user_env.HSA_OVERRIDE_GFX_VERSION=11.0.0 | supported natively
AMD topology=fsdp precision=bf16 precision.weights=bf16 | accelerate keeps trainable
AMD runtime=slurm | requests no cores
runtime=slurm runtime.slurm.options=[--exclusive] | none
runtime=slurm "runtime.slurm.options=['--cpus-per-task=16']" | none
hardware=strix_halo hardware.dataloader.num_workers=2 | pinned memory hang
QWEN method=evaluate topology=single | one of the node's 8 GPUs evaluates
QWEN method=evaluate data.num_heldout=500 | none
QWEN method=evaluate data.num_heldout=300 | Use: method.args.batch_size=38.
QWEN method=evaluate data.num_heldout=500 data.limit=64 | 7 of 8 ranks
QWEN method=evaluate data.num_heldout=500 method.args.lm_eval_tasks=[gsm8k] | the first of 8 ranks
method=evaluate data.filter.max_tokens=512 data.filter.min_tokens=2 | min_tokens, max_tokens
method=evaluate data.filter.levels=[0] | none
method=evaluate step.compile=false | step.compile
model=tiny method.args.optim=adafactor | method.args.adam_beta2: optim=adafactor
method.args.optim=sgd method.args.adam_beta1=0.8 method.args.adam_epsilon=1e-6 | adam_beta1, method
method.args.optim=lion_8bit method.args.adam_beta1=0.8 | none
model=tiny model.num_layers=8 | Use: model.num_parameters=
model=tiny hardware=mi300x method=serve model.num_parameters=200000000000 | model.num_parameters=9
hardware=rx7900xtx method=serve model=qwen3_32b | none
hardware=mi60 runtime=local mode=plan | no code for gfx906
hardware=mi60 runtime=docker mode=plan | none
hardware=mi50 precision=fp16 model=gemma3_4b adapter=lora | transformers#36822
hardware=mi50 method=bench/numerics model=gpt_oss_20b | needs 586 GB of 34 GB
hardware=mi50 method=bench/numerics model=qwen3_0_6b | none
hardware=mi300x method=bench/vllm model=llama3_1_70b | ++method.args.base.max_model_len=4096
hardware=mi300x method=bench/vllm model=llama3_1_70b +method.args.base.max_model_len=4096 | none
hardware=mi300x method=bench/vllm model=llama3_1_70b +method.args.base.tensor_parallel_size=2 | none
hardware=mi210 method=bench/vllm model=llama3_1_70b | a larger tensor_parallel_size
hardware=mi300x method=bench/vllm model=qwen3_8b | none
"""


@pytest.mark.parametrize(("overrides", "warned"), [
    ("max_steps=150", None),
    ("max_steps=153", "max_steps=9 "),
    ("num_train_epochs=300", None),
    ("max_steps=153 data.limit=1", "max_steps=1 "),
])  # fmt: skip
def test_steps_that_repeat_the_rows_of_a_file(tmp_path, overrides, warned):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 11 + "\n" + '{"text": "b"}')
    words = f"QWEN topology=single data=jsonl data.path={path} method.args.{overrides}"
    lines = rule_warnings(config_of(words))
    assert len(lines) == (warned is not None)
    assert all(warned in line for line in lines)


@pytest.mark.parametrize(("overrides", "words"), rows(WARNINGS))
def test_warning(overrides, words):
    config = config_of(overrides)
    assert refusals(config) == []
    warnings = rule_warnings(config)
    assert warnings == [] if words == "none" else any(words in line for line in warnings)


@pytest.mark.parametrize(
    ("method", "overrides", "is_rejected"),
    [
        ("fp8", "method=sft", True),
        ("gptq", "adapter=lora", True),
        ("mxfp4", "method=sft", False),
        ("mxfp4", "method=grpo topology=split", True),
        ("fp8", "method=evaluate", False),
    ],
)
def test_quantized_weights_are_not_trained(tmp_path, method, overrides, is_rejected):
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99}
    content = {"model_type": "llama", **shape, "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = composed("hardware=mi300x", f"model.path={tmp_path}", *overrides.split())
    names = [refusal.name for refusal in refusals(config)]
    assert ("quantized_model" in names) == is_rejected
