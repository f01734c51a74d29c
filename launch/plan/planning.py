"""Compute the plan of a run from its composition and the host's facts."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.config import choose, follow_files, lr_scaling, smoke
from launch.config.identity import default_name, identity, identity_of
from launch.config.request import Request
from launch.core.errors import UserError
from launch.core.json_files import plain, read_json
from launch.estimate import batch_counts, margin, memory, speed
from launch.estimate.rank_state import num_checkpoints, run_bytes
from launch.inputs import model_config, sample_files
from launch.machine import placement
from launch.machine.detect import Host
from launch.machine.gpu import GIB
from launch.plan import (
    balance,
    check_rows,
    container,
    data_cache,
    export_files,
    inherited,
    local_copies,
    local_python,
    predictions,
    process_env,
    process_groups,
    rundir,
    sandbox,
    tools,
    tuned,
)
from launch.plan.views import image_json
from launch.rules import check
from launch.rules.warnings import rule_warnings
from launch.schema import Choice, Config, Model, trainer_args
from launch.schema.data import Data, Source
from launch.schema.enums import SpeedMode, Vendor
from launch.schema.plan import ContainerSpec, Memory, Plan, Process

# The keys of config.yaml, which every rank reads, that the composition does not have.
EXTRA_KEYS = ("run_dir", "trainer_args", "tuned", "data_cache", "provenance")
EMPTY_REQUEST = Request()
FILES = "files"  # key added to data if data.path is a directory of samples


def prepare(config: Config, keys: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Apply smoke=true, check the composition, and return it with its warnings.

    `keys` are the keys set on the command line, which may not contradict each other. Under
    smoke=true the rules check the scaled-down composition, and its topology as composed. Other
    settings that they would reject without smoke=true become warnings. Raises UserError.
    """
    config = balance.with_servers(config)
    check.check_settings(config)
    is_tuning = trainer_args.recipe_name(config)  # a tuning run trains only through its recipe
    batch_warnings = [] if is_tuning else batch_counts.apply_effective_batch(config, keys)
    if not config.smoke:
        check.check(config)
        tuned.check_recipe(config)
        return config, [*batch_warnings, *rule_warnings(config)]
    small, replacements = smoke.scale_down(config)
    check.check(small)
    real, remaining = map(check.refusals, (config, smoke.with_topology(config, small)))
    if problems := [refusal for refusal in real if refusal in remaining]:
        raise UserError("\n".join(map(str, problems)))
    tuned.check_recipe(small)
    warnings = [f"smoke=true replaces {line}." for line in replacements]
    sizes = smoke.changed_sizes(config, small)
    if sizes:
        larger = ", unless a benchmark's are larger" * (small.method.kind == "bench")
        warnings.append(
            f"smoke=true: {', '.join(sizes)}. Overrides of the command line stay{larger}."
        )
    reasons = [refusal.sentence for refusal in real]
    return small, [*warnings, *(f"without smoke=true this is rejected: {r}" for r in reasons)]


def with_choices(config: Config, host: Host, run_dir: Path) -> Config:
    """Return a prepared `config` with every automatic choice made.

    A resumed run reuses the choices of its record. If it resumes on different ranks
    (launch/plan/resuming.py), the choices about the batch are made again. The number of sequences
    per step stays the same.
    """
    recorded = (read_json(run_dir / "record.json") or {}).get("composition")
    if recorded is None or rundir.record_problem(run_dir):  # rundir rejects such a record
        return choose.choose(config, host)
    choices = choose.recorded_choices(recorded)
    if identity(recorded) == identity_of(config):
        return choose.apply(config, choices)
    reusable = [choice for choice in choices if choice.key not in choose.BATCH_KEYS]
    return choose.choose(choose.apply(config, reusable), host)


