"""Reject keys that nothing reads, so that no value is silently ignored.

One row: keys, when they are read, and what makes them read. A key with the schema's default passes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from launch.config.compose import leaf
from launch.machine.placement import needs_sandbox
from launch.rules.bench import SETTINGS, makes_rows
from launch.rules.data import has_max_steps
from launch.rules.rule import Rule, Text, filled
from launch.rules.runtime import runtime_as
from launch.rules.selection import first_metric
from launch.rules.topology import has_split, has_vllm, is_split, several
from launch.schema import Config
from launch.schema.data import Curriculum
from launch.schema.enums import Format, Init, Mode, Profile, Use, Vendor
from launch.schema.trainer_args import argument, known

DEFAULTS = Config()


@dataclass(frozen=True)
class Unread:
    keys: tuple[str, ...]
    is_read: Callable[[Config], bool]
    # overrides that make something read them; "": nothing does under this method
    needs: Text = ""
    usual: Callable[[Config], Any] | None = None  # value that passes, if not the schema's default
    note: str = ""  # what the user may want in its place

    def rule(self) -> Rule:
        return Rule(
            "unread",
            lambda config: not self.is_read(config) and any(self._given(config)),
            self._message,
            self._remedy,
        )

    def _given(self, config: Config) -> Iterator[str]:
        """Yield each key, or key below it, whose value differs from its default."""
        for key in self.keys:
            usual, value = self._usual(config, key), leaf(config, key)
            if not dataclasses.is_dataclass(value):
                is_absent = value is None and key.startswith("method.args.")
                yield from [key] if value != usual and not is_absent else []
                continue
            for field in dataclasses.fields(value):
                if getattr(value, field.name) != getattr(usual, field.name):
                    yield f"{key}.{field.name}"

    def _usual(self, config: Config, key: str) -> Any:
        """Return the value that passes; TRL's arguments have none, so any of theirs counts."""
        if self.usual:
            return self.usual(config)
        if not key.startswith("method.args."):
            return leaf(DEFAULTS, key)
        is_ours = config.method.config_class.startswith("recipes.")
        entry = known(config).get(key.rpartition(".")[2], {}) if is_ours else {}
        return entry.get("default")

    def _message(self, config: Config) -> str:
        given = [_shown(config, key) for key in self._given(config)]
        without = filled(self.needs, config)
        reason = f"without {without}" if without else f"with method={config.method.name}"
        return f"{', '.join(given)} {'takes' if len(given) == 1 else 'take'} no effect {reason}"

    def _remedy(self, config: Config) -> str:
        needs, keys = filled(self.needs, config), [*self._given(config)]
        usual = " ".join(self._reset(config, key) for key in keys)
        remedy = f"{needs}, or {usual}" if needs else usual
        return f"{remedy}; {self.note}" if self.note else remedy

    def _reset(self, config: Config, key: str) -> str:
        """Return the override that undoes a key, also one that a file sets."""
        if key.startswith("method.args."):
            return f"'~{key}'"
        usual = self._usual(config, key)
        if isinstance(usual, dict):
            return " ".join(f"'~{key}.{name}'" for name in cast(dict[str, Any], leaf(config, key)))
        if isinstance(usual, Enum):
            usual = usual.name
        value = usual if isinstance(usual, str) else json.dumps(usual)
        return f"{key.removesuffix('.name')}={value}"


def _shown(config: Config, key: str) -> str:
    """Return a key as in a message; a group's name, as in data.name, with its value."""
    return f"{key.removesuffix('.name')}={leaf(config, key)}" if key.endswith(".name") else key


def _topologies(*names: str) -> Callable[[Config], str]:
    """Return the override for those of the topologies that the method has here, "" if none is."""

    def needs(config: Config) -> str:
        taken = [*several(config), *(["colocate"] if has_split(config) else [])]
        possible = [name for name in names if name in taken]
        return f"topology={' or '.join(possible)}" if possible else ""

    return needs


def _vllm(*names: str) -> Callable[[Config], str]:
    """Return the overrides that start a vLLM: one of the topologies, or the method's engine."""

    def needs(config: Config) -> str:
        engine = "method.args.engine=vllm"
        has_engine = "engine" in known(config) and config.hardware.vllm
        return _topologies(*names)(config) or (engine if has_engine else "")

    return needs


def _reads_precision(config: Config) -> bool:
    copies = config.method.exports and config.adapter.name == "none"
    return config.smoke or (config.method.reads("precision") and not copies)


def _is_kind(kinds: tuple[str, ...]) -> Callable[[Config], bool]:
    return lambda config: config.data.kind in kinds


