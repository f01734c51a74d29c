"""Print the doctor's report: the machine, then its problems, then every check."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.checks.check_table import CHECKS, Check
from launch.checks.finding import Finding, Status
from launch.checks.measured import Outcome
from launch.machine import detect
from launch.machine.detect import Host
from launch.schema import Hardware

STYLE = {
    Status.fail: "bold red",
    Status.warn: "yellow",
    Status.unknown: "cyan",
    Status.passed: "green",
}
MAX_LISTED = 16  # GPUs; a longer list is left to format=json
WIDTH = 100  # characters per line if stdout is not a terminal
# Column -> field of Measured.
RATES = {
    "GEMM TFLOPS": "gemm_tflops",
    "fp32 output": "fp32_output_tflops",
    "copy GB/s": "copy_gb_s",
    "multiply GB/s": "multiply_gb_s",
    "all-reduce GB/s": "all_reduce_gb_s",
}


def show(
    host: Host,
    hardware: Hardware | None,
    findings: dict[Check, Finding],
    active: Outcome | None = None,
    arguments: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> None:
    """Print the report. `arguments` are those of the doctor's command, which it may have to repeat.

    A plan names the group that was checked, unless hardware=auto finds it on this machine, and has
    the `overrides` among the arguments.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    kinds = Counter(map(detect.describe, host.gpus))
    withheld = Counter(map(detect.describe, host.withheld))
    lines = [f"{count} x {kind}" for kind, count in kinds.items()] or ["No GPU found"]
    lines += [f"{count} x {kind}: not passed to this container" for kind, count in withheld.items()]
    group = f"checked against hardware={hardware.name}" if hardware else ""
    lines.append(group or "no group of conf/hardware fits; choose one with hardware=GROUP")
    console.print(Text("\n".join(lines)))
    if 0 < len(host.gpus) <= MAX_LISTED:
        columns = ("GPU", "product", "PCI", "render", "NUMA", "mode", "xGMI GB/s", "UUID")
        console.print(_table(columns, _gpu_rows(host), no_wrap=True))
    elif host.gpus:
        console.print("format=json lists each device.")
    for status in (Status.fail, Status.warn):
        for check, finding in findings.items():
            if finding.status == status:
                name = Text(f"\n{status.value.upper()} {check.name}", STYLE[status])
                body = Table.grid(padding=(0, 2))
                body.add_row("  found", Text(finding.read))
                body.add_row("  expected", Text(f"{finding.threshold}  [{finding.source}]"))
                body.add_row("  fix", Text(finding.cure, "bold"))
                console.print(name, body)
    console.print(_table(("subject", "check", "", "found"), _check_rows(findings)))
    if active and active.measured:
        rows = []
        for gpu in active.measured:
            rates = [getattr(gpu, field) for field in RATES.values()]
            cells = [None if rate is None else f"{rate:.4g}" for rate in rates]
            clocks = gpu.clocks_mhz
            dies = f"{min(clocks)} to {max(clocks)}" if clocks else None
            rows.append([str(active.gpus[gpu.rank] if active.gpus else gpu.rank), *cells, dies])
        console.print(_table(("GPU", *RATES, "MHz of dies"), rows))
    if not host.gpus and not host.withheld:
        omitted = sum(check not in findings for check in CHECKS)
        console.print(f"{omitted} checks of GPUs, links and drivers were skipped.")
    counts = Counter(finding.status for finding in findings.values())
    words = [Text(f"{counts[s]} {s.value}", STYLE[s]) for s in STYLE if counts[s]]
    console.print(Text(", ").join(words))
    has_failed, has_gpus = counts[Status.fail], bool(host.gpus)
    step = f"fix what failed, then repeat {shlex.join(['python', 'launch/doctor.py', *arguments])}"
    if not has_failed:
        chosen = [f"hardware={hardware.name}"] if arguments and hardware else []
        command = shlex.join(["python", "launch/run.py", *chosen, *overrides, "mode=plan"])
        step = f"{command}    (changes nothing; shows time and memory)"
        if not (has_gpus or overrides):
            step = "python launch/run.py    (trains a tiny model on the CPU)"
    console.print(Text(f"Next: {step}"), soft_wrap=True)  # so that it can be pasted
    if not (has_failed or has_gpus):
        hint = "Or, if a GPU should be here (python launch/run.py hardware= lists names): "
        console.print(Text(f"{hint}python launch/doctor.py hardware=<name>"), soft_wrap=True)


def _table(
    columns: Iterable[str], rows: Iterable[Iterable[str | Text | None]], no_wrap: bool = False
) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=no_wrap)
    for row in rows:
        table.add_row(*("-" if cell is None else cell for cell in row))
    return table


def _gpu_rows(host: Host) -> Iterable[list[str | None]]:
    for index, gpu in enumerate(host.gpus):
        speeds = Counter(link.gb_s for link in gpu.links if link.kind == "xgmi")
        links = ", ".join(f"{n} x {speed:g}" if speed else str(n) for speed, n in speeds.items())
        product = gpu.product.removeprefix("AMD ").removeprefix("Instinct ")
        render = None if gpu.render_minor is None else f"D{gpu.render_minor}"
        numa = None if gpu.numa_node is None else str(gpu.numa_node)
        mode = "/".join(filter(None, (gpu.compute_partition, gpu.memory_partition)))
        uuid = gpu.uuid or None
        yield [str(index), product, gpu.pci_address, render, numa, mode or None, links or "-", uuid]


def _check_rows(findings: dict[Check, Finding]) -> Iterable[list[str | Text]]:
    """Yield a row for each finding; an unknown one includes its remedy."""
    subject = ""
    for check, finding in findings.items():
        first = check.subject if check.subject != subject else ""
        subject = check.subject
        shown_above = finding.status in (Status.fail, Status.warn)
        reading = Text(finding.read, overflow="ellipsis", no_wrap=shown_above)
        if finding.status == Status.unknown:
            reading = Text.assemble(reading, (f"\n{finding.cure}", "bold"))
        yield [first, check.name, Text(finding.status.value, STYLE[finding.status]), reading]
