"""Print the doctor's page: the machine, what is wrong, then everything that was checked."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.checks.finding import Finding, Status
from launch.checks.measured import Outcome
from launch.checks.table import CHECKS, Check
from launch.machine import detect
from launch.machine.detect import Host
from launch.schema import Hardware

STYLE = {
    Status.fail: "bold red",
    Status.warn: "yellow",
    Status.unknown: "cyan",
    Status.passed: "green",
}
FEW = 16  # GPUs listed one by one at most
WIDTH = 100  # without a terminal
GPU_COLUMNS = ("GPU", "product", "PCI", "render", "NUMA", "mode", "xGMI GB/s", "UUID")
# Column -> field of Measured, for a GPU or a process on a CPU.
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
) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(_machine(host, hardware))
    if 0 < len(host.gpus) <= FEW:
        console.print(_gpus(host))
    elif host.gpus:
        console.print("format=json lists each device.")
    for status in (Status.fail, Status.warn):
        for check, finding in findings.items():
            if finding.status == status:
                console.print(_wrong(check, finding))
    console.print(_all(findings))
    if active and active.measured:
        console.print(_measured(active))
    if not host.gpus and not host.withheld:
        left_out = sum(check not in findings for check in CHECKS)
        console.print(
            f"No GPU was found: {left_out} checks of GPUs, their links and their driver are "
            "left out."
        )
    counts = Counter(finding.status for finding in findings.values())
    words = [Text(f"{counts[s]} {s.value}", STYLE[s]) for s in STYLE if counts[s]]
    console.print(Text(", ").join(words))


def _machine(host: Host, hardware: Hardware | None) -> Panel:
    """Return a panel of what this machine has, one line per kind."""
    usable = Counter(map(detect.describe, host.gpus))
    withheld = Counter(map(detect.describe, host.withheld))
    lines = [f"{count} x {kind}" for kind, count in usable.items()] or ["no GPU that may be used"]
    lines += [f"{count} x {kind}: not given to this container" for kind, count in withheld.items()]
    against = "no group of conf/hardware fits: hardware=GROUP names one"
    if hardware:
        against = f"checked against hardware={hardware.name}"
    text = Text("\n".join([*lines, against]))
    return Panel(text, title="[bold]this machine[/bold]", title_align="left")


def _table(*columns: str, no_wrap: bool = False) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=no_wrap)
    return table


def _gpus(host: Host) -> Table:
    table = _table(*GPU_COLUMNS, no_wrap=True)
    for index, gpu in enumerate(host.gpus):
        speeds = Counter(link.gb_s for link in gpu.links if link.kind == "xgmi")
        row = (
            str(index),
            gpu.product.removeprefix("AMD ").removeprefix("Instinct "),
            gpu.pci_address,
            None if gpu.render_minor is None else f"D{gpu.render_minor}",
            None if gpu.numa_node is None else str(gpu.numa_node),
            "/".join(filter(None, (gpu.compute_partition, gpu.memory_partition))),
            ", ".join(f"{n} x {speed:g}" if speed else str(n) for speed, n in speeds.items()),
            gpu.uuid,
        )
        table.add_row(*(word or "-" for word in row))
    return table


def _wrong(check: Check, finding: Finding) -> Panel:
    source = (f"  [{finding.source}]", "dim")
    body = Table.grid(padding=(0, 2))
    body.add_row(Text("found", "dim"), Text(finding.read))
    body.add_row(Text("expected", "dim"), Text.assemble(finding.threshold, source))
    body.add_row(Text("cure", "dim"), Text(finding.cure, "bold"))
    style = STYLE[finding.status]
    title = f"[{style}]{finding.status.value.upper()}[/] {check.name}"
    return Panel(body, title=title, title_align="left", border_style=style)


def _all(findings: dict[Check, Finding]) -> Table:
    """Return a table of findings, one per line. An unknown one comes with how to find out."""
    table = _table("subject", "check", "", "found")
    subject = ""
    for check, finding in findings.items():
        first = check.subject if check.subject != subject else ""
        subject = check.subject
        shown_above = finding.status in (Status.fail, Status.warn)
        read = Text(finding.read, overflow="ellipsis", no_wrap=shown_above)
        if finding.status == Status.unknown:
            read = Text.assemble(read, (f"\n{finding.cure}", "bold"))
        table.add_row(first, check.name, Text(finding.status.value, STYLE[finding.status]), read)
    return table


def _measured(outcome: Outcome) -> Table:
    table = _table("GPU", *RATES, "MHz of its dies")
    for gpu in outcome.measured:
        rates = [getattr(gpu, field) for field in RATES.values()]
        words = ["-" if rate is None else f"{rate:.4g}" for rate in rates]
        dies = f"{min(gpu.clocks_mhz)} to {max(gpu.clocks_mhz)}" if gpu.clocks_mhz else "-"
        table.add_row(str(outcome.gpus[gpu.rank] if outcome.gpus else gpu.rank), *words, dies)
    return table
