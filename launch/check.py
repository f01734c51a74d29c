"""What cannot work, refused when it is composed: a table of (applies, message, remedy), tested row by row.

`{...}` in a message is filled from the composition. Rules are pure; what needs the file system stands in rules/files.py.
"""

from __future__ import annotations

import re

from launch import topology, trainer_args
from launch.batch import batch, fitting_batches, generation_batch, whole_generations
from launch.environment import SECRET
from launch.errors import UserError
from launch.machine import masks
from launch.planner.memory import makes_fp32
from launch.rules.adapters import ADAPTER_RULES
from launch.rules.bench import BENCH_RULES
from launch.rules.cycles import CYCLE_RULES
from launch.rules.data import DATA_RULES
from launch.rules.evaluate import EVALUATE_RULES, evaluate_warnings, lacks_heldout
from launch.rules.export import EXPORT_RULES
from launch.rules.model import MODEL_RULES
from launch.rules.profile import PROFILE_RULES
from launch.rules.rewards import REWARD_RULES
from launch.rules.rule import Rule
from launch.rules.runtime import RUNTIME_RULES
from launch.rules.save import SAVE_RULES
from launch.rules.selection import HELD_OUT_ROWS, SELECTION_RULES
from launch.rules.slurm import slurm_warnings
from launch.rules.tasks import TASK_RULES
from launch.rules.topology import TOPOLOGY_RULES, longest
from launch.rules.tune import TUNE_RULES
from launch.rules.values import check_values
from launch.schema import Config
from launch.schema.enums import Debug, Find, Link, Mode, Vendor
from launch.trainer_args import argument, value


def _supported(config: Config) -> str:
    return " or ".join(f"precision={p}" for p in config.hardware.precisions)


def _why_not(config: Config) -> str:
    """The reason a precision is missing, where it is more than `not in the table`."""
    name, gfx = config.precision.name, config.hardware.gfx
    if name == "bf16":
        return f"{gfx} has no bf16 in hardware; emulated it is slower than fp32"
    if name == "nf4":
        return f"no bitsandbytes kernels serve {gfx}"
    if name == "fp8":
        return f"{gfx} has no fp8 matrix units"
    return f"{gfx} is not meant to train in {name}"


def _batch_does_not_divide(config: Config) -> bool:
    return config.method.name == "grpo" and generation_batch(config) % int(value(config, "num_generations")) != 0


def _problems(config: Config) -> int:
    return min(int(n) for n in (config.data.num_train, config.data.limit) if n)


def _prompts_at_once(config: Config) -> int:
    return generation_batch(config) // int(value(config, "num_generations"))


def _batches_that_would_do(config: Config) -> str:
    size, group = batch(config), f"or method.args.num_generations={_largest_divisor(config)}"
    if argument(config, "generation_batch_size"):
        return f"{_generations_that_would_do(config)}; {group}"
    if config.effective_batch and not argument(config, "steps_per_generation"):
        return f"{_generations_that_would_do(config, 'effective_batch')}; {group}"
    # What is accumulated is a generation's only where nothing else says how many micro-steps share one.
    given = argument(config, "steps_per_generation")
    name = "steps_per_generation" if given else "gradient_accumulation_steps"
    pairs = [f"{b} x {a} ({b * a * size.ranks})" for b, a in fitting_batches(config)]
    return f"method.args.per_device_train_batch_size x {name} that would do on {size.ranks} rank(s): {', '.join(pairs)}; {group}"


def _generations_that_would_do(config: Config, key: str = "method.args.generation_batch_size") -> str:
    return " or ".join(f"{key}={n}" for n in whole_generations(config))


def _generation_does_not_divide(config: Config) -> bool:
    given = argument(config, "generation_batch_size")
    return bool(given) and int(given) % _micro_step(config) != 0


def _of_its_kind(config: Config) -> str:
    """What to give in place of a key that this kind of data does not read."""
    key = _ignored_data(config)[0]
    kind = f"data={next(kind for kind, keys in DATA_KEYS.items() if key in keys)}"
    if key == "num_heldout" and config.data.kind in HELD_OUT_ROWS:
        return f"{HELD_OUT_ROWS[config.data.kind]}, or {kind}"
    return f"{kind}, or data.{key}={'[]' if key == 'tasks' else 'null'} where an experiment sets it" if key in GENERATED else kind


def _largest_divisor(config: Config) -> int:
    total, wanted = generation_batch(config), int(value(config, "num_generations"))
    return max((n for n in range(2, wanted + 1) if total % n == 0), default=total)


