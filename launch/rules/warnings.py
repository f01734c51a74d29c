"""Return warnings for every plan about settings that work but cost something."""

from __future__ import annotations

from launch.estimate.training import generates_with_vllm, makes_fp32
from launch.machine import placement
from launch.rules.evaluate import evaluate_warnings
from launch.rules.slurm import slurm_warnings
from launch.rules.step import step_warnings
from launch.schema import Config
from launch.schema.enums import Link, Mode
from launch.schema.variables import is_expandable


def rule_warnings(config: Config) -> list[str]:
    found = []
    if config.data.preview and config.mode == Mode.plan:
        found.append(
            f"data.preview={config.data.preview} shows rows where mode=plan is left out; this "
            "is the plan of that command without it."
        )
    ranks = placement.trainers_of_a_node(config)
    found += [*evaluate_warnings(config), *slurm_warnings(config), *step_warnings(config)]
    if config.precision.weights == "nf4" and config.hardware.name == "strix_halo":
        found.append(
            "precision=nf4 on strix_halo is twice as slow as bf16 (measured in the Strix Halo "
            "report): memory is not what it lacks."
        )
    # MI300A come in fours, all others in eights, each linked to every other
    board = 4 if config.hardware.unified_memory else 8
    fully_linked = config.hardware.link == Link.xgmi and config.hardware.gfx in ("gfx942", "gfx950")
    if fully_linked and 1 < ranks < board and config.method.kind != "evaluator":
        name = config.hardware.name
        found.append(
            f"collectives of {ranks} GPUs use a fraction of {name}'s xGMI links; 1 or {board} "
            "waste none (rccl#1270)."
        )
    pages = any(map(is_expandable, config.user_env.values()))
    if pages and config.hardware.gfx.startswith("gfx"):
        found.append(
            "expandable_segments hangs on some ROCm stacks (pytorch#192259) and gives NaN in "
            "bf16 on gfx1201 (pytorch#195202)."
        )
    elif pages and generates_with_vllm(config):
        found.append(
            "expandable_segments with vLLM: an engine on several GPUs may exit (vllm#42609), "
            "and sleep mode knows it by the name "
            "PYTORCH_CUDA_ALLOC_CONF alone."
        )
    if makes_fp32(config) and config.method.trains and config.adapter.rank is None:
        found.append(
            f"precision.weights={config.precision.weights} under FSDP: accelerate holds "
            "weights that train in fp32 all the same."
        )
    if "HSA_OVERRIDE_GFX_VERSION" in config.user_env and config.hardware.gfx != "gfx906":
        found.append(
            f"HSA_OVERRIDE_GFX_VERSION makes {config.hardware.gfx} run another GPU's code; it "
            "is supported natively."
        )
    if config.hardware.name == "strix_halo" and (
        config.hardware.dataloader.num_workers or config.hardware.dataloader.pin_memory
    ):
        found.append(
            "dataloader workers and pinned memory hang Strix Halo (its report): 0 and false "
            "are the tested values."
        )
    return found
