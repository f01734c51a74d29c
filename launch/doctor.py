"""Says what this machine is and what on it would make a run fail, hang or crawl, with the command that cures each.

    python launch/doctor.py [sysroot=DIR] [hardware=GROUP|auto] [format=text|json] [active=false|true|force]

  sysroot=DIR          a tree that stands for `/`: copies of sys/, proc/, dev/, etc/ from another machine
  hardware=GROUP       check against this group of conf/hardware; auto takes the one of the GPUs that are found
  format=text|json     json prints one object: gpus, one object a device, and checks
  active=true          also load the GPUs for 10 to 20 s: are products, copies and sums right, and as fast as those of a healthy GPU?
                       Off by default, since it slows down who else uses them; in use, they are left alone. active=force tests them then too

Works as any user, on a host and in a container, with GPUs and without. What it cannot read it calls unknown.

Exit codes: 0 nothing fails (warnings and unknowns may stand), 2 a wrong argument, 3 a check fails, 75 interrupted in the active tests.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch.checks import facts, page, table
from launch.checks.finding import Finding, Status
from launch.checks.measured import Outcome
from launch.command_line import key_values
from launch.command_line.stream import run_program
from launch.compose import compose, groups, unknown_option
from launch.errors import EXIT_DONE, EXIT_HOST, EXIT_INTERRUPTED, HostError, UserError, near
from launch.machine import detect, masks
from launch.machine.detect import Host
from launch.machine.sysfs import is_folder
from launch.schema import Hardware
from launch.schema.enums import Format

ACTIVE = ("false", "true", "force")


@dataclass(frozen=True)
class Asked:
    """The command line, checked."""

    sysroot: str = "/"
    hardware: str = "auto"
    format: str = Format.text.value
    active: str = "false"


def parse(arguments: list[str]) -> Asked:
    asked = Asked(**key_values.read(arguments, dataclasses.asdict(Asked()), "format=json"))
    if asked.format not in Format.__members__:
        raise UserError(f"format={asked.format}: text or json is expected.{near(asked.format, Format.__members__)}")
    if asked.active not in ACTIVE:
        raise UserError(f"active={asked.active}: {', '.join(ACTIVE[:-1])} or {ACTIVE[-1]} is expected.{near(asked.active, ACTIVE)}")
    if asked.active != "false" and Path(asked.sysroot) != Path("/"):
        raise UserError(
            f"active={asked.active} tests the GPUs of this machine, and sysroot={asked.sysroot} is another's. Leave one of them out."
        )
    if asked.hardware not in groups()["hardware"]:
        raise unknown_option("hardware", asked.hardware)
    if not is_folder(Path(asked.sysroot)):
        raise UserError(f"sysroot={asked.sysroot}: there is no such directory. It holds sys/, and may hold proc/, dev/ and etc/.")
    return asked


def hardware_of(asked: str, host: Host) -> Hardware | None:
    """The group to check against; None where several kinds of GPU, or one that no group describes, leave none."""
    found = masks.visible((*host.gpus, *host.withheld), host.environ)
    wholes = {gpu.partition_of for gpu in found}
    group: str | None = asked
    if asked == "auto":
        undecided = detect.undecided(found)  # the check `hardware` says it
        group = (wholes.pop() if len(wholes) == 1 else None) if undecided else detect.group_of(found)
    return compose([f"hardware={group}"]).hardware if group else None


def as_json(host: Host, found: dict[table.Check, Finding], active: Outcome | None = None) -> str:
    checks = [{"name": check.name, **dataclasses.asdict(finding), "status": finding.status.value} for check, finding in found.items()]
    page = {"gpus": [dataclasses.asdict(gpu) for gpu in (*host.gpus, *host.withheld)], "checks": checks}
    if active:
        page["measured"] = [{"gpu": active.gpus[one.rank] if active.gpus else None, **dataclasses.asdict(one)} for one in active.measured]
    return json.dumps(page, indent=1)


def main(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(__doc__)
        return EXIT_DONE
    try:
        asked = parse(arguments)
        host = facts.host_of(asked.sysroot)
        hardware = hardware_of(asked.hardware, host)
    except (UserError, HostError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    known = facts.gather(host, hardware)
    if asked.active != "false":
        from launch.checks import measuring  # torchrun's part of the launcher: 0.2 s that only this needs

        try:
            known = dataclasses.replace(known, active=measuring.run(known, asked.active == "force"))
        except KeyboardInterrupt:
            print("Interrupted; the processes of the active tests are ended.", file=sys.stderr)
            return EXIT_INTERRUPTED
    found = table.run(known)
    if asked.format == Format.json.value:
        print(as_json(host, found, known.active))
    else:
        page.show(host, hardware, found, known.active)
    return EXIT_HOST if any(finding.status == Status.fail for finding in found.values()) else EXIT_DONE


if __name__ == "__main__":
    run_program(main)
