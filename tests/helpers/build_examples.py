"""Provide an example of an image, and the versions that a probe finds in it."""

from __future__ import annotations

import dataclasses

from containers.images import Image

DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
HASH = "--hash=sha256:" + "0" * 64
IMAGE = Image(
    name="mine",
    base="example.com/base:1",
    digest=DIGEST,
    python="3.12",
    torch="2.13",
    rocm="7.2.3",
    rccl="2.27.7",
    vllm="0.31.0",
    aiter="0.1.23",
    flash_attn="2.8.3",
    trl="1.16.0",
    gfx=["gfx90a", "gfx942"],
    source="a page",
    dockerfile="Dockerfile",
    locks=["cpu/tools.lock", "cpu/requirements.lock"],
    pushed="unbuilt",
)
OPEN = dataclasses.replace(IMAGE, digest="unverified")
FOUND = {
    "python": "3.12.3",
    "torch": "2.13.0+rocm7.2",
    "rocm": "7.2.0",
    "hip": "7.2.53211",
    "rccl": "2.27.7",
    "vllm": "0.31.0+rocm723",
    "aiter": "0.1.23",
    "flash_attn": "2.8.3",
    "trl": "1.16.0",
    "gfx": "gfx90a gfx942 gfx950",
}