def _keys(group: str, names: str) -> tuple[str, ...]:
    return tuple(f"{group}.{name}" for name in names.split())


# arguments of evaluations within a training
OF_EVALUATIONS = (
    *("per_device_eval_batch_size", "eval_packing", "eval_accumulation_steps"),
    "num_generations_eval",
)
GENERATED = ("reasoning", "code")
FIND = Unread(("find",), lambda c: c.mode == Mode.plan, "mode=plan").rule()
UNREAD = [
    Unread(("save_model",), lambda c: c.method.trains and not c.phases),
    # groups
    Unread(
        ("model.name",),
        lambda c: c.method.reads("model"),
        usual=lambda c: "tiny",
    ),
    Unread(
        ("data.name",),
        lambda c: c.method.reads("data") and not makes_rows(c),
        lambda c: "method.args.rows=data" if c.method.tunes else "",
        usual=lambda c: "reasoning",
    ),
    Unread(
        ("precision.name",),
        _reads_precision,  # an export has method.args.weights
        usual=lambda c: next(iter(c.hardware.precisions), "fp32"),
    ),
    Unread(
        ("container.name",),
        lambda c: c.runtime.on_node != "local",
        lambda c: runtime_as(c, "docker"),
        usual=lambda c: "none",
    ),
    # model, adapter and precision
    Unread(
        ("model.path",),
        lambda c: c.model.init == Init.pretrained or c.model.hub_id is None,
        "model.init=pretrained",
    ),
    Unread(
        _keys("adapter", "alpha dropout target_modules rslora dora path"),
        lambda c: c.adapter.name != "none",
        "adapter=lora",
    ),
    Unread(
        ("adapter.name",),
        lambda c: c.method.trains or c.method.takes_adapter,
        usual=lambda c: "none",
        note="a training merges its adapter into model.path=<its run>/model",
    ),
    # torch.amp always scales the loss of fp16, and of nothing else
    Unread(
        ("precision.loss_scaling",),
        lambda c: False,
        usual=lambda c: c.precision.compute == "fp16",
    ),
    Unread(
        ("adapter.path",),  # every cycle trains and merges its own adapter
        lambda c: not c.method.has_cycles or c.adapter.name == "none",
    ),
    Unread(
        ("step.checkpointed_layers",),
        lambda c: not c.method.trains or bool(argument(c, "gradient_checkpointing")),
        "method.args.gradient_checkpointing=true",
    ),
    # data
    *(
        Unread(_keys("data", keys), _is_kind(kinds), needs)
        for keys, kinds, needs in (
            ("path", ("jsonl", "samples"), "data=jsonl"),
            ("heldout_path", ("jsonl",), "data=jsonl"),
            ("hub_id heldout_split", ("hub",), "data=hub"),
            ("tasks num_train num_heldout", GENERATED, "data=reasoning"),
            ("pairs_per_prompt pairs_of_any", ("samples",), "data=samples"),
            ("sources", ("mix",), "data=mix"),
        )
    ),
    Unread(
        _keys("data", "streaming filter.min_tokens filter.max_tokens filter.max_prompt_tokens"),
        lambda c: not (c.method.leaves_samples or c.method.has_cycles),
        "a method that trains on rows",
    ),
    Unread(
        ("data.preview",),
        lambda c: c.method.prepares_rows,
        "a method that prepares rows: sft, dpo, grpo",
    ),
    Unread(
        ("data.preview",),  # rows are printed for a person
        lambda c: c.mode != Mode.run or c.format != Format.json,
        "format=text",
    ),
    Unread(("data.shuffle_buffer",), lambda c: c.data.streaming, "data.streaming=true"),
    Unread(
        ("data.curriculum",),
        lambda c: c.method.curriculum or not c.method.trains,
        "a method that orders rows: sft, grpo, sample, raft",
    ),
    Unread(
        ("data.curriculum_args.earlier",),
        lambda c: c.data.curriculum == Curriculum.mixed,
        "data.curriculum=mixed",
    ),
    Unread(
        ("data.pass_rates", "data.curriculum_args.floor"),
        lambda c: c.data.curriculum == Curriculum.adaptive,
        "data.curriculum=adaptive",
    ),
    Unread(
        ("data.curriculum_args.memory",),  # only grpo sees pass rates change during training
        lambda c: c.data.curriculum == Curriculum.adaptive and c.method.generates,
        "data.curriculum=adaptive method=grpo",
    ),
    # method
    Unread(("method.lr_scaling",), lambda c: c.method.trains),
    Unread(
        ("method.args.num_train_epochs",),
        lambda c: not has_max_steps(c),
        "method.args.max_steps=-1",
    ),
    Unread(
        _keys("method.args", "lm_eval_include lm_eval_limit"),
        lambda c: c.smoke or bool(argument(c, "lm_eval_tasks")),
        "method.args.lm_eval_tasks=[<name>]",
    ),
    Unread(
        ("method.args.push_private",),
        lambda c: not c.method.exports or bool(argument(c, "push_to")),
        "method.args.push_to=<owner/name>",
    ),
    Unread(
        ("method.args.settings",),
        lambda c: c.method.name not in SETTINGS,
        usual=lambda c: SETTINGS[c.method.name] if "settings" in c.method.args else None,
    ),
    Unread(
        _keys("method.selection", "metric patience min_delta"),
        lambda c: bool(c.method.held_out_metrics),
    ),
    Unread(
        _keys("method.selection", "patience min_delta"),
        lambda c: not c.method.held_out_metrics or c.method.selection.metric is not None,
        first_metric,
    ),
    Unread(
        ("method.selection.min_delta",),
        lambda c: c.method.selection.metric is None or c.method.selection.patience is not None,
        "method.selection.patience=3",
    ),
    Unread(
        tuple(f"method.args.{name}" for name in OF_EVALUATIONS),
        lambda c: c.method.selection.metric is not None or c.smoke or not c.method.trains,
        first_metric,
    ),
    # rewards
    Unread(("method.rewards",), lambda c: c.method.uses_rewards is not Use.none, "method=grpo"),
    Unread(
        ("method.reward_pattern",),
        lambda c: "regex" in c.method.rewards,
        "+method.rewards.regex=1.0",
    ),
    Unread(
        ("method.reward_confined",),
        lambda c: any("." in name for name in c.method.rewards),
        "'+method.rewards={package.module.function: 1.0}'",
    ),
    Unread(("method.sandbox",), needs_sandbox, "+method.rewards.code_tests=1.0"),
    # topology
    Unread(
        _keys("topology", "servers server_tensor_parallel overlap max_staleness server_max_length"),
        is_split,
        _topologies("split"),
    ),
    Unread(
        _keys("topology", "server_cache_gb server_memory_share"),
        lambda c: is_split(c) or has_vllm(c),
        _vllm("split"),
    ),
    Unread(
        ("topology.server_args",),
        lambda c: c.topology.name in ("split", "colocate") or has_vllm(c),
        _vllm("split", "colocate"),
    ),
    Unread(
        ("topology.max_staleness",),
        lambda c: not is_split(c) or c.topology.overlap == "stream",
        "topology.overlap=stream",
    ),
    Unread(
        _keys(
            "method.args",
            "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
            "vllm_enable_sleep_mode vllm_model_impl",
        ),
        lambda c: c.topology.name == "colocate",  # a split has topology.server_*
        _topologies("colocate"),
    ),
    Unread(
        ("topology.numa_binding", "debug"),
        lambda c: c.hardware.vendor != Vendor.none,
        "a GPU",
    ),
    # ZeRO-2 keeps all parameters on every GPU
    Unread(
        ("topology.zero.offload_parameters",),
        lambda c: c.topology.strategy == "zero3",
        _topologies("zero3"),
    ),
    Unread(
        ("topology.zero.offload_optimizer",),
        lambda c: c.topology.strategy in ("zero2", "zero3"),
        _topologies("zero2", "zero3"),
    ),
    Unread(("topology.fsdp",), lambda c: c.topology.strategy == "fsdp", _topologies("fsdp")),
    # runtime
    Unread(
        _keys("runtime", "network shm_gb memory_gb infiniband secrets"),
        lambda c: c.runtime.on_node != "local",
        lambda c: runtime_as(c, "docker"),
    ),
    Unread(("runtime.slurm",), lambda c: c.runtime.name == "slurm", "runtime=slurm"),
    Unread(
        _keys("runtime.slurm", "interface hca gid_index"),
        lambda c: c.runtime.name != "slurm" or c.runtime.slurm.nodes > 1,
        "runtime.slurm.nodes=2 or more",
    ),
    Unread(
        ("runtime.slurm.gid_index",),  # each adapter has its own table
        lambda c: c.runtime.name != "slurm" or c.runtime.slurm.hca is not None,
        "runtime.slurm.hca=<adapter>:<port>",
    ),
    Unread(("rocprof",), lambda c: c.profile == Profile.rocprof, "profile=rocprof"),
]
UNREAD_RULES = [FIND, *(row.rule() for row in UNREAD)]
