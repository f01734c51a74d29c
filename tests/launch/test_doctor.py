"""Test launch/doctor.py: command line, JSON, page, and the short checks before a run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch import doctor
from launch.checks import check_table, facts, preflight
from launch.checks.facts import Space
from launch.core.errors import HostError
from launch.execution import execute
from launch.machine.detect import host
from launch.plan.planning import make_plan
from tests.conftest import ROOT, composed, host_with
from tests.docs.test_commands import commands
from tests.helpers import sysroots

FIELDS = ["name", "status", "read", "threshold", "source", "cure"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = doctor.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("argument", "message"), [
    ("json", "`json`: "),
    ("format=yaml", "format=yaml: "),
    ("hardware=mi300", "hardware=mi300: no such hardware. Did you mean mi300x"),
    ("sysroot=/nowhere/at/all", "sysroot=/nowhere/at/all: "),
])  # fmt: skip
def test_a_wrong_argument_is_rejected(capsys, argument, message):
    code, out, err = run(capsys, *argument.split())
    assert (code, out) == (2, "")
    assert err.startswith(message)


@pytest.mark.parametrize("text", commands("launch/doctor.py"))
def test_documented_commands_parse(text):
    assert doctor.parse(text.split()).format in ("text", "json")


def test_json_has_only_gpus_and_checks(capsys, tmp_path):
    sysroots.mi300x(tmp_path)
    code, out, err = run(capsys, f"sysroot={tmp_path}", "format=json")
    report = json.loads(out)
    assert (code, err, list(report)) == (0, "", ["gpus", "checks"])
    assert len(report["gpus"]) == 8
    assert report["gpus"][7]["pci_address"] == "0000:75:00.0"
    assert report["gpus"][0]["links"][1] == {"node": 3, "kind": "xgmi", "gb_s": 64.0}
    for check in report["checks"]:
        assert sorted(check) == sorted(FIELDS)
        assert check["status"] in ("pass", "unknown")  # unknown: a copy of sys/ cannot tell
        assert bool(check["cure"]) == (check["status"] != "pass")


@pytest.mark.parametrize(("name", "code"), [("mi210_xgmi_pcie", 0), ("mi300x_cpx", 3)])
def test_page_of_real_topologies(capsys, tmp_path, monkeypatch, name, code):
    """`UPDATE_GOLDEN=1 pytest <this file>` updates the pages; review the diff."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    root = str(sysroots.real(tmp_path, name))
    exit_code, out, _ = run(capsys, f"sysroot={root}")
    lines = out.replace(root, "DIR").strip("\n").splitlines()
    page = "\n".join(line.rstrip() for line in lines) + "\n"
    golden = ROOT / f"tests/golden/doctor_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(page)
    assert page == golden.read_text()
    assert exit_code == code


def test_failures_come_first_with_their_fixes(capsys, tmp_path):
    machine = sysroots.mi300x(tmp_path)
    machine.write("proc/sys/kernel/numa_balancing", 1)
    machine.write(f"{machine.device(5)}/ras/umc_err_count", "ue: 1\nce: 0")
    code, out, _ = run(capsys, f"sysroot={tmp_path}")
    assert code == 3
    assert max(len(line) for line in out.splitlines()[:-1]) <= 100
    order = ("FAIL ras", "WARN numa_", "sudo sysctl kernel.numa_balancing=0", "Links")
    assert sorted(order, key=out.index) == list(order)
    assert "8 x AMD Instinct MI300X (gfx942, 304 CUs, 206 GB)" in out
    assert "1 fail, 1 warn" in out.splitlines()[-2]
    assert out.splitlines()[-1].endswith(f"repeat python launch/doctor.py sysroot={tmp_path}")


def test_the_next_command_plans_for_the_checked_machine(capsys, tmp_path):
    machine = sysroots.mi300x(tmp_path)
    code, out, _ = run(capsys, f"sysroot={machine.root}")
    assert code == 0
    assert out.splitlines()[-1].startswith("Next: python launch/run.py hardware=mi300x mode=plan ")


def test_a_machine_without_a_gpu(capsys, tmp_path):
    sysroots.laptop(tmp_path)
    code, out, _ = run(capsys, f"sysroot={tmp_path}")
    assert code == 0
    assert out.startswith("No GPU found\n")
    assert f"{len(check_table.CHECKS) - 5} checks of GPUs, links" in out
    *_, step, other = out.splitlines()
    assert step.startswith("Next: python launch/run.py ")
    assert other.endswith(": python launch/doctor.py hardware=<name>")
    # Its absence is a failure if it was requested.
    assert run(capsys, f"sysroot={tmp_path}", "hardware=mi300x")[0] == 3


