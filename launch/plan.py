"""Everything that will run, computed from a composition and the host's facts by pure functions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from containers import images
from launch import batch, check, environment, lr_scaling, smoke, topology, trainer_args, tuned
from launch.errors import UserError
from launch.files import data_cache, model_path, samples
from launch.files.tracking import package_of
from launch.machine.detect import Host
from launch.machine.gpu import GIB
from launch.pipelines.cycle_choice import OfCycle
from launch.planner import balance, choose, margin, memory, sampling, speed
from launch.planner.balance import Balance
from launch.planner.faster import Offer
from launch.planner.memory import Memory
from launch.planner.speed import Speed
from launch.planner.uncounted import uncounted
from launch.rules.warnings import rule_warnings
from launch.runtimes import container, sandbox
from launch.runtimes.container import ContainerSpec
from launch.schema import Config, Target
from launch.topology import Process

SCHEMA = 1
# Keys that do not change what is computed: two compositions that differ in them only are the same run.
NOT_IDENTITY = (
    *("mode", "find", "price_per_gpu_hour", "format", "verbose", "resume", "run_root", "name", "sweep", "preflight"),
    "speed_keeps",
)
BY_PART = ("progressive", "mixed")  # curricula, of data.curriculum, by which each cycle of a RAFT is a part of the run
ADDED = ("run_dir", "trainer_args", "tuned", "data_cache", "provenance")  # to the composition, in the file that every rank reads
FILES = "files"  # likewise added to data, where data.path is a directory of samples


@dataclass(frozen=True)
class Plan:
    """One run. `config` is the composition as its processes read it, smoke=true applied."""

    name: str
    run_dir: Path
    config: Config
    trainer_args: dict[str, Any]
    processes: list[Process]
    containers: dict[str, ContainerSpec]  # by process; under runtime=local the sandbox's only
    memory: list[Memory]
    speed: Speed
    warnings: list[str]
    tuned: dict[str, Any] | None = None  # of a tuning: the recipe that it runs
    data_cache: dict[str, str] | None = None  # of a training: where its rows are kept when they are prepared
    data: dict[str, Any] | None = None  # figures of the rows, where they are prepared
    chosen: OfCycle | None = None  # of a phase of a RAFT that chooses its cycle
    plain_speed: Speed | None = None  # of the same training with nothing chosen
    balance: Balance | None = None  # of GRPO under topology=split
    faster: list[Offer] = dataclasses.field(default_factory=list)  # what changes results; found for mode=plan only

    @property
    def is_left_out(self) -> bool:
        """Of a cycle of RAFT that does not begin, since those before it no longer improved."""
        return self.chosen is not None and self.chosen.is_left_out

    @property
    def targets(self) -> dict[str, Target]:
        return self.config.targets


def prepare(config: Config, given: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The composition that runs, checked and with smoke=true applied, and its warnings. `given`: keys of the command line, which may not
    contradict one another as those of files may. Raises UserError.

    Under smoke=true the rules look at the small composition, so that no hardware rule refuses it; what they would refuse
    without it is a warning.
    """
    config = balance.with_servers(config)
    check.check_given(config)
    replaced = [] if trainer_args.recipe_name(config) else batch.apply_effective_batch(config, given)  # a tuning's recipe takes the steps
    if not config.smoke:
        check.check(config)
        tuned.check_recipe(config)
        return config, [*replaced, *rule_warnings(config)]
    small, left_out = smoke.scale_down(config)
    check.check(small)
    tuned.check_recipe(small)
    refused = [f"without smoke=true this is refused: {rule.said(config)}" for rule in check.refusals(config)]
    said = [f"smoke: in place of {line}." for line in left_out]
    sizes = smoke.smaller(config, small)
    if sizes:
        said.append(f"smoke: {', '.join(sizes)}. What the command line gives stays.")
    return small, [*said, *refused]


def make_plan(config: Config, host: Host, run_dir: Path, warnings: Sequence[str] = ()) -> Plan:
    """The plan of a prepared composition. Raises HostError where the user's own environment contradicts it."""
    names = environment.secret_names(config, host.environ)
    key = environment.leaked(plain(config), {value for name in names if len(value := host.environ.get(name, "")) >= 8})
    if key:
        raise UserError(f"{key}: holds a secret of your shell, and a composition ends in records. The processes inherit the variable.")
    processes = topology.processes(config, host, run_dir)
    containers = container.specs(config, processes, host, run_dir)
    smaller, ports = memory.measured(config, processes, host), topology.ports(host, run_dir)
    needed = memory.memory(config, processes, smaller)
    before = choose.without_choices(config)
    args, scaling = lr_scaling.scaled(config, trainer_args.complete(config, run_dir, ports))
    return Plan(
        name=config.name or default_name(config),
        run_dir=run_dir,
        config=config,
        trainer_args=args,
        processes=[*sandbox.processes(config), *processes],
        containers={**sandbox.specs(config, host, run_dir), **containers},
        memory=needed,
        speed=sampling.speed(config) if config.method.name == "sample" else speed.speed(config),
        warnings=[
            *warnings,
            *scaling,
            *model_path.warnings(config),
            *uncounted(config),
            *margin.warnings(config, needed),
            *smaller_warnings(config, smaller),
            *image_warnings(config),
            *secret_warnings(config, host),
        ],
        tuned=tuned.for_ranks(config, host, run_dir, ports),
        data_cache=data_cache.for_ranks(before, host),  # which rows there are follows from what was composed
        data=data_cache.known(before, host),
        plain_speed=speed.speed(before) if config.chosen and config.method.kind == "trainer" else None,
        balance=balance.balance(config, host),
    )


