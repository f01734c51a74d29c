"""Check that the versions of driver, ROCm, kernel and firmware match each other and the GPU."""

from __future__ import annotations

import re

from containers import images
from launch.checks.facts import Facts
from launch.checks.finding import Finding, fail, fail_or_warn, judge, passed, unknown, warn
from launch.machine.detect import DKMS, IN_TREE
from launch.machine.sysfs import is_folder

# fmt: off
# Month of each ROCm release, as (year, month), from AMD's release notes; for 7.14, the
# month of its first images.
RELEASED = {
    "6.1": (2024, 4), "6.2": (2024, 8), "6.3": (2024, 12), "6.4": (2025, 4),
    "7.0": (2025, 9), "7.1": (2025, 10), "7.2": (2026, 1), "7.14": (2026, 7),
}
# Version of AMD's packaged amdgpu module -> the ROCm release that shipped it.
CAME_WITH = {
    "6.7": "6.1", "6.8": "6.2", "6.10": "6.3", "6.12": "6.4",
    "6.14": "7.0", "6.16": "7.1", "6.19": "7.14",
}
# fmt: on
# AMD promises compatibility for a year. Its matrix has pairs up to 13 months apart (6.2 with 7.0).
MAX_MONTHS_APART = 13
MATRIX = "AMD's user and kernel-space support matrix"
LEGACY_IPC = "HSA_ENABLE_IPC_MODE_LEGACY"
# Ubuntu's kernels with the fixes for Strix Halo (AMD's documentation).
UBUNTU_HWE = re.compile(r"6\.17\.\d+-\d+-(generic|oem)")
FIRMWARE_REMEDY = (
    "install the newest linux-firmware of your distribution "
    "(Ubuntu: sudo apt-get install --only-upgrade linux-firmware), then reboot"
)


def version(text: str) -> tuple[int, ...]:
    """Return the version as a tuple, such as (7, 2, 3) for 7.2.3-81."""
    number = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in number[0].split(".")) if number else ()


def amdgpu_driver(facts: Facts) -> Finding:
    image = images.load().get(facts.hardware.container) if facts.hardware else None
    rocm = image.rocm if image and image.rocm not in (images.NONE, images.UNKNOWN) else None
    number = facts.file("sys/module/amdgpu/version")
    if number is None and not is_folder(facts.root / "sys/module"):
        return unknown("this tree has no sys/module", "cat /sys/module/amdgpu/version")
    has_gpu = facts.amd_gpus or facts.host.withheld
    if not is_folder(facts.root / "sys/module/amdgpu") and not has_gpu:
        remedy = "sudo modprobe amdgpu; if that fails: sudo dmesg | grep -i amdgpu"
        return fail("amdgpu is not loaded", remedy)
    if number is None:
        kernel = facts.file("proc/sys/kernel/osrelease") or "unknown"
        return unknown(
            f"the built-in driver of Linux {kernel}; AMD publishes no ROCm range for it",
            "do nothing if runs start; otherwise install AMD's packaged driver: sudo apt-get "
            "install amdgpu-dkms",
        )
    came_with = CAME_WITH.get(".".join(number.split(".")[:2]))
    released = RELEASED.get(".".join(rocm.split(".")[:2])) if rocm else None
    if not came_with or not released:
        reading = f"amdgpu {number}, image ROCm {rocm or 'unknown'}"
        return unknown(reading, f"compare the two in {MATRIX} (rocm.docs.amd.com)")
    driver = RELEASED[came_with]
    apart = abs((driver[0] - released[0]) * 12 + driver[1] - released[1])
    remedy = "use an image with a newer ROCm: container=<name in containers/images.lock.yaml>"
    if driver < released:
        remedy = (
            "add AMD's repository of a newer release, sudo apt-get install amdgpu-dkms, then reboot"
        )
    reading = f"amdgpu {number} of ROCm {came_with}, released {apart} months apart from ROCm {rocm}"
    finding = judge(reading, apart <= MAX_MONTHS_APART, remedy, "")
    return finding.expecting(f"a driver within a year of the image's ROCm {rocm}")