def test_reports_processes_on_other_partitions_of_a_card(capsys, tmp_path):
    root = sysroots.real(tmp_path, "mi300x_cpx")
    for folder in (root / sysroots.KFD / "nodes").iterdir():
        (folder / "gpu_id").write_text(f"{50000 + int(folder.name)}")
    used_memory = root / f"sys/class/kfd/kfd/proc/4242/vram_{50000 + 9}"
    used_memory.parent.mkdir(parents=True)
    used_memory.write_text("20000000000")
    checks = json.loads(run(capsys, f"sysroot={root}", "format=json")[1])["checks"]
    check = next(check for check in checks if check["name"] == "foreign_processes")
    assert check["status"] == "warn"
    assert "4242" in check["read"]


@pytest.mark.parametrize(("overrides", "needed_gb"), [
    ("", 50),
    ("model=qwen3_8b topology=fsdp", 3 * 98.3 + 32.8),  # three checkpoints while the third is saved
    ("model=qwen3_0_6b adapter=lora", 3),
    ("method=evaluate model=qwen3_0_6b", 0.1),
    ("experiment=mi50_phase3", 3 * 7.15 + 2.4),
])  # fmt: skip
def test_a_run_needs_disk_for_its_checkpoints_and_model(capsys, tmp_path, overrides, needed_gb):
    sysroots.mi300x(tmp_path)
    out = run(capsys, f"sysroot={tmp_path}", "format=json", *overrides.split())[1]
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    check = checks["run_root_disk"]
    assert float(check["threshold"].split()[0]) == pytest.approx(needed_gb, rel=0.1)
    assert ("4B" in check["source"]) == (not overrides)  # the run whose size is assumed


@pytest.mark.parametrize("content", [b"\xff\x00\x80 9", b"cpu_cores_count 0\nmem_banks_count 1\n"])
def test_an_unreadable_node_makes_the_gpu_count_unknown(capsys, tmp_path, content):
    file = sysroots.real(tmp_path, "mi210_xgmi_pcie") / sysroots.KFD / "nodes/2/properties"
    file.write_bytes(content)
    checks = json.loads(run(capsys, f"sysroot={tmp_path}", "format=json")[1])["checks"]
    check = next(check for check in checks if check["name"] == "hardware")
    assert check["status"] == "unknown"
    assert check["read"].startswith("7 x AMD Instinct MI210 ")
    assert "; the properties of node 2 in sys/class/kfd/kfd/topology" in check["read"]
    assert check["cure"].startswith("cat /sys/class/kfd/kfd/topology/nodes/2/properties; ")