def smaller_warnings(config: Config, smaller: dict[int, float]) -> list[str]:
    if not smaller:
        return []
    had, nominal = min(smaller.values()) / GIB, config.hardware.memory_gb
    remedy = "; python launch/doctor.py says how to raise it" if config.hardware.unified_memory else ""
    which = min(smaller, key=lambda i: smaller[i])
    return [f"GPU {which} has {had:.0f} GiB, hardware.memory_gb={nominal:g}: memory is planned with {had:.0f} GiB{remedy}."]


def default_name(config: Config) -> str:
    model = [config.model.name] if config.method.uses_model else []
    parts = [config.method.name.replace("/", "-"), *model, config.hardware.name, *(["smoke"] if config.smoke else [])]
    return "-".join(parts)


def plain(node: Any) -> Any:
    """Dataclasses and enums as what JSON and YAML hold."""
    if isinstance(node, Enum):
        return node.name
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {f.name: plain(getattr(node, f.name)) for f in dataclasses.fields(node)}
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(item) for item in node]
    return str(node) if isinstance(node, Path) else node


def has_phases(config: Config) -> bool:
    """Whether it is a pipeline of runs: launch/pipeline.py."""
    return bool(config.phases) or config.method.kind == "cycles"


def composition(config: Config) -> dict[str, Any]:
    """What a record keeps: all that a run can be made again from."""
    return {key: value for key, value in plain(config).items() if key not in NOT_IDENTITY}


def identity(composition: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same run. Of the runtime its name and how many nodes: a time limit or a number of restarts is none of it.

    A tracker's package is the same whether it was named or follows from the tracker: records of earlier versions name it. How many cycles
    a RAFT has is no part of a sampling of one of them, but where a curriculum divides the run among them."""
    runtime, tracking = composition.get("runtime", {}), composition.get("tracking", {})
    where = {"name": runtime.get("name"), "nodes": runtime.get("slurm", {}).get("nodes")}
    package = tracking.get("package") or package_of(tracking.get("name", "none"))
    found = {**_before_choices(composition), "runtime": where, "tracking": {**tracking, "package": package}}
    method = found.get("method", {})
    if method.get("name") == "sample" and composition.get("data", {}).get("curriculum") not in BY_PART:
        found["method"] = {**method, "args": {name: given for name, given in method.get("args", {}).items() if name != "num_cycles"}}
    return found


def _before_choices(composition: dict[str, Any]) -> dict[str, Any]:
    """With what speed=auto chose undone, so that a planner that chooses otherwise still finds the runs of an earlier one."""
    found = {key: value for key, value in composition.items() if key != "chosen"}
    for choice in reversed(composition.get("chosen") or []):
        found = _undone(found, choice["key"].split("."), choice["before"])
    return found


def _undone(node: dict[str, Any], path: list[str], before: Any) -> dict[str, Any]:
    """A copy with the value of before; what was no argument of a method goes."""
    name, *rest = path
    if rest:
        return {**node, name: _undone(node[name], rest, before)}
    if before is None and name not in ("compile", "rows", "checkpointed_layers"):
        return {key: value for key, value in node.items() if key != name}
    return {**node, name: before}


def identity_of(config: Config) -> dict[str, Any]:
    """As a record's would be."""
    found: dict[str, Any] = json.loads(json.dumps(identity(composition(config))))
    return found


def composition_hash(config: Config) -> str:
    return hashlib.sha256(json.dumps(identity_of(config), sort_keys=True).encode()).hexdigest()


def image_json(config: Config) -> dict[str, Any] | None:
    """The image of runtime=docker: what is started, and what it was built on."""
    if config.runtime.on_node != "docker":
        return None
    reference = container.image_reference(config)
    if config.container.name == "custom":
        return {"name": "custom", "reference": reference, "verified": "@" in reference}
    image = images.load()[config.container.name]
    versions = {key: getattr(image, key) for key in images.VERSIONS}
    built = {"base": image.base_reference, "verified": image.verified, "pushed": image.pushed, "gfx": list(image.gfx)}
    return {"name": image.name, "reference": reference, **built, **versions}


def image_warnings(config: Config) -> list[str]:
    found = image_json(config)
    if found is None or found["verified"]:
        return []
    what = found.get("base", found["reference"])
    return [f"unverified image: {what} is named by a tag, not by a digest, and may be another one tomorrow."]


def secret_warnings(config: Config, host: Host) -> list[str]:
    """Names that were asked for and have no value. Those of conf/runtime/docker.yaml are there for whoever has one."""
    usual = {"HF_TOKEN", "WANDB_API_KEY", *(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "NO"))}
    absent = [name for name in config.runtime.secrets if name.upper() not in usual and not host.environ.get(name)]
    return [f"runtime.secrets: {name} is not set in your shell, so no process gets it." for name in absent]


