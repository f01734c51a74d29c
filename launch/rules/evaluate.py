"""Rows of check.py's table about generating with an engine of one's own, and about evaluations."""

from __future__ import annotations

import math
import re

from launch import topology
from launch.errors import near
from launch.rules.data import LENGTHS
from launch.rules.rule import Rule
from launch.rules.selection import has_heldout
from launch.schema import Config
from launch.schema.enums import Init
from launch.trainer_args import argument

COMMIT = re.compile(r"[0-9a-f]{40}")
ENGINES = ("transformers", "vllm")  # of recipes/common/generation.py


def lacks_heldout(config: Config) -> bool:
    """Of an evaluation, unless it is one of lm-evaluation-harness's tasks alone."""
    return config.method.name == "evaluate" and not has_heldout(config) and not argument(config, "lm_eval_tasks")


def _unused(config: Config) -> bool:
    """What only the harness reads, without a task for it. smoke=true sets its limit for whoever has one."""
    given = any(argument(config, f"lm_eval_{name}") is not None for name in ("include", "limit"))
    return given and not config.smoke and not argument(config, "lm_eval_tasks")


def evaluate_warnings(config: Config) -> list[str]:
    """Of ranks, or GPUs, that have nothing to evaluate (what ranks share is batches, and tasks of the harness are not), and of filters that
    an evaluation does not read: a pipeline's trainings may have them, and its problems are to be the same for every model."""
    if config.method.name != "evaluate":
        return []
    ranks, found = topology.num_trainers(config), []
    unread = [name for name in LENGTHS if getattr(config.data.filter, name) is not None]
    if unread:
        found.append(f"data.filter.{', '.join(unread)}: lengths in tokens, which differ by model, leave no held-out problem out.")
    if ranks == 1 and config.hardware.gpus_per_node > 1:
        found.append(f"topology=single: one of the node's {config.hardware.gpus_per_node} GPUs evaluates, the others stay idle.")
    if ranks > 1 and argument(config, "lm_eval_tasks"):
        found.append(f"method.args.lm_eval_tasks: the first of {ranks} ranks asks them alone, the others have ended by then.")
    problems = min(filter(None, (config.data.limit, config.data.num_heldout)), default=0) if config.data.num_heldout else 0
    batches = math.ceil(problems / int(argument(config, "batch_size")))
    if 0 < batches < ranks:
        found.append(
            f"{problems} held-out problems in batches of {argument(config, 'batch_size')}: {ranks - batches} of {ranks} ranks stay idle; "
            f"method.args.batch_size={math.ceil(problems / ranks)} gives each one."
        )
    return found


def _out_of_range(config: Config) -> str | None:
    """The sampling argument that no distribution has. Others are looked at in rules/values.py."""
    if argument(config, "engine") is None:  # TRL has arguments of the same names
        return None
    within = {"temperature": lambda v: v >= 0, "top_p": lambda v: 0 < v <= 1, "top_k": lambda v: v >= 0}
    return next((name for name, holds in within.items() if argument(config, name) is not None and not holds(argument(config, name))), None)


def _may_be_another_model_tomorrow(config: Config) -> bool:
    model = config.model
    asks = argument(config, "engine") is not None or config.method.kind == "cycles"
    is_pinned = model.revision is None or COMMIT.fullmatch(model.revision)  # without any, model_revision says it
    return asks and model.path is None and model.init == Init.pretrained and not is_pinned


EVALUATE_RULES = [
    Rule(
        "evaluation_data",
        lacks_heldout,
        lambda c: f"method=evaluate with data={c.data.name}: no held-out problems",
        lambda c: "data.num_heldout= (reasoning), data.heldout_path= (jsonl), data.heldout_split= (hub) or data.heldout_fraction=",
    ),
    Rule(
        "evaluated_revision",
        _may_be_another_model_tomorrow,
        lambda c: f"model.revision={c.model.revision} with method={c.method.name}: answers are kept under the model that they are of",
        lambda c: "a commit of the hub, 40 hexadecimal digits, or model.path=<directory>",
    ),
    Rule(
        "generation_engine",
        lambda c: argument(c, "engine") not in (None, *ENGINES),
        lambda c: f"method.args.engine={argument(c, 'engine')}: no such engine.{near(str(argument(c, 'engine')), ENGINES)}",
        lambda c: " or ".join(f"method.args.engine={name}" for name in ENGINES),
    ),
    Rule(
        "engine_needs_vllm",
        lambda c: argument(c, "engine") == "vllm" and not c.hardware.vllm and not c.smoke,
        lambda c: f"method.args.engine=vllm on {c.hardware.name}: no released vLLM serves {c.hardware.gfx}",
        lambda c: "method.args.engine=transformers",
    ),
    Rule(
        "sampling_range",
        lambda c: _out_of_range(c) is not None,
        lambda c: f"method.args.{_out_of_range(c)}={argument(c, str(_out_of_range(c)))}: out of range",
        lambda c: "temperature of 0 (greedy) or more, top_p above 0 and at most 1, top_k of 0 (cuts nothing) or more",
    ),
    Rule(
        "greedy_samples",
        lambda c: c.method.name == "evaluate" and argument(c, "samples_per_prompt") > 1 and argument(c, "temperature") == 0,
        lambda c: f"method.args.samples_per_prompt={argument(c, 'samples_per_prompt')} with temperature=0: all of a problem would be alike",
        lambda c: "method.args.temperature=0.7, or samples_per_prompt=1",
    ),
    Rule(
        "lm_eval_engine",
        lambda c: bool(argument(c, "lm_eval_tasks")) and argument(c, "engine") == "vllm",
        lambda c: "method.args.lm_eval_tasks with engine=vllm: the harness is given the model as transformers holds it",
        lambda c: "method.args.engine=transformers for these tasks",
    ),
    Rule(
        "lm_eval_unused",
        _unused,
        lambda c: "method.args.lm_eval_include or lm_eval_limit without lm_eval_tasks: it would be ignored",
        lambda c: "method.args.lm_eval_tasks=[<name>]",
    ),
]
