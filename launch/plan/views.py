"""Convert plans to the objects of mode=plan format=json."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from containers import images
from launch.config.identity import composition_hash
from launch.core.json_files import plain
from launch.plan import container
from launch.schema import Config
from launch.schema.plan import Plan

SCHEMA = 1


def image_json(config: Config) -> dict[str, Any] | None:
    """Return the image that the run starts and its base; None if the run uses no container."""
    if config.runtime.on_node == "local":
        return None
    reference = container.image_reference(config)
    if config.container.name == "custom":
        return {"name": "custom", "reference": reference, "verified": "@" in reference}
    image = images.load()[config.container.name]
    versions = {key: getattr(image, key) for key in images.VERSIONS}
    return {
        "name": image.name,
        "reference": reference,
        "base": image.base_reference,
        "verified": image.verified,
        "pushed": image.pushed,
        "gfx": list(image.gfx),
        **versions,
    }


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan of one run as the JSON object of mode=plan format=json."""
    processes = []
    for process in plan.processes:
        spec = plan.containers.get(process.name)
        content = {key: getattr(process, key) for key in ("name", "kind", "argv", "gpus")}
        content["env"] = spec.environment if spec else process.env
        reasons = {s.name: f"{s.reason} ({s.origin})" for s in process.settings}
        container_json = spec and container.as_json(spec)
        processes.append({**content, "env_reasons": reasons, "container": container_json})
    groups = ("hardware", "model", "method", "precision", "adapter", "runtime", "topology")
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "run_dir": str(plan.run_dir),
        **{group: getattr(plan.config, group).name for group in groups},
        "image": image_json(plan.config),
        "processes": processes,
        "memory": [{**plain(m), "total_gb": m.total_gb, "fits": m.fits} for m in plan.memory],
        "speed": {
            **plain(plan.speed),
            "plain_tokens_per_second": plan.plain_speed and plan.plain_speed.tokens_per_second,
        },
        "balance": plain(plan.balance),
        "chosen": plain([*plan.config.chosen, *plan.config.followed]),
        "faster": plain(plan.faster),
        "cheaper": plain(plan.cheaper),
        "data": plan.data,
        "trainer_args": plan.trainer_args,
        "targets": plain(plan.targets),
        "warnings": plan.warnings,
        "composition_hash": composition_hash(plan.config),
    }


def shared_warnings(phases: dict[str, Plan]) -> list[str]:
    """Return each warning of a pipeline once, prefixed by the names of its phases."""
    names: dict[str, list[str]] = {}
    for phase, plan in phases.items():
        for warning in dict.fromkeys(plan.warnings):
            names.setdefault(warning, []).append(phase)
    return [f"{', '.join(phases_)}: {warning}" for warning, phases_ in names.items()]


def reused_phases(run_dir: Path, plans: dict[str, Plan]) -> dict[str, Path]:
    """Return the run directory of each phase that is reused from another run.

    launch/study/phase_reuse.py chooses these phases.
    """
    return {name: plan.run_dir for name, plan in plans.items() if plan.run_dir.parent != run_dir}


def pipeline_json(name: str, run_dir: Path, phases: dict[str, Plan]) -> dict[str, Any]:
    """Return a pipeline as the JSON object of mode=plan format=json.

    It has the keys of a run's object, `phases` with the object of each phase, and `kept` with the
    directories of reused phases.
    """
    plans = {phase: as_json(plan) for phase, plan in phases.items()}
    reused_dirs = {phase: str(folder) for phase, folder in reused_phases(run_dir, phases).items()}
    started = {n: p for n, p in plans.items() if n not in reused_dirs and not phases[n].is_left_out}
    first = next(iter(plans.values()))
    return {
        **{key: first[key] for key in ("schema", "hardware", "image", "runtime")},
        "name": name,
        "run_dir": str(run_dir),
        "topology": sorted({p["topology"] for p in plans.values()}),
        **{
            key: [{**entry, "phase": n} for n, plan in started.items() for entry in plan[key]]
            for key in ("processes", "memory")
        },
        "speed": {"tokens_per_second": None, "step_s": None, "basis": "see each phase"},
        "warnings": shared_warnings(phases),
        "kept": reused_dirs,
        "phases": plans,
    }


def at_steps(targets: Iterable[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of targets such as loss@5 from the lines of metrics.jsonl."""
    values = {}
    for name in targets:
        key, at, step = name.rpartition("@")
        row = next((row for row in rows if str(row.get("step")) == step and key in row), None)
        if at and row is not None:
            values[name] = row[key]
    return values
