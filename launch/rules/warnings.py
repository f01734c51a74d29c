"""Return warnings for every plan about settings that work but cost something."""

from __future__ import annotations

import math
from collections.abc import Iterator

from launch.estimate.rank_memory import generates_with_vllm, makes_fp32
from launch.machine import placement
from launch.schema import Config
from launch.schema.enums import Link, Mode
from launch.schema.trainer_args import argument
from launch.schema.variables import is_expandable

# lengths in data.filter, in tokens, which only trainings read
LENGTHS = ("min_tokens", "max_tokens", "max_prompt_tokens")
CORES = ("--exclusive", "--cpus-per-task", "--cpus-per-gpu")  # options that give a job more cores


def rule_warnings(c: Config) -> list[str]:
    return [*_of_run(c), *_of_evaluation(c), *_of_hardware(c)]


def _of_run(c: Config) -> Iterator[str]:
    if c.data.preview and c.mode == Mode.plan:
        yield (
            f"data.preview={c.data.preview} prints rows only without mode=plan. This plan ignores "
            "it."
        )
    names = [option.partition("=")[0] for option in c.runtime.slurm.options]
    has_cores = any(cores.startswith(name) for name in names for cores in CORES)
    if c.runtime.name == "slurm" and not has_cores:
        yield (
            "runtime.slurm.options asks for no cores, and many clusters give such a job one, for "
            f"all {placement.trainers_of_a_node(c)} rank(s) of a node. Use: "
            "runtime.slurm.options=['--exclusive','--mem=0'] for the whole node, "
            "['--cpus-per-task=N'] for N of its cores."
        )
    keys = [
        f"step.{name}"
        for name in ("compile", "rows", "checkpointed_layers")
        if getattr(c.step, name) is not None
    ]
    if keys and not (c.method.trains or c.method.tunes or c.method.has_cycles):
        yield (
            f"{', '.join(keys)}: method={c.method.name} takes no optimizer steps, so they take no "
            "effect."
        )


def _of_evaluation(c: Config) -> Iterator[str]:
    """Yield warnings about idle ranks or GPUs, and filters that an evaluation does not read.

    Ranks share batches, but not the tasks of the harness. Filters may be a pipeline's, for its
    trainings.
    """
    if not c.method.measures_model:
        return
    ranks, unread = placement.num_trainers(c), [n for n in LENGTHS if getattr(c.data.filter, n)]
    if unread:
        yield (
            f"data.filter.{', '.join(unread)}: lengths in tokens, which differ by model, do not "
            "remove held-out problems."
        )
    if ranks == 1 and c.hardware.gpus_per_node > 1:
        yield (
            f"topology=single: one of the node's {c.hardware.gpus_per_node} GPUs evaluates, the "
            "others stay idle."
        )
    if ranks > 1 and argument(c, "lm_eval_tasks"):
        yield (
            f"method.args.lm_eval_tasks: the first of {ranks} ranks runs these tasks alone; the "
            "others have ended by then."
        )
    problems = c.data.num_heldout and min(c.data.num_heldout, c.data.limit or c.data.num_heldout)
    size = int(argument(c, "batch_size"))
    batches = math.ceil(problems / size)
    if 0 < batches < ranks:
        yield (
            f"{problems} held-out problems in batches of {size}: {ranks - batches} of {ranks} "
            f"ranks stay idle; method.args.batch_size={math.ceil(problems / ranks)} gives each one."
        )


def _of_hardware(c: Config) -> Iterator[str]:
    hardware, ranks = c.hardware, placement.trainers_of_a_node(c)
    if c.precision.weights == "nf4" and hardware.name == "strix_halo":
        yield (
            "precision=nf4 on strix_halo is twice as slow as bf16 (measured in the Strix Halo "
            "report): this machine has enough memory without it."
        )
    # MI300A come in fours, all others in eights, each linked to every other
    board = 4 if hardware.unified_memory else 8
    fully_linked = hardware.link == Link.xgmi and hardware.gfx in ("gfx942", "gfx950")
    if fully_linked and 1 < ranks < board and c.method.kind != "evaluator":
        yield (
            f"collectives of {ranks} GPUs use a fraction of {hardware.name}'s xGMI links; 1 or "
            f"{board} waste none (rccl#1270)."
        )
    pages = any(map(is_expandable, c.user_env.values()))
    if pages and hardware.gfx.startswith("gfx"):
        yield (
            "expandable_segments hangs on some ROCm stacks (pytorch#192259) and gives NaN in bf16 "
            "on gfx1201 (pytorch#195202)."
        )
    elif pages and generates_with_vllm(c):
        yield (
            "expandable_segments with vLLM: an engine on several GPUs may exit (vllm#42609), and "
            "sleep mode knows it by the name PYTORCH_CUDA_ALLOC_CONF alone."
        )
    if makes_fp32(c) and c.method.trains and c.adapter.rank is None:
        yield (
            f"precision.weights={c.precision.weights} under FSDP: accelerate keeps trainable "
            "weights in fp32 anyway."
        )
    if "HSA_OVERRIDE_GFX_VERSION" in c.user_env and hardware.gfx != "gfx906":
        yield (
            f"HSA_OVERRIDE_GFX_VERSION makes {hardware.gfx} run another GPU's code; it is "
            "supported natively."
        )
    loader = hardware.dataloader
    if hardware.name == "strix_halo" and (loader.num_workers or loader.pin_memory):
        yield (
            "dataloader workers and pinned memory hang Strix Halo (its report): 0 and false are "
            "the tested values."
        )