# What only some kinds of data read.
GENERATED = ("tasks", "num_train", "num_heldout")
DATA_KEYS = {
    "jsonl": ("path", "heldout_path"),
    "hub": ("hub_id", "heldout_split"),
    "samples": ("path",),
    "reasoning": GENERATED,
    "code": GENERATED,
}

SEARCH = Rule(
    "find",
    lambda c: c.find != Find.none and c.mode != Mode.plan,
    lambda c: f"find={c.find.value}: a search with the planner, which starts nothing",
    lambda c: f"mode=plan find={c.find.value}",
)
NAME = Rule(
    "name",
    lambda c: bool(c.name) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", str(c.name)),
    lambda c: f"name={c.name}: it names a directory",
    lambda c: "letters, digits, '.', '_' and '-', at most 100 of them",
)
RULES = [
    Rule(
        "precision",
        lambda c: c.precision.name not in c.hardware.precisions,
        lambda c: f"precision={c.precision.name} on {c.hardware.name}: {_why_not(c)}",
        _supported,
    ),
    Rule(
        "nf4_without_adapter",
        lambda c: c.precision.weights == "nf4" and c.adapter.rank is None and c.method.kind == "trainer",
        lambda c: "precision=nf4 with adapter=none: 4-bit weights take no gradients, so nothing would be trained",
        lambda c: "adapter=qlora, or another precision",
    ),
    Rule(
        "qlora_without_nf4",
        lambda c: c.adapter.quantize_base and c.precision.weights != "nf4",
        lambda c: f"adapter={c.adapter.name} with precision={c.precision.name}: it is LoRA on a 4-bit base",
        lambda c: "precision=nf4, or adapter=lora",
    ),
    Rule(
        "adapter_without_training",
        lambda c: c.adapter.name != "none" and c.method.kind != "trainer" and not c.method.takes_adapter,
        lambda c: f"adapter={c.adapter.name} with method={c.method.name}: it trains none, and would ignore it",
        lambda c: "adapter=none, with model.path=<the training's run>/model, which holds the adapter merged",
    ),
    *ADAPTER_RULES,
    *BENCH_RULES,
    Rule(
        "model_unused",
        lambda c: not c.method.uses_model and c.model.name != "tiny",
        lambda c: f"model={c.model.name} with method={c.method.name}: it measures the machine, and would ignore the model",
        lambda c: "no model=",
    ),
    Rule(
        "precision_unused",
        lambda c: not c.method.uses_precision and not c.smoke and c.precision.name != next(iter(c.hardware.precisions), "fp32"),
        lambda c: f"precision={c.precision.name} with method={c.method.name}: its rows name their own, and it would be ignored",
        lambda c: "no precision=",
    ),
    *TUNE_RULES,
    *EVALUATE_RULES,
    *EXPORT_RULES,
    *CYCLE_RULES,
    *SAVE_RULES,
    *TOPOLOGY_RULES,
    Rule(
        "debug_without_gpu",
        lambda c: c.debug != Debug.none and c.hardware.vendor == Vendor.none,
        lambda c: f"debug={c.debug.name} on a CPU: it sets variables of a GPU's runtime",
        lambda c: "debug=none",
    ),
    *PROFILE_RULES,
    Rule(
        "adapter_rank",
        lambda c: (c.adapter.name == "none") != (c.adapter.rank is None),
        lambda c: f"adapter.rank={c.adapter.rank} with adapter={c.adapter.name}",
        lambda c: "adapter=lora adapter.rank=N, or adapter=none",
    ),
    Rule(
        "max_steps",
        lambda c: argument(c, "max_steps") not in (None, -1) and argument(c, "max_steps") < 1,
        lambda c: f"method.args.max_steps={argument(c, 'max_steps')}: a training takes at least one step",
        lambda c: "1 or more; or -1, which is not given: method.args.num_train_epochs counts then",
    ),
    Rule(
        "epochs_and_steps",
        trainer_args.epochs_and_steps,
        lambda c: (
            f"method.args.num_train_epochs={c.method.args['num_train_epochs']} with max_steps={c.method.args['max_steps']}: "
            "max_steps would win without a word"
        ),
        lambda c: "method.args.max_steps=-1 to count epochs, or '~method.args.num_train_epochs' to count steps",
    ),
    *SELECTION_RULES,
    Rule(
        "groups_divide",
        _batch_does_not_divide,
        lambda c: (
            f"{generation_batch(c)} completions a generation on {topology.num_trainers(c)} training rank(s) do not divide by "
            f"method.args.num_generations={value(c, 'num_generations')}"
        ),
        _batches_that_would_do,
    ),
    # As trl.GRPOConfig.__post_init__ refuses them, on every rank.
    Rule(
        "generation_divides",
        _generation_does_not_divide,
        lambda c: (
            f"method.args.generation_batch_size={argument(c, 'generation_batch_size')} is no multiple of the {_micro_step(c)} sequences "
            f"that {topology.num_trainers(c)} training rank(s) take at once, {batch(c).per_device} each"
        ),
        lambda c: f"{_generations_that_would_do(c)}; or no generation_batch_size, and method.args.steps_per_generation=N",
    ),
    Rule(
        "generation_twice",
        lambda c: bool(argument(c, "generation_batch_size")) and bool(argument(c, "steps_per_generation")),
        lambda c: (
            f"method.args.generation_batch_size={argument(c, 'generation_batch_size')} with "
            f"steps_per_generation={argument(c, 'steps_per_generation')}: each decides the other, and TRL takes one"
        ),
        lambda c: "one of them",
    ),
    Rule(
        "groups_and_smaller_batches",
        lambda c: c.method.name == "grpo" and bool(argument(c, "auto_find_batch_size")),
        lambda c: "method.args.auto_find_batch_size=true with method=grpo: a smaller batch may cut a group of completions",
        lambda c: "method.args.auto_find_batch_size=false; mode=plan find=largest_batch plans what fits",
    ),
    Rule(
        "compile",
        lambda c: bool(argument(c, "torch_compile")) and not c.hardware.compile,
        lambda c: f"method.args.torch_compile=true on {c.hardware.name}: Inductor miscompiles or refuses {c.hardware.gfx}",
        lambda c: "method.args.torch_compile=false",
    ),
    Rule(
        "triton_kernels",
        lambda c: bool(argument(c, "use_liger_kernel")) and not c.hardware.triton,
        lambda c: f"method.args.use_liger_kernel=true on {c.hardware.name}: its file claims no Triton kernels for {c.hardware.gfx}",
        lambda c: "method.args.use_liger_kernel=false",
    ),
    Rule(
        "sequence_length",
        lambda c: c.method.uses_model and longest(c) > c.model.max_positions,
        lambda c: f"sequences of {longest(c)} tokens: {c.model.name} has {c.model.max_positions} positions",
        lambda c: f"{_length_argument(c)} of at most {c.model.max_positions}, or another model=",
    ),
    *REWARD_RULES,
    NAME,
    Rule(
        "secret",
        lambda c: bool(_secrets(c)),
        lambda c: f"{_secrets(c)[0]}: a secret in a composition ends in its records",
        lambda c: "a variable of your shell (export HF_TOKEN=...), which the processes inherit",
    ),
    Rule(
        "seed",
        lambda c: not 0 <= c.seed < 2**32,
        lambda c: f"seed={c.seed}: NumPy takes 0 to 4294967295",
        lambda c: "seed=0",
    ),
    Rule(
        "reasoning_data",
        lambda c: (
            c.data.kind in ("reasoning", "code")
            and (not c.data.tasks or c.data.num_train is None or c.data.num_train < 1 or c.data.num_heldout < 0)
        ),
        lambda c: f"data={c.data.name} with {len(c.data.tasks)} tasks, num_train={c.data.num_train}, num_heldout={c.data.num_heldout}",
        lambda c: "at least one task in data.tasks, data.num_train of at least 1, data.num_heldout of at least 0",
    ),
    # As TRL's RepeatSampler, which leaves out what fills no whole generation: with none it trains no step, and says so once all is up.
    Rule(
        "generation_data",
        lambda c: c.method.name == "grpo" and c.data.kind in ("reasoning", "code") and _problems(c) < _prompts_at_once(c),
        lambda c: (
            f"{_problems(c)} problem(s) (data.num_train, data.limit): fewer than the {_prompts_at_once(c)} of one generation, "
            f"{generation_batch(c)} completions of {value(c, 'num_generations')} to a problem"
        ),
        lambda c: f"data.num_train={_prompts_at_once(c)} or more, or a smaller method.args.per_device_train_batch_size",
    ),
    Rule(
        "evaluation_data",
        lacks_heldout,
        lambda c: f"method=evaluate with data={c.data.name}: no held-out problems",
        lambda c: "data.num_heldout= (reasoning), data.heldout_path= (jsonl), data.heldout_split= (hub) or data.heldout_fraction=",
    ),
    Rule(
        "data_path",
        lambda c: (
            c.data.kind == "jsonl"
            and not c.data.path
            and not (c.method.name == "evaluate" and c.data.heldout_path and (c.model.path or c.model.init.name == "pretrained"))
        ),
        lambda c: "data=jsonl without a file",
        lambda c: "data.path=<file.jsonl>",
    ),
    Rule(
        "data_hub",
        lambda c: c.data.kind == "hub" and not c.data.hub_id,
        lambda c: "data=hub without a data set",
        lambda c: "data.hub_id=<owner/name>",
    ),
    Rule(
        "data_of_another_kind",
        lambda c: bool(_ignored_data(c)),
        lambda c: f"data.{_ignored_data(c)[0]} under data={c.data.name}: it would be ignored",
        _of_its_kind,
    ),
    Rule(
        "mask_in_user_env",
        lambda c: any(name in c.user_env for name in masks.ALL),
        lambda c: f"user_env.{next(n for n in masks.ALL if n in c.user_env)}: every process would get the same GPUs",
        lambda c: "the variable in your shell (HIP_VISIBLE_DEVICES=2,3 python launch/run.py ...), which is shared out",
    ),
    Rule(
        "data_limit",
        lambda c: c.data.limit is not None and c.data.limit < 1,
        lambda c: f"data.limit={c.data.limit}: no rows",
        lambda c: "a limit of at least 1, or data.limit=null",
    ),
    *MODEL_RULES,
    SEARCH,
    *DATA_RULES,
    *TASK_RULES,
    *RUNTIME_RULES,
]


