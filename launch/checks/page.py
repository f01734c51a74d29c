"""The doctor's page: the machine, what is wrong with its cure, then everything that was looked at."""

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
from launch.machine.gpu import Gpu
from launch.schema import Hardware

STYLE = {Status.fail: "bold red", Status.warn: "yellow", Status.unknown: "cyan", Status.passed: "green"}
FEW = 16  # GPUs that are listed one by one
WIDTH = 100  # where there is no terminal


def show(host: Host, hardware: Hardware | None, found: dict[Check, Finding], active: Outcome | None = None) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(_machine(host, hardware))
    if 0 < len(host.gpus) <= FEW:
        console.print(_gpus(host))
    elif host.gpus:
        console.print("format=json lists each device.")
    for status in (Status.fail, Status.warn):
        for check, finding in found.items():
            if finding.status == status:
                console.print(_wrong(check, finding))
    console.print(_all(found))
    if active and active.measured:
        console.print(_measured(active))
    if not host.gpus and not host.withheld:
        left_out = sum(check not in found for check in CHECKS)
        console.print(f"No GPU was found: {left_out} checks of GPUs, their links and their driver are left out.")
    console.print(_sum(found))


def _machine(host: Host, hardware: Hardware | None) -> Panel:
    """What is here, in a line for each kind."""
    usable, withheld = (Counter(detect.describe(gpu) for gpu in gpus) for gpus in (host.gpus, host.withheld))
    lines = [f"{count} x {kind}" for kind, count in usable.items()] or ["no GPU that may be used"]
    lines += [f"{count} x {kind}: not given to this container" for kind, count in withheld.items()]
    against = f"checked against hardware={hardware.name}" if hardware else "no group of conf/hardware fits: hardware=GROUP names one"
    return Panel(Text("\n".join([*lines, against])), title="[bold]this machine[/bold]", title_align="left")


def _gpus(host: Host) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("GPU", "product", "PCI", "render", "NUMA", "mode", "xGMI GB/s", "UUID"):
        table.add_column(name, no_wrap=True)
    for index, gpu in enumerate(host.gpus):
        mode = "/".join(filter(None, (gpu.compute_partition, gpu.memory_partition)))
        node = f"D{gpu.render_minor}" if gpu.render_minor is not None else None
        numa = None if gpu.numa_node is None else str(gpu.numa_node)
        product = gpu.product.removeprefix("AMD ").removeprefix("Instinct ")
        table.add_row(*(word or "-" for word in (str(index), product, gpu.pci_address, node, numa, mode, _peers(gpu), gpu.uuid)))
    return table


def _peers(gpu: Gpu) -> str:
    """`7 x 64`, in GB/s."""
    kinds = Counter(link.gb_s for link in gpu.links if link.kind == "xgmi")
    return ", ".join(f"{count} x {speed:g}" if speed else str(count) for speed, count in kinds.items())


def _wrong(check: Check, finding: Finding) -> Panel:
    body = Table.grid(padding=(0, 2))
    body.add_row(Text("found", "dim"), Text(finding.read))
    body.add_row(Text("expected", "dim"), Text.assemble(finding.threshold, (f"  [{finding.source}]", "dim")))
    body.add_row(Text("cure", "dim"), Text(finding.cure, "bold"))
    style = STYLE[finding.status]
    title = f"[{style}]{finding.status.value.upper()}[/] {check.name}"
    return Panel(body, title=title, title_align="left", border_style=style)


def _all(found: dict[Check, Finding]) -> Table:
    """A line each; how to make known what is unknown stands beside it."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("subject", "check", "", "found"):
        table.add_column(name)
    subject = ""
    for check, finding in found.items():
        first = check.subject if check.subject != subject else ""
        subject = check.subject
        read = Text(finding.read, overflow="ellipsis", no_wrap=finding.status in (Status.fail, Status.warn))  # in full above
        if finding.status == Status.unknown:
            read = Text.assemble(read, (f"\n{finding.cure}", "bold"))
        table.add_row(first, check.name, Text(finding.status.value, STYLE[finding.status]), read)
    return table


def _measured(outcome: Outcome) -> Table:
    """Every figure that was measured; a process on a CPU has a line too."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("GPU", "GEMM TFLOPS", "fp32 output", "copy GB/s", "multiply GB/s", "all-reduce GB/s", "MHz of its dies"):
        table.add_column(name)
    for one in outcome.measured:
        rates = (one.gemm_tflops, one.fp32_output_tflops, one.copy_gb_s, one.multiply_gb_s, one.all_reduce_gb_s)
        words = ["-" if rate is None else f"{rate:.4g}" for rate in rates]
        dies = f"{min(one.clocks_mhz)} to {max(one.clocks_mhz)}" if one.clocks_mhz else "-"
        table.add_row(str(outcome.gpus[one.rank] if outcome.gpus else one.rank), *words, dies)
    return table


def _sum(found: dict[Check, Finding]) -> Text:
    counts = Counter(finding.status for finding in found.values())
    words = [(f"{counts[status]} {status.value}", STYLE[status]) for status in STYLE if counts[status]]
    parts = [part for word in words for part in (word, ", ")][:-1]
    return Text.assemble(*parts)