def test_runs_on_the_machine_of_the_tests(tmp_path):
    """Start the program in a separate process and another directory."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/doctor.py"), "format=json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 3), done.stderr
    names = [check["name"] for check in json.loads(done.stdout)["checks"]]
    assert {"open_files", "shm", "run_root_disk", "clock", "kernel_log"} <= set(names)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout(tmp_path):
    command = [sys.executable, str(ROOT / "launch/run.py"), "hardware=cpu", "mode=plan"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


# ---- The short checks before a run


def plan_on(machine: sysroots.Machine, *overrides: str):
    """Return a plan for this machine, and the host."""
    machine_host = dataclasses.replace(facts.host_of(str(machine.root)), python="python")
    config = composed("model=qwen3_0_6b", "runtime=local", *overrides)
    return make_plan(config, machine_host, machine.root / "run"), machine_host


def test_a_predicted_failure_is_rejected_with_a_remedy(tmp_path, capsys):
    machine = sysroots.mi300x(tmp_path)
    machine.write(f"{machine.device(5)}/mem_info_vram_used", 150 << 30)
    machine.write("proc/self/status", "Uid:\t4242\nGid:\t4242\nGroups:\t4242")
    with pytest.raises(HostError) as error:
        preflight.check(*plan_on(machine, "hardware=mi300x"))
    assert "kfd: uid 4242 may not open /dev/kfd." in str(error.value)
    assert "sudo usermod -aG" in str(error.value)
    assert "memory_occupied: 0000:05:00.0 161.1 GB (78%)." in str(error.value)
    assert "preflight=warn starts the run anyway" in str(error.value)
    preflight.check(*plan_on(machine, "hardware=mi300x", "preflight=warn"))
    assert capsys.readouterr().err.startswith("warning: ")


def test_reports_gpus_that_were_not_passed_to_the_container(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    machine.remove("dev/dri/renderD130")
    with pytest.raises(
        HostError,
        match=r"8 amd GPU\(s\) needed, 7 found here \(1 more were not passed to this container\)"
        r".* --device /dev/kfd ",
    ):
        execute.check_host(*plan_on(machine, "hardware=mi300x"))


def test_only_the_gpus_of_the_run_are_checked(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    machine.write(f"{machine.device(5)}/mem_info_vram_used", 150 << 30)
    machine.set_environ(HIP_VISIBLE_DEVICES="3,4")
    preflight.check(*plan_on(machine, "hardware=mi300x", "topology=ddp", "topology.num_gpus=2"))
    machine.set_environ(HIP_VISIBLE_DEVICES="0,4")
    with pytest.raises(HostError, match="memory_occupied"):
        preflight.check(*plan_on(machine, "hardware=mi300x", "topology=ddp", "topology.num_gpus=2"))


def test_a_card_with_less_memory_than_its_hardware_file(tmp_path, capsys):
    """The plan uses the card's real memory; a run that exceeds it is rejected."""
    machine = sysroots.mi50(tmp_path)
    assert [m.capacity_gb for m in plan_on(machine, "hardware=mi50")[0].memory] == [
        pytest.approx(34.4, abs=0.1)
    ]
    machine.write(f"{sysroots.KFD}/nodes/1/mem_banks/0/properties", f"size_in_bytes {16 << 30}")
    plan, machine_host = plan_on(machine, "hardware=mi50")
    assert any("hardware.memory_gb=32: GPU 0 has only 16 GiB" in line for line in plan.warnings)
    assert [m.capacity_gb for m in plan.memory] == [pytest.approx(17.2, abs=0.1)]
    preflight.check(plan, machine_host)
    with pytest.raises(HostError, match=r"which has 17\.2 GB"):
        execute.check_host(*plan_on(machine, "hardware=mi50", "model=qwen3_4b"))
    warnings = plan_on(machine, "hardware=mi50", "hardware.memory_gb=16")[0].warnings
    assert not any("hardware.memory_gb" in line for line in warnings)
    assert capsys.readouterr().err == ""


def test_waits_until_an_earlier_run_releases_its_memory(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    used = f"{machine.device(5)}/mem_info_vram_used"
    machine.write(used, 150 << 30)
    began = time.monotonic()
    preflight.wait_until_released(machine.facts(), 0.01)
    assert time.monotonic() - began < 5
    timer = threading.Timer(0.1, lambda: machine.write(used, 1 << 28))
    timer.start()
    preflight.wait_until_released(machine.facts(), 60)
    timer.join()
    assert time.monotonic() - began < 30


def test_shm_and_groups_of_the_host_are_not_checked_for_containers(tmp_path):
    machine = sysroots.mi300x(tmp_path)
    machine.space = Space(0.06, 0.06)
    machine.remove("dev/kfd")  # the engine says so: launch/execution/docker_engine.py
    names = [set(check_table.before_run(machine.facts(), in_container=c)) for c in (False, True)]
    assert names[0] - names[1] == {"kfd", "render_nodes", "shm"}


def test_runs_on_a_cpu_skip_the_checks(tmp_path, capsys):
    preflight.check(
        make_plan(composed("hardware=cpu"), host_with(0), tmp_path),
        dataclasses.replace(host("python"), sysroot="/"),
    )
    smoke = composed("hardware=mi300x", "model=qwen3_4b", "smoke=true")
    preflight.check(make_plan(smoke, host_with(0), tmp_path), host_with(0))
    assert capsys.readouterr().err == ""


def test_a_cpu_run_larger_than_the_memory_of_the_machine(tmp_path, capsys):
    """The run needs 69 GB in fp32, twice the memory of the machine."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:       34000000 kB\nMemFree:        30000000 kB\n"
    )
    machine = dataclasses.replace(host_with(0), sysroot=str(tmp_path))
    overrides = ["hardware=cpu", "model=qwen3_4b"]
    with pytest.raises(
        HostError,
        match=r"trainers needs \d\d GB of memory, but this machine has 35 GB. Use: smoke=true",
    ):
        preflight.check(make_plan(composed(*overrides), machine, tmp_path), machine)
    preflight.check(make_plan(composed(*overrides, "preflight=warn"), machine, tmp_path), machine)
    assert "but this machine has 35 GB" in capsys.readouterr().err
    preflight.check(make_plan(composed("hardware=cpu"), machine, tmp_path), machine)
    (tmp_path / "proc/meminfo").unlink()
    preflight.check(make_plan(composed(*overrides), machine, tmp_path), machine)  # unknown
    assert capsys.readouterr().err == ""
