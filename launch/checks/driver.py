"""Kernel driver, ROCm, kernel and firmware: whether their versions go with one another and with the GPU."""

from __future__ import annotations

import re

from containers import images
from launch.checks.facts import Facts
from launch.checks.finding import Expected, Finding
from launch.machine.sysfs import is_folder
from launch.schema import Hardware

# Month of each ROCm release, as (year, month): AMD's release notes. That of 7.14 is from the first images that hold it.
RELEASED = {
    "6.1": (2024, 4),
    "6.2": (2024, 8),
    "6.3": (2024, 12),
    "6.4": (2025, 4),
    "7.0": (2025, 9),
    "7.1": (2025, 10),
    "7.2": (2026, 1),
    "7.14": (2026, 7),
}
# Version of the module amdgpu, as AMD packages it -> the ROCm that it came out with.
CAME_WITH = {"6.7": "6.1", "6.8": "6.2", "6.10": "6.3", "6.12": "6.4", "6.14": "7.0", "6.16": "7.1", "6.19": "7.14"}
# AMD promises a year; the pairs that its table lists are up to 13 months apart (6.2 with 7.0), and none that is further.
MONTHS_APART = 13
MATRIX = "AMD's user and kernel-space support matrix"
UBUNTU_HWE = re.compile(r"6\.17\.\d+-\d+-(generic|oem)")  # has the fixes that Strix Halo needs (AMD's documentation)
FIRMWARE_CURE = (
    "install the newest linux-firmware of your distribution (Ubuntu: sudo apt-get install --only-upgrade linux-firmware), then reboot"
)


def version(text: str) -> tuple[int, ...]:
    """7.2.3-81 is (7, 2, 3)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def amdgpu_driver(facts: Facts) -> Finding | None:
    if not facts.is_amd:
        return None
    rocm = image_rocm(facts.hardware)
    expected = Expected(f"a driver within a year of the image's ROCm {rocm}" if rocm else "loaded", MATRIX)
    found = facts.file("sys/module/amdgpu/version")
    if found is None and not is_folder(facts.root / "sys/module"):
        return expected.unknown("this tree holds no sys/module", "cat /sys/module/amdgpu/version")
    if not is_folder(facts.root / "sys/module/amdgpu") and not facts.amd_gpus and not facts.host.withheld:
        return expected.fail("amdgpu is not loaded", "sudo modprobe amdgpu; where that fails: sudo dmesg | grep -i amdgpu")
    kernel = facts.file("proc/sys/kernel/osrelease") or "unknown"
    if found is None:
        return expected.unknown(
            f"the kernel's own driver (Linux {kernel}), for which AMD states no range",
            "nothing while runs start; else AMD's packaged driver: sudo apt-get install amdgpu-dkms",
        )
    came_with = CAME_WITH.get(".".join(found.split(".")[:2]))
    released = rocm and RELEASED.get(".".join(rocm.split(".")[:2]))
    if not came_with or not released:
        return expected.unknown(f"amdgpu {found}, image ROCm {rocm or 'unknown'}", f"compare the two in {MATRIX} (rocm.docs.amd.com)")
    driver = RELEASED[came_with]
    apart = abs((driver[0] - released[0]) * 12 + driver[1] - released[1])
    read = f"amdgpu {found} (of ROCm {came_with}), {apart} months from ROCm {rocm}"
    if apart <= MONTHS_APART:
        return expected.passed(read)
    older = "sudo apt-get install amdgpu-dkms from AMD's repository of a newer release, then reboot"
    return expected.warn(
        read, older if driver < released else "an image with a newer ROCm: container=<name>, see containers/images.lock.yaml"
    )


def image_rocm(hardware: Hardware | None) -> str | None:
    """ROCm of the image that serves a GPU; None where there is none or nobody states it."""
    image = images.load().get(hardware.container) if hardware else None
    return None if image is None or image.rocm in (images.NONE, images.UNKNOWN) else image.rocm


def rocm_version(facts: Facts) -> Finding | None:
    if facts.hardware is None or facts.hardware.rocm is None:
        return None
    oldest, newest = facts.hardware.rocm.min, facts.hardware.rocm.max
    words = f"{oldest} to {newest}" if newest else f"{oldest} or later"
    expected = Expected(words, f"conf/hardware: rocm of {facts.group}")
    found = facts.file("opt/rocm/.info/version")
    if found is None:
        return expected.passed("no ROCm in /opt/rocm: images and wheels bring their own")
    too_new = newest is not None and version(found)[:2] > version(newest)
    if version(found) >= version(oldest) and not too_new:
        return expected.passed(found)
    return expected.warn(f"{found} in /opt/rocm", f"runtime=docker container={facts.hardware.container}, which brings its own")


def kernel_version(facts: Facts) -> Finding | None:
    if facts.needs.kernel is None:
        return None
    expected = Expected(f"Linux {facts.needs.kernel} or later, or Ubuntu's 6.17", f"conf/hardware: host.kernel of {facts.group}")
    found = facts.file("proc/sys/kernel/osrelease")
    cure = f"install Linux {facts.needs.kernel} or later (Ubuntu 24.04: sudo apt-get install linux-generic-hwe-24.04), then reboot"
    if found is None:
        return expected.unknown("/proc/sys/kernel/osrelease cannot be read", "uname -r")
    if version(found) >= version(facts.needs.kernel) or UBUNTU_HWE.fullmatch(found):
        return expected.passed(found)
    return expected.fail(found, cure)


def linux_firmware(facts: Facts) -> Finding | None:
    if facts.needs.linux_firmware is None:
        return None
    expected = Expected(f"{facts.needs.linux_firmware} or later", f"conf/hardware: host.linux_firmware of {facts.group}")
    found = _packaged_firmware(facts)
    if found is None:
        return expected.unknown("no record of the package linux-firmware (dpkg's and pacman's are read)", "rpm -q linux-firmware")
    if found[:8] >= facts.needs.linux_firmware:
        return expected.passed(found)
    if "ubuntu" in found:
        return expected.unknown(f"{found}: Ubuntu keeps the date and adds newer files", "apt-get changelog linux-firmware")
    return expected.fail(found, FIRMWARE_CURE)


def _packaged_firmware(facts: Facts) -> str | None:
    """Its version, which begins with a date, YYYYMMDD, as Debian's or Arch's package database has it."""
    dpkg = re.search(r"^Package: linux-firmware\n(?:.+\n)*?Version: (\d{8}\S*)", facts.file("var/lib/dpkg/status") or "", re.MULTILINE)
    if dpkg:
        return dpkg.group(1)
    folders = sorted((facts.root / "var/lib/pacman/local").glob("linux-firmware-[0-9]*"))
    pacman = re.match(r"linux-firmware-(\d{8})", folders[-1].name) if folders else None
    return pacman.group(1) if pacman else None


def gpu_firmware(facts: Facts) -> Finding | None:
    oldest = facts.needs.mec_firmware
    if oldest is None or not facts.amd_gpus:
        return None
    expected = Expected(f"MEC firmware {oldest} or later", f"conf/hardware: host.mec_firmware of {facts.group}")
    found = sorted({gpu.firmware for gpu in facts.amd_gpus if gpu.firmware is not None})
    if not found:
        return expected.unknown("the topology states no fw_version", "amd-smi firmware")
    if found[0] >= oldest:
        return expected.passed(f"MEC firmware {', '.join(map(str, found))}")
    return expected.warn(
        f"MEC firmware {', '.join(map(str, found))}",
        "keep HSA_NO_SCRATCH_RECLAIM=1, which plans for this GPU set; newer firmware comes with amdgpu-dkms-firmware",
    )