def _length_argument(config: Config) -> str:
    return f"method.args.{'sequence' if config.method.kind in ('bench', 'tune') else 'max_length or max_completion_length'}"


def _micro_step(config: Config) -> int:
    """Sequences of all ranks together."""
    return batch(config).per_device * batch(config).ranks


def _secrets(config: Config) -> list[str]:
    """Keys that hold a secret and have a value."""
    free = {f"user_env.{k}": v for k, v in config.user_env.items()} | {f"method.args.{k}": v for k, v in config.method.args.items()}
    return [key for key, given in free.items() if given and SECRET.search(key) and isinstance(given, str)]


def _ignored_data(config: Config) -> list[str]:
    keys = [key for names in DATA_KEYS.values() for key in names if key not in DATA_KEYS.get(config.data.kind, ())]
    return [key for key in keys if getattr(config.data, key)]


def refusals(config: Config) -> list[Rule]:
    """Every rule that refuses this composition."""
    return [rule for rule in RULES if rule.applies(config)]


def check_given(config: Config) -> None:
    """Raises UserError for a value or an argument that is wrong by itself."""
    check_values(config)
    trainer_args.check(config)


def check(config: Config) -> None:
    """Raises UserError with every refusal of the table, after the method's arguments."""
    check_given(config)
    found = refusals(config)
    if found:
        raise UserError("\n".join(rule.refusal(config) for rule in found))