def with_commits(plan: Plan, host: Host) -> Plan:
    """Return the plan of a run that starts, with the commit of each Hub repository that it reads.

    If no revision is set, it is the commit in the cache, or else the newest. It is recorded as a
    choice, so a resumed run keeps it. Raises UserError if neither is available.
    """
    config, is_offline = plan.config, follow_files.is_offline(plan.config.user_env)
    repositories: dict[str, Model | Data | Source] = {}
    if predictions.download_gb(config):
        repositories["model"] = config.model
    if config.method.reads("data"):
        repositories["data"] = config.data
        repositories |= {f"data.sources.{n}": each for n, each in enumerate(config.data.sources)}
    for key, each in repositories.items():
        is_directory = key != "model" and Path(each.hub_id or "").is_absolute()
        if each.revision or not each.hub_id or is_directory:
            continue
        if key == "model":
            file = model_config.hub_file(each.hub_id, "config.json", None, is_offline)
            snapshot = file if isinstance(file, str) else file.parent
        else:
            snapshot = model_config.data_snapshot(each.hub_id, is_offline)
        if isinstance(snapshot, str):
            raise UserError(
                f"{key}.hub_id={each.hub_id}: its commit is unknown: {snapshot}. Or use: "
                f"{key}.revision=<commit>."
            )
        choice = Choice(
            f"{key}.revision",
            snapshot.name,
            "the cache's, or else the newest when the run started",
        )
        config = choose.with_value(config, choice.key, choice.value)
        config = dataclasses.replace(config, chosen=[*config.chosen, choice])
    if config is plan.config:
        return plan
    # The command of vLLM's server has the revision.
    groups = placement.process_groups(config, host)
    processes, containers = _processes(config, host, plan.run_dir, groups)
    return dataclasses.replace(plan, config=config, processes=processes, containers=containers)


def make_plan(
    config: Config,
    host: Host,
    run_dir: Path,
    warnings: Sequence[str] = (),
    request: Request = EMPTY_REQUEST,
) -> Plan:
    """Return the plan of a prepared composition.

    Raises UserError if the composition contains a secret, and HostError if the GPU mask does not
    match the topology.
    """
    names = process_env.secret_names(config, host.environ)
    secrets = {host.environ.get(name, "") for name in names}
    key = process_env.key_of_secret(
        plain(config), {secret for secret in secrets if len(secret) >= 8}
    )
    if key:
        raise UserError(
            f"{key}: contains a secret of your shell or a password in a URL, and run records store "
            f"the composition. Remove {key}, and use a variable of your shell: "
            f"runtime.pass_env=[{key.removeprefix('user_env.') if 'user_env' in key else 'NAME'}]."
        )
    ports = process_groups.ports(host, run_dir)
    groups = placement.process_groups(config, host)
    processes, containers = _processes(config, host, run_dir, groups)
    smaller = memory.measured(config, groups, host)
    needed = memory.memory(config, groups, smaller, memory.host_gb(config, host))
    unchosen = choose.without_choices(config)  # rows are cached under this composition's key
    rows = data_cache.statistics(unchosen, host)
    plain_speed = None
    if config.chosen and config.method.trains:
        off = dataclasses.replace(unchosen, speed=SpeedMode.off)
        plain_speed = speed.estimate_speed(choose.choose(off, host), rows)
    is_sampling = config.method.kind == "evaluator"
    estimate = speed.sampling(config) if is_sampling else speed.estimate_speed(config, rows)
    server = process_groups.server_address(config, host)
    args = trainer_args.complete(config, run_dir, ports, server)
    args, scaling = lr_scaling.scale_learning_rate(config, args)
    return Plan(
        name=config.name or default_name(config),
        run_dir=run_dir,
        config=config,
        trainer_args=args,
        processes=processes,
        containers=containers,
        memory=needed,
        speed=estimate,
        warnings=[
            *warnings,
            *scaling,
            *follow_files.warnings(config, request),
            *margin.uncounted(config),
            *margin.warnings(config, needed, _sharding(config, host, needed)),
            *host_warnings(config, host, smaller, rows),
            *tools.warnings(config),
            *export_files.warnings(config),
            *check_rows.row_warnings(config, request.keys),
        ],
        tuned=tuned.for_ranks(config, host, run_dir, ports),
        data_cache=data_cache.for_ranks(unchosen, host),
        data=rows,
        plain_speed=plain_speed,
        balance=balance.balance(config, host),
        overrides=request,
    )


def _processes(
    config: Config, host: Host, run_dir: Path, groups: Sequence[placement.ProcessGroup]
) -> tuple[list[Process], dict[str, ContainerSpec]]:
    """Return a run's processes in start order, and their containers by name."""
    processes = [process_groups.process(config, host, run_dir, group) for group in groups]
    containers = container.specs(config, processes, host, run_dir)
    return (
        [*sandbox.processes(config), *container.pause_process(containers), *processes],
        {**sandbox.specs(config, host, run_dir), **containers},
    )


def _sharding(config: Config, host: Host, entries: list[Memory]) -> str | None:
    """Return the override that shards DDP's ranks if the plan is tight and this leaves a margin."""
    topology = config.topology
    is_tight = any(map(margin.close, entries))
    if not is_tight or topology.strategy != "ddp" or placement.num_trainers(config) == 1:
        return None
    sharded = choose.with_value(choose.without_choices(config), "topology.strategy", "fsdp")
    if not topology.servers:
        sharded = choose.with_value(sharded, "topology.name", "fsdp")
    is_valid = not check.refusals(sharded)
    if not is_valid or not margin.fits_with_margin(choose.choose(sharded, host), host):
        return None
    return "topology.strategy=fsdp" if topology.servers else "topology=fsdp"