def gpu_ipc(facts: Facts) -> Finding | None:
    """Compare the mode in which processes share GPU memory with the modes of the driver."""
    if len(facts.amd_gpus) < 2:
        return None
    driver, value = facts.host.amdgpu, facts.host.environ.get(LEGACY_IPC)
    suits = "1" if driver == DKMS else "0"
    reading = f"{driver}, {LEGACY_IPC} {'unset' if value is None else f'is {value}'}"
    if value in (None, suits):
        return passed(reading)
    remedy = f"unset {LEGACY_IPC} (or user_env.{LEGACY_IPC}), because runs set it to {suits}"
    return fail_or_warn(driver == IN_TREE, reading, remedy)


def rocm_version(facts: Facts) -> Finding | None:
    if facts.hardware is None or facts.hardware.rocm is None:
        return None
    oldest, newest = facts.hardware.rocm.min, facts.hardware.rocm.max
    expected = f"{oldest} to {newest}" if newest else f"{oldest} or later"
    number = facts.file("opt/rocm/.info/version")
    remedy = f"runtime=docker container={facts.hardware.container}, whose image contains ROCm"
    if number is None:
        finding = passed("no ROCm in /opt/rocm; images and PyTorch wheels include ROCm")
    elif version(number) < version(oldest) or (newest and version(number)[:2] > version(newest)):
        finding = warn(f"{number} in /opt/rocm", remedy)
    else:
        finding = passed(number)
    return finding.expecting(expected)


def kernel_version(facts: Facts) -> Finding:
    oldest = facts.needs.kernel or ""
    kernel = facts.file("proc/sys/kernel/osrelease")
    if kernel is None:
        return unknown("/proc/sys/kernel/osrelease cannot be read", "uname -r")
    if version(kernel) >= version(oldest) or UBUNTU_HWE.fullmatch(kernel):
        return passed(kernel)
    remedy = (
        f"install Linux {oldest} or later (Ubuntu 24.04: sudo apt-get install "
        "linux-generic-hwe-24.04), then reboot"
    )
    return fail(kernel, remedy)


def linux_firmware(facts: Facts) -> Finding:
    """Check the date at the start of the version of Debian's or Arch's package."""
    pattern = r"^Package: linux-firmware\n(?:.+\n)*?Version: (\d{8}\S*)"
    package = re.search(pattern, facts.file("var/lib/dpkg/status") or "", re.MULTILINE)
    folders = sorted((facts.root / "var/lib/pacman/local").glob("linux-firmware-[0-9]*"))
    if package is None and folders:
        package = re.match(r"linux-firmware-(\d{8})", folders[-1].name)
    if package is None:
        reading = "neither dpkg nor pacman has a record of linux-firmware"
        return unknown(reading, "rpm -q linux-firmware")
    if package[1][:8] >= (facts.needs.linux_firmware or ""):
        return passed(package[1])
    if "ubuntu" in package[1]:
        reading = f"{package[1]}: Ubuntu adds newer files without changing the date"
        return unknown(reading, "apt-get changelog linux-firmware")
    return fail(package[1], FIRMWARE_REMEDY)


def gpu_firmware(facts: Facts) -> Finding | None:
    if not facts.amd_gpus:
        return None
    oldest = facts.needs.mec_firmware or 0
    numbers = sorted({gpu.firmware for gpu in facts.amd_gpus if gpu.firmware is not None})
    reading = f"MEC firmware {', '.join(map(str, numbers))}" if numbers else None
    remedy = (
        "keep HSA_NO_SCRATCH_RECLAIM=1, which the launcher sets for this GPU, or install newer "
        "firmware: sudo apt-get install amdgpu-dkms-firmware"
    )
    return judge(reading, bool(numbers) and numbers[0] >= oldest, remedy, "amd-smi firmware")
