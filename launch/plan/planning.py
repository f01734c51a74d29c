"""Compute everything that will run from a composition and the host's facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.config import choose, lr_scaling, smoke
from launch.config.identity import default_name, identity, identity_of
from launch.config.request import Request
from launch.core.errors import UserError
from launch.core.json_files import plain, read_json
from launch.estimate import batch_counts, margin, memory, speed
from launch.inputs import model_path, sample_files
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.gpu import GIB
from launch.plan import (
    balance,
    container,
    data_cache,
    process_env,
    process_groups,
    rundir,
    sandbox,
    tuned,
)
from launch.plan.views import image_json
from launch.rules import check
from launch.rules.warnings import rule_warnings
from launch.schema import Config, trainer_args
from launch.schema.plan import Plan

# Keys added to the composition in the file that every rank reads.
ADDED = ("run_dir", "trainer_args", "tuned", "data_cache", "provenance")
NO_REQUEST = Request()
FILES = "files"  # key added to data, if data.path is a directory of samples


def prepare(config: Config, keys: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the composition that runs, checked and with smoke=true applied, and its warnings.

    Raises UserError.

    `keys` are those of the command line. Unlike keys of files, they may not contradict each other.
    Under smoke=true the rules look at the small composition, so that no hardware rule rejects it.
    What they would reject without smoke=true becomes a warning.
    """
    config = balance.with_servers(config)
    check.check_settings(config)
    is_tuning = trainer_args.recipe_name(config)  # a tuning itself takes no steps
    replaced = [] if is_tuning else batch_counts.apply_effective_batch(config, keys)
    if not config.smoke:
        check.check(config)
        tuned.check_recipe(config)
        return config, [*replaced, *rule_warnings(config)]
    small, left_out = smoke.scale_down(config)
    check.check(small)
    tuned.check_recipe(small)
    warnings = [f"smoke: in place of {line}." for line in left_out]
    sizes = smoke.smaller(config, small)
    if sizes:
        warnings.append(f"smoke: {', '.join(sizes)}. Overrides on the command line stay.")
    reasons = [refusal.sentence for refusal in check.refusals(config)]
    return small, [*warnings, *(f"without smoke=true this is rejected: {r}" for r in reasons)]


def with_choices(config: Config, host: Host, run_dir: Path) -> Config:
    """Return a prepared `config` with every choice made. A resumed run uses its record's.

    On other ranks than before (launch/plan/resuming.py) the batch is divided again, into the same
    sequences per step.
    """
    before = (read_json(run_dir / "record.json") or {}).get("composition")
    if before is None or rundir.untrusted(run_dir):  # rundir rejects such a record
        return choose.choose(config, host)
    choices = choose.recorded(before)
    if identity(before) == identity_of(config):
        return choose.apply(config, choices)
    lasting = [choice for choice in choices if choice.key not in choose.OF_A_BATCH]
    return choose.choose(choose.apply(config, lasting), host)


def make_plan(
    config: Config,
    host: Host,
    run_dir: Path,
    warnings: Sequence[str] = (),
    request: Request = NO_REQUEST,
) -> Plan:
    """Plan a prepared composition. Raises HostError if the user's environment contradicts it."""
    names = process_env.secret_names(config, host.environ)
    secrets = {host.environ.get(name, "") for name in names}
    key = process_env.leaked(plain(config), {secret for secret in secrets if len(secret) >= 8})
    if key:
        raise UserError(
            f"{key}: holds a secret of your shell, and run records contain the composition. The "
            "processes inherit the variable."
        )
    ports = process_groups.ports(host, run_dir)
    groups = placement.process_groups(config, host)
    processes = [process_groups.process(config, host, run_dir, group) for group in groups]
    containers = container.specs(config, processes, host, run_dir)
    smaller = memory.measured(config, groups, host)
    needed = memory.memory(config, groups, smaller)
    before = choose.without_choices(config)  # rows are prepared by this composition
    is_faster = config.chosen and config.method.trains
    args, scaling = lr_scaling.scaled(config, trainer_args.complete(config, run_dir, ports))
    return Plan(
        name=config.name or default_name(config),
        run_dir=run_dir,
        config=config,
        trainer_args=args,
        processes=[*sandbox.processes(config), *processes],
        containers={**sandbox.specs(config, host, run_dir), **containers},
        memory=needed,
        speed=speed.sampling(config) if config.method.leaves_samples else speed.speed(config),
        warnings=[
            *warnings,
            *scaling,
            *model_path.warnings(config),
            *margin.uncounted(config),
            *margin.warnings(config, needed),
            *host_warnings(config, host, smaller),
        ],
        tuned=tuned.for_ranks(config, host, run_dir, ports),
        data_cache=data_cache.for_ranks(before, host),
        data=data_cache.known(before, host),
        plain_speed=speed.speed(before) if is_faster else None,
        balance=balance.balance(config, host),
        overrides=request,
    )


def host_warnings(config: Config, host: Host, smaller: dict[int, float]) -> Iterator[str]:
    """Yield what a plan warns of: smaller GPUs, an unverified image, secrets without a value."""
    if smaller:
        gpu, gib = min(smaller.items(), key=lambda item: item[1])[0], min(smaller.values()) / GIB
        doctor = "; python launch/doctor.py says how to raise it"
        yield (
            f"GPU {gpu} has {gib:.0f} GiB, hardware.memory_gb={config.hardware.memory_gb:g}: "
            f"memory is planned with {gib:.0f} GiB{doctor * config.hardware.unified_memory}."
        )
    image = image_json(config)
    if image and not image["verified"]:
        name = image.get("base", image["reference"])
        yield f"unverified image: {name} is named by a tag, not by a digest, and may change."
    # the usual ones of conf/runtime/docker.yaml
    usual = {"HF_TOKEN", "WANDB_API_KEY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    for name in config.runtime.secrets:
        if name.upper() not in usual and not host.environ.get(name):
            yield f"runtime.secrets: {name} is not set in your shell, so no process gets it."


def rank_config(plan: Plan) -> dict[str, Any]:
    """Return the file that every rank reads: the composition and its complete arguments.

    For a tuning it also has the recipe, and the content with which its experiment file begins.
    """
    own = {"run_dir": str(plan.run_dir), "trainer_args": plan.trainer_args}
    content = {**plain(plan.config), **own}
    data = plan.config.data
    if data.kind == "samples" and data.path and Path(data.path).is_dir():
        content["data"][FILES] = sample_files.files(data.path)
    if plan.data_cache is not None:
        content["data_cache"] = plan.data_cache
    if plan.tuned is not None:
        experiment = tuned.experiment(plan.config, plan.overrides)
        content["tuned"] = {**plain(plan.tuned), "experiment": experiment}
    return content
