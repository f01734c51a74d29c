"""Print --help: the keys, the groups with their options from conf/, and commands to start from."""

from __future__ import annotations

import textwrap

from launch.config.wording import groups

HEAD = """\
usage: python launch/run.py [group=option]... [key=value]...
       python launch/run.py -m key=1,2,3 ...           all combinations of values
       python launch/run.py -m sweep=NAME ...          search for the best values; repeat to resume

Composes a recipe from the groups below, checks it, predicts memory and speed, runs it, and leaves
a run directory from which it can be run again. Without arguments it trains a tiny model on this
machine, whatever it is.

examples:
  python launch/run.py experiment=quickstart           SFT, then GRPO, in minutes on a laptop's CPU
  python launch/run.py hardware=mi350x method=grpo model=qwen3_4b mode=plan
  python launch/run.py method=sft model=qwen3_0_6b data=jsonl data.path=train.jsonl
  python launch/run.py experiment=mi50_phase1 smoke=true
  python launch/run.py runtime=docker container=cpu smoke=true method=grpo
  python launch/run.py -m method.args.learning_rate=1e-4,3e-4 seed=0,1
  python launch/run.py -m sweep=grpo hardware=mi300x model=qwen3_4b topology=single mode=plan

keys:
  mode=run|plan          plan prints everything that would run, and changes nothing
  find=largest_batch|smallest_hardware   with mode=plan: search with the memory planner
  effective_batch=N      sequences per optimizer step on all ranks; sets gradient accumulation
  topology.num_gpus=N    GPUs to use on each node; default: all, or one under topology=single
  model.path=DIR         a Hugging Face directory in place of the hub's weights, or a run's
                         runs/<name>/<run>/model
  adapter.rank=N         of adapter=lora, with adapter.alpha (docs/adapters.md)
  precision.weights=T    dtype that weights are kept in: fp32, bf16, fp16, nf4; precision=NAME sets
                         the one that products are computed in
  data.preview=N         shows N rows as the model reads them, with lengths, cuts and packing;
                         trains nothing (docs/data.md)
  hardware.memory_gb=N   of one GPU, in GiB as vendors count; plans show GB of 1e9 bytes
                         (docs/memory.md)
  price_per_gpu_hour=P   adds the cost of the run to the plan
  format=text|json       of the plan and the result; json prints one object on stdout, for a
                         pipeline one with all its phases
  verbose=true           adds full command lines and environments to the text plan
  smoke=true             scales the composition down until a CPU runs it in seconds; values given
                         on the command line stay
  resume=auto|never|DIR  auto resumes the newest unfinished run of the same composition; DIR works
                         on other ranks too (docs/supervision.md). In a changed pipeline, auto
                         keeps the phases before the change (docs/pipelines.md)
  preflight=warn         runs although the doctor's short checks predict a failure (docs/doctor.md)
  save_model=false       does not write the trained model, for runs that only measure
  profile=torch|memory|rocprof   shows where time and memory go (docs/profiling.md);
                         rocprof=v3|compute|sys chooses the program
  seed=N  name=NAME  run_root=DIR
  method.args.NAME=V     any argument of the method's trainer (TRL's SFTConfig, GRPOConfig ...)
  sweep.KEY=V            of -m: num_trials, parallel, metric, direction, space.NAME.low ...
                         (docs/sweeps.md)
  user_env.NAME=V        an environment variable of yours; it overrides ours
  runtime.KEY=V          of containers: network, shm_gb, memory_gb, infiniband, secrets,
                         stop_timeout_s
  runtime.slurm.KEY=V    of a job: nodes, partition, account, time, options, interface, wait
                         (docs/slurm.md)

groups:
"""
TAIL = """
Every key of the composition:   python launch/run.py --cfg job [overrides]
Where each value comes from:    python launch/run.py --info defaults-tree [overrides]
Completion in bash:             eval "$(python launch/run.py -sc install=bash)"
Other commands:                 launch/doctor.py; launch/report.py RUN...; launch/reproduce.py RUN;
                                containers/build.py image=NAME

exit codes: 0 done; 2 the configuration is wrong; 3 this host cannot run it; 4 a process failed;
5 hung and was stopped; 75 interrupted, run it again to resume"""


def is_requested(arguments: list[str]) -> bool:
    return any(argument in ("--help", "-h", "help") for argument in arguments)


def text() -> str:
    wrapper = textwrap.TextWrapper(98, subsequent_indent=" " * 15)
    lines = [
        wrapper.fill(f"  {group + '=':<12} {', '.join(options)}")
        for group, options in groups().items()
        if options and "_" not in group
    ]
    return HEAD + "\n".join(lines) + "\n" + TAIL
