"""Search with Optuna for the arguments of vLLM's engine with the most tokens per second.

A trial is a run of method=bench/vllm with one set of arguments. It reports after each pair of
lengths, shortest first, so that slow trials stop early. Its figure is the geometric mean of output
tokens per second over all lengths.

The tuning writes one experiment for the benchmark, and one for all methods that generate:
conf/experiment/tuned_engine_<model>_<hardware>.yaml.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.bench import vllm_programs
from recipes.bench.benchmark import Table
from recipes.rank.names import name_field
from recipes.rank.program import is_main_rank, main, say
from recipes.tune.search import Point, SearchConfig, search_bench
from recipes.tune.trial import Setting
from recipes.tune.tuning import launch_command, write_file

FIGURE = "output_tokens_per_second"
SHARE = "gpu_memory_utilization"  # topology.server_memory_share in runs that generate
# Arguments that other keys set in runs that generate.
RUN_ARGUMENTS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("dtype", "max_model_len"),
)


@dataclass
class VllmConfig(SearchConfig):
    """Arguments. `space` maps vLLM's arguments, written as in bench/vllm, to values."""

    recipe: str = name_field(lambda: ("bench/vllm",), "bench/vllm")
    space: dict[str, list[Any]] = field(default_factory=dict, metadata=vllm_programs.KEY_RULES)


def vllm(config: DictConfig) -> dict[str, Any]:
    args = VllmConfig(**OmegaConf.to_container(config.trainer_args))
    if not is_main_rank():  # the trials start their own ranks on the same GPUs
        return {}
    table = Table("vllm", f"trial setting {FIGURE}", figure=FIGURE)
    base = OmegaConf.to_container(config.tuned.trainer_args.base)

    def setting_of(point: Point) -> Setting:
        return Setting({"base": {**base, **point}} if point else {})

    name_of = lambda row: f"{row['kind']} {row['input']}+{row['output']}"  # noqa: E731
    content, best = search_bench(config, args, table, setting_of, "length", name_of)
    path, command = write_engine(config, {**base, **best})
    say(f"experiment for methods that generate: {path}\n  {command}")
    return {**content, "engine_experiment": str(path), "engine_command": command}


def write_engine(config: DictConfig, engine: Mapping[str, Any]) -> tuple[Path, str]:
    """Write an experiment that passes `engine`'s arguments to GRPO's server and to engine=vllm.

    Return its path and a command that uses it.
    """
    groups = config.tuned.experiment.groups
    name = f"tuned_engine_{groups.model}_{groups.hardware}.yaml".replace("/", "_")
    path = Path(config.run_dir) / "conf/experiment" / name
    start = [*launch_command(path), f"hardware={groups.hardware}", f"model={groups.model}"]
    command = shlex.join([*start, "method=grpo", "topology=split"])
    ours = (*vllm_programs.OURS, *RUN_ARGUMENTS)
    values = {key: value for key, value in engine.items() if value is not None and key not in ours}
    args = {key: value for key, value in values.items() if not key.isupper()}  # without variables
    share = {"server_memory_share": args.pop(SHARE)} if SHARE in args else {}
    topology = {**share, "server_args": args}
    header = [
        "Result of method=tune/vllm for GRPO's server, and for sampling and evaluation with "
        f"engine=vllm: {groups.model}.",
        f"Needs:     {config.hardware.product}, and the version of vLLM that was tuned.",
    ]
    evaluate = shlex.join([*start, "method=evaluate", "method.args.engine=vllm"])
    content = {"topology": topology, "user_env": vllm_programs.env_of(values)}
    write_file(config, path, header, (command, evaluate), content)
    return path, command


if __name__ == "__main__":
    main(vllm)