def warnings(config: Config) -> list[str]:
    """What works and costs: shown in every plan."""
    found = []
    if config.data.preview and config.mode == Mode.plan:
        found.append(
            f"data.preview={config.data.preview} shows rows where mode=plan is left out; this is the plan of that command without it."
        )
    ranks = topology.trainers_of_a_node(config)
    found += [*evaluate_warnings(config), *slurm_warnings(config)]
    if config.precision.weights == "nf4" and config.hardware.name == "strix_halo":
        found.append(
            "precision=nf4 on strix_halo is twice as slow as bf16 (measured in the Strix Halo report): memory is not what it lacks."
        )
    board = 4 if config.hardware.unified_memory else 8  # MI300A stand in fours, all others in eights, each linked to every other
    fully_linked = config.hardware.link == Link.xgmi and config.hardware.gfx in ("gfx942", "gfx950")
    if fully_linked and 1 < ranks < board and config.method.kind != "evaluator":
        name = config.hardware.name
        found.append(f"collectives of {ranks} GPUs use a fraction of {name}'s xGMI links; 1 or {board} waste none (rccl#1270).")
    if any("expandable_segments:True" in value for value in config.user_env.values()) and config.hardware.gfx.startswith("gfx"):
        found.append("expandable_segments hangs on some ROCm stacks (pytorch#192259) and gives NaN in bf16 on gfx1201 (pytorch#195202).")
    if makes_fp32(config) and config.method.kind == "trainer" and config.adapter.rank is None:
        found.append(f"precision.weights={config.precision.weights} under FSDP: accelerate holds weights that train in fp32 all the same.")
    if "HSA_OVERRIDE_GFX_VERSION" in config.user_env and config.hardware.gfx != "gfx906":
        found.append(f"HSA_OVERRIDE_GFX_VERSION makes {config.hardware.gfx} run another GPU's code; it is supported natively.")
    if config.hardware.name == "strix_halo" and (config.hardware.dataloader.num_workers or config.hardware.dataloader.pin_memory):
        found.append("dataloader workers and pinned memory hang Strix Halo (its report): 0 and false are the tested values.")
    return found
