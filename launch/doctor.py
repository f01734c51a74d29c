"""Find what would make a run on this machine fail, hang or crawl, and how to fix it.

    python launch/doctor.py [sysroot=DIR] [hardware=GROUP|auto] [format=text|json]
                            [active=false|true|force]

  sysroot=DIR       a tree to read in place of `/`: copies of another machine's sys/, proc/, dev/,
  etc/ hardware=GROUP    check against this group of conf/hardware; auto takes that of the GPUs here
  format=text|json  json prints one object: gpus, one object a device, and checks active=true
  also load the GPUs for 10 to 20 s: are products, copies and sums right, and as
                    fast as those of a healthy GPU? GPUs in use are left alone, since it slows down
                    their users; active=force tests them too

Works as any user, on a host and in a container, with GPUs and without. What it cannot read is
reported as unknown.

Exit codes: 0 nothing fails (warnings and unknowns may stand), 2 a wrong argument, 3 a check fails,
75 interrupted in the active tests.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch.core.installed  # noqa: F401

# isort: split
from launch.checks import check_table, doctor_page, facts
from launch.checks.finding import Finding, Status
from launch.checks.measured import Outcome
from launch.config.compose import compose
from launch.core import key_values
from launch.core.console import run_program
from launch.core.errors import EXIT_DONE, EXIT_HOST, EXIT_INTERRUPTED, HostError, UserError, near
from launch.machine import detect, masks
from launch.machine.detect import Host
from launch.machine.sysfs import is_folder
from launch.schema import Hardware
from launch.schema.enums import Format

ACTIVE = ("false", "true", "force")


@dataclass(frozen=True)
class Options:
    """The checked command line."""

    sysroot: str = "/"
    hardware: str = "auto"
    format: str = Format.text.value
    active: str = "false"


def parse(arguments: list[str]) -> Options:
    options = Options(**key_values.read(arguments, dataclasses.asdict(Options()), "format=json"))
    for key, words in (("format", Format.__members__), ("active", ACTIVE)):
        value = getattr(options, key)
        if value not in words:
            raise UserError(
                f"{key}={value}: one of {', '.join(words)} is expected.{near(value, words)}"
            )
    if options.active != "false" and Path(options.sysroot) != Path("/"):
        raise UserError(
            f"active={options.active} tests the GPUs of this machine, and "
            f"sysroot={options.sysroot} is another's. Leave one of them out."
        )
    if not is_folder(Path(options.sysroot) / "sys"):
        raise UserError(
            f"sysroot={options.sysroot}: no such directory, or it has no sys/. Copy sys/, proc/, "
            "dev/ and etc/ into it; for the topology alone, cp -rL /sys/class/kfd/kfd/topology "
            "to the same place below it."
        )
    return options


def hardware_of(requested: str, host: Host) -> Hardware | None:
    """Return the group to check against; None if the GPUs here do not determine one."""
    gpus = masks.visible((*host.gpus, *host.withheld), host.environ)
    group: str | None = requested
    if requested == "auto":
        group = None
        wholes = {gpu.partition_of for gpu in gpus}
        if not detect.group_fault(gpus):
            group = detect.group_of(gpus)
        elif len(wholes) == 1:
            group = wholes.pop()
    return compose([f"hardware={group}"]).hardware if group else None


def as_json(
    host: Host, findings: dict[check_table.Check, Finding], active: Outcome | None = None
) -> str:
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
        hardware = hardware_of(options.hardware, host)
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    known = facts.gather(host, hardware)
    if options.active != "false":
        # This imports the launcher, which takes 0.2 s.
        from launch.checks import measuring

        try:
            known = dataclasses.replace(
                known, active=measuring.run(known, options.active == "force")
            )
        except KeyboardInterrupt:
            print("Interrupted; the processes of the active tests are ended.", file=sys.stderr)
            return EXIT_INTERRUPTED
    findings = check_table.run(known)
    if options.format == Format.json.value:
        print(as_json(host, findings, known.active))
    else:
        doctor_page.show(host, hardware, findings, known.active)
    fails = any(finding.status == Status.fail for finding in findings.values())
    return EXIT_HOST if fails else EXIT_DONE


if __name__ == "__main__":
    run_program(main)