def host_warnings(
    config: Config, host: Host, smaller: dict[int, float], rows: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield warnings about small GPUs, an unverified image and secrets that the shell lacks.

    `smaller` has the memory (GB) of each GPU that is smaller than hardware.memory_gb. `rows` are
    the statistics of the prepared rows.
    """
    if smaller:
        gpu = min(smaller, key=smaller.__getitem__)
        gib = f"{smaller[gpu] / GIB:.0f} GiB"
        doctor = " python launch/doctor.py shows how to raise it."
        yield (
            f"hardware.memory_gb={config.hardware.memory_gb:g}: GPU {gpu} has only {gib}, so the "
            f"plan uses {gib}.{doctor * config.hardware.unified_memory}"
        )
    offloaded = memory.offloaded_gb(config)
    if offloaded and not config.smoke and memory.host_gb(config, host) is None:
        parts = ", ".join(f"{name} {gb:.0f}" for name, gb in offloaded.items())
        yield (
            f"topology={config.topology.name}: the host of its ranks stores "
            f"{sum(offloaded.values()):.0f} GB ({parts}). Compare this with the RAM of that "
            "machine, which this plan does not know."
        )
    image = image_json(config)
    if image and not image["verified"]:
        name = image.get("base", image["reference"])
        yield (
            f"container={config.container.name}: {name} is unverified. It is pinned by a tag and "
            "not by a digest, so its content may change."
        )
    if host.gpus_of(config.hardware.vendor):  # a plan for another machine ignores this one's state
        yield from local_python.problems(config, host)
        yield from _disk_warnings(config, host, rows)
    runs_on_cpu = config.smoke or config.hardware.vendor == Vendor.none
    if runs_on_cpu or host.gpus_of(config.hardware.vendor):
        yield from local_copies.engine_problems(config, host)
    yield from inherited.warnings(config, host.environ)
    from_registry = config.runtime.on_node in ("kubernetes", "pyxis")
    if from_registry and image and image["name"] != "custom" and "@" not in image["reference"]:
        yield (
            f"container={image['name']}: {image['reference']} is in no registry, so nodes may not "
            f"find it. Use: python containers/build.py image={image['name']} "
            "push=<registry/repository>."
        )
    if config.runtime.name == "kubernetes":  # whose Secret has the values, not this shell
        return
    # the defaults of conf/runtime/docker.yaml, which many users do not need
    defaults = {"HF_TOKEN", "WANDB_API_KEY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    listed = [("secrets", name) for name in config.runtime.secrets if name.upper() not in defaults]
    for key, name in [*listed, *(("pass_env", name) for name in config.runtime.pass_env)]:
        if name not in host.environ:
            yield (
                f"runtime.{key}: {name} is not set in your shell, so no process gets it. Use: "
                f"export {name}=<value>."
            )


def rank_config(plan: Plan) -> dict[str, Any]:
    """Return the content of config.yaml, which every rank reads: the composition and EXTRA_KEYS."""
    content: dict[str, Any] = plain(plan.config)
    content |= {"run_dir": str(plan.run_dir), "trainer_args": plan.trainer_args}
    data = plan.config.data
    if data.kind == "samples" and data.path and Path(data.path).is_dir():
        content["data"][FILES] = sample_files.files(data.path)
    if plan.data_cache is not None:
        content["data_cache"] = plan.data_cache
    if plan.tuned is not None:
        experiment = tuned.experiment(plan.config, plan.overrides)
        content["tuned"] = {**plain(plan.tuned), "experiment": experiment}
    return content


def _disk_warnings(config: Config, host: Host, rows: Mapping[str, Any] | None) -> Iterator[str]:
    """Warn if the checkpoints and the model do not fit on the disk of run_root."""
    is_here = config.runtime.name not in ("slurm", "kubernetes")
    if host.disk_free is None or not is_here or config.smoke:
        return
    free_gb, needed_gb = host.disk_free(config.run_root) / 1e9, run_bytes(config, rows) / 1e9
    number = num_checkpoints(config, rows)
    if needed_gb > free_gb:
        yield (
            f"run_root={config.run_root}: {free_gb:.0f} GB are free, but {number} checkpoint(s) "
            f"and the model need {needed_gb:.0f} GB. Use: run_root=<directory on a larger disk>"
            f"{' or method.args.save_total_limit=1' * (number > 2)}."
        )