def rank_config(plan: Plan, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The file every rank reads: the composition, its run directory, the complete arguments of its configuration class.

    Of a tuning also the recipe, and what its experiment file begins with; `overrides` are the command's."""
    content = {**plain(plan.config), "run_dir": str(plan.run_dir), "trainer_args": plan.trainer_args}
    data = plan.config.data
    if data.kind == "samples" and data.path and Path(data.path).is_dir():
        content["data"][FILES] = samples.files(data.path)
    if plan.data_cache is not None:
        content["data_cache"] = plan.data_cache
    if plan.tuned is not None:
        content["tuned"] = {**plain(plan.tuned), "experiment": tuned.experiment(plan.config, overrides)}
    return content


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as the one JSON object of mode=plan format=json."""
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "run_dir": str(plan.run_dir),
        "hardware": plan.config.hardware.name,
        "model": plan.config.model.name,
        "method": plan.config.method.name,
        "precision": plan.config.precision.name,
        "adapter": plan.config.adapter.name,
        "image": image_json(plan.config),
        "runtime": plan.config.runtime.name,
        "topology": plan.config.topology.name,
        "processes": [_process_json(p, plan.containers.get(p.name)) for p in plan.processes],
        "memory": [{**plain(m), "total_gb": m.total_gb, "fits": m.fits} for m in plan.memory],
        "speed": {**plain(plan.speed), "plain_tokens_per_second": plan.plain_speed and plan.plain_speed.tokens_per_second},
        "balance": plain(plan.balance),
        "chosen": plain(plan.config.chosen),
        "faster": plain(plan.faster),
        "data": plan.data,
        "trainer_args": plan.trainer_args,
        "targets": plain(plan.targets),
        "warnings": plan.warnings,
        "composition_hash": composition_hash(plan.config),
    }


def _process_json(process: Process, spec: ContainerSpec | None) -> dict[str, Any]:
    return {
        "name": process.name,
        "kind": process.kind,
        "argv": process.argv,
        "env": spec.environment if spec else process.env,
        "env_reasons": {s.name: f"{s.reason} ({s.origin})" for s in process.settings},
        "gpus": process.gpus,
        "container": spec and container.as_json(spec),
    }


def shared_warnings(phases: dict[str, Plan]) -> list[str]:
    """Each warning of a pipeline once, after the phases that it is of."""
    found: dict[str, list[str]] = {}
    for phase, plan in phases.items():
        for warning in dict.fromkeys(plan.warnings):
            found.setdefault(warning, []).append(phase)
    return [f"{', '.join(names)}: {warning}" for warning, names in found.items()]


def outside(run_dir: Path, plans: dict[str, Plan]) -> dict[str, Path]:
    """The phases of a pipeline that lie in another run (launch/pipelines/keeping.py): phase -> its directory."""
    return {name: plan.run_dir for name, plan in plans.items() if plan.run_dir.parent != run_dir}


def pipeline_json(name: str, run_dir: Path, phases: dict[str, Plan]) -> dict[str, Any]:
    """A pipeline as one object of the same shape: its phases' plans, and their processes and warnings together.

    `kept` are those `outside`; their processes do not run."""
    plans = {phase: as_json(plan) for phase, plan in phases.items()}
    kept = {phase: str(folder) for phase, folder in outside(run_dir, phases).items()}
    run = {phase: plan for phase, plan in plans.items() if phase not in kept and not phases[phase].is_left_out}
    first = next(iter(plans.values()))
    shared = {key: first[key] for key in ("schema", "hardware", "image", "runtime")}
    return {
        **shared,
        "name": name,
        "run_dir": str(run_dir),
        "topology": sorted({p["topology"] for p in plans.values()}),
        "processes": [{**process, "phase": phase} for phase, p in run.items() for process in p["processes"]],
        "memory": [{**entry, "phase": phase} for phase, p in run.items() for entry in p["memory"]],
        "speed": {"tokens_per_second": None, "step_s": None, "basis": "see each phase"},
        "warnings": shared_warnings(phases),
        "kept": kept,
        "phases": plans,
    }
