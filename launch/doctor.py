"""Find problems that would make a run on this machine fail, hang or crawl, with their fixes.

    python launch/doctor.py [sysroot=DIR] [hardware=GROUP|auto] [format=text|json]
                            [active=false|true|force] [overrides of launch/run.py]

  sysroot=DIR       directory to read in place of `/`, with copies of another machine's sys/, proc/,
                    dev/ and etc/
  hardware=GROUP    group of conf/hardware to check against; auto: the group of the GPUs here
  format=text|json  json prints one object with the keys gpus (one object per device) and checks
  active=true       also load the GPUs for 10 to 20 s and check that products, copies and sums are
                    right and as fast as on a healthy GPU. GPUs in use are skipped, because the load
                    would slow down their users; active=force tests them too.
  overrides         of the run to start, such as model=qwen3_8b run_root=/data/runs: check the disk
                    that it writes to, for the checkpoints that its plan needs

No privileges are needed, and GPUs are optional. It works on a host and in a container. A check that
cannot read its files reports `unknown`.

Exit codes: 0 no check failed (warnings and unknowns are possible), 2 wrong argument, 3 a check
failed, 75 interrupted during the active tests.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch.core.installed  # noqa: F401

# isort: split
from launch.checks import check_table, doctor_page, facts
from launch.checks.finding import Finding, Status
from launch.checks.measured import Outcome
from launch.config.compose import compose
from launch.config.identity import has_phases
from launch.config.request import Request
from launch.core import key_values
from launch.core.console import run_program
from launch.core.errors import EXIT_DONE, EXIT_HOST, EXIT_INTERRUPTED, HostError, UserError
from launch.machine import detect, masks
from launch.machine.detect import Host
from launch.machine.sysfs import is_folder
from launch.schema import Config
from launch.schema.enums import Format

ACTIVE = ("false", "true", "force")


@dataclass(frozen=True)
class Options:
    """The checked command line."""

    sysroot: str = "/"
    hardware: str = "auto"
    format: str = Format.text.value
    active: str = "false"
    overrides: tuple[str, ...] = ()  # of the run to start


def parse(arguments: list[str]) -> Options:
    """Return the checked options. Raises UserError."""
    defaults = dataclasses.asdict(Options())
    del defaults["overrides"]
    groups = {"experiment", *(field.name for field in dataclasses.fields(Config))}
    overrides = tuple(
        argument
        for argument in arguments
        if (key := argument.partition("=")[0]) not in defaults and key.partition(".")[0] in groups
    )
    own = [argument for argument in arguments if argument not in overrides]
    choices = {"format": Format.__members__, "active": ACTIVE}
    values = key_values.read(own, defaults, "format=json", choices)
    options = Options(**values, overrides=overrides)
    if options.active != "false" and Path(options.sysroot) != Path("/"):
        raise UserError(
            f"active={options.active} tests the GPUs of this machine, but "
            f"sysroot={options.sysroot} describes another machine. Remove one of the two options."
        )
    if not is_folder(Path(options.sysroot) / "sys"):
        raise UserError(
            f"sysroot={options.sysroot}: this directory does not exist or has no sys/. Copy sys/, "
            "proc/, dev/ and etc/ of the other machine into it. For the topology alone, use "
            f"mkdir -p {options.sysroot}/sys/class/kfd/kfd && cp -rL /sys/class/kfd/kfd/topology "
            f"{options.sysroot}/sys/class/kfd/kfd there."
        )
    return options


def run_overrides(options: Options, host: Host) -> list[str]:
    """Return the overrides of the run to start, with the group of the GPUs here for hardware=auto.

    An experiment names its own. Without overrides, return [] if the GPUs determine no group.
    """
    group: str | None = options.hardware
    if any(override.startswith("experiment=") for override in options.overrides):
        group = None if group == "auto" else group
    elif group == "auto":
        gpus = masks.visible((*host.gpus, *host.withheld), host.environ)
        unpartitioned = {gpu.partition_of for gpu in gpus}
        if not detect.group_problem(gpus):
            group = detect.group_of(gpus)
        else:
            group = unpartitioned.pop() if len(unpartitioned) == 1 else None
    return [*([f"hardware={group}"] if group else []), *options.overrides]


def run_of(overrides: Sequence[str]) -> Config:
    """Return the composition of the run to start. Raises UserError."""
    # This imports the planner, which takes 0.2 s.
    from launch.plan.planning import prepare

    request = Request(overrides)
    config = compose(request)
    return config if has_phases(config) else prepare(config, request.keys)[0]


def as_json(
    host: Host, findings: dict[check_table.Check, Finding], active: Outcome | None = None
) -> str:
    """Return GPUs, checks and, after active tests, measurements as a JSON object."""
    checks = [
        {"name": check.name, **dataclasses.asdict(finding), "status": finding.status.value}
        for check, finding in findings.items()
    ]
    gpus = [dataclasses.asdict(gpu) for gpu in (*host.gpus, *host.withheld)]
    content: dict[str, object] = {"gpus": gpus, "checks": checks}
    if active:
        content["measured"] = [
            {"gpu": active.gpus[result.rank] if active.gpus else None, **dataclasses.asdict(result)}
            for result in active.measured
        ]
    return json.dumps(content, indent=1)


def main(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(__doc__)
        return EXIT_DONE
    try:
        options = parse(arguments)
        host = facts.host_of(options.sysroot)
        overrides = run_overrides(options, host)
        run = run_of(overrides) if overrides else None
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    hardware = run.hardware if run else None
    machine_facts = facts.gather(host, hardware, run if options.overrides else None)
    if options.active != "false":
        # This imports the launcher, which takes 0.2 s.
        from launch.checks import measuring

        try:
            outcome = measuring.run(machine_facts, options.active == "force")
        except KeyboardInterrupt:
            print("Interrupted. The processes of the active tests were stopped.", file=sys.stderr)
            return EXIT_INTERRUPTED
        machine_facts = dataclasses.replace(machine_facts, active=outcome)
    findings = check_table.run(machine_facts)
    if options.format == Format.json.value:
        print(as_json(host, findings, machine_facts.active))
    else:
        doctor_page.show(
            host, hardware, findings, machine_facts.active, arguments, options.overrides
        )
    fails = any(finding.status == Status.fail for finding in findings.values())
    return EXIT_HOST if fails else EXIT_DONE


if __name__ == "__main__":
    run_program(main)
