"""What the last lines of a failed process usually mean, and what helps. The first pattern that fits is the one that is told."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Meaning(NamedTuple):
    pattern: re.Pattern[str]
    text: str


def _meaning(pattern: str, text: str) -> Meaning:
    return Meaning(re.compile(pattern, re.IGNORECASE), text)


MEANINGS = [
    _meaning(
        r"memory access fault by gpu|HSA_STATUS_ERROR_MEMORY_FAULT|illegal memory access",
        "a kernel touched memory that is not its own. debug=memory_fault runs the same again, slowly, so that the fault names its kernel; "
        "a kernel compiled for another GPU (HSA_OVERRIDE_GFX_VERSION) is the first suspect.",
    ),
    _meaning(
        r"(hip|cuda)\w* out of memory|OutOfMemoryError|hipErrorOutOfMemory|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        "the GPU's memory is full. A smaller method.args.per_device_train_batch_size or max_length, method.args.gradient_checkpointing=true, "
        "adapter=lora, or topology=fsdp on more GPUs; mode=plan shows what takes how much.",
    ),
    _meaning(
        r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored in KV cache"
        r"|Free memory on device .* is less than desired",
        "the server has no room for its cache: another process holds this GPU's memory, or the model is too long or too large for it. "
        "topology.server_memory_share= gives it less or more; topology.server_tensor_parallel=N spreads it.",
    ),
    _meaning(
        r"invalid device function|no kernel image is available|HSA_STATUS_ERROR_INVALID_ISA|named symbol not found",
        "a library holds no kernel for this GPU. container= an image that serves it (docs/hardware); unset HSA_OVERRIDE_GFX_VERSION where "
        "the GPU is supported natively.",
    ),
    _meaning(
        r"TensileLibrary.*(not found|cannot|No such file)|rocBLAS error: Cannot read",
        "rocBLAS has no kernels for this GPU (gfx906 left it with ROCm 6.4). Use hardware=mi50's own image, or ROCm 6.3.",
    ),
    _meaning(
        r"Watchdog caught collective operation timeout|ProcessGroupNCCL.*timeout|NCCL.*(timed out|timeout)",
        "one rank did not reach a collective that the others wait in. Look for the rank that failed or hung first; on a fresh machine: "
        "iommu=pt on the host, and NCCL_P2P_DISABLE=1 between consumer cards (docs/hardware).",
    ),
    _meaning(
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|RCCL.*error",
        "RCCL could not set up or use its links. user_env.NCCL_DEBUG=INFO says why; /dev/shm (runtime.shm_gb) and iommu=pt are the usual ones.",
    ),
    _meaning(
        r"address already in use|EADDRINUSE|Errno 98",
        "a port is taken, by another run or a process that was left. `ss -ltnp` names it; the next start takes another port.",
    ),
    _meaning(
        r"RendezvousTimeoutError|rendezvous.*timed? ?out|DistStoreError.*timed out|Timed out after \d+ seconds waiting for clients",
        "not all nodes or ranks came to the rendezvous in time: a node did not start, or cannot reach the first one's port.",
    ),
    _meaning(
        r"couldn't connect to 'https://huggingface|HfHubHTTPError|LocalEntryNotFoundError|Max retries exceeded with url.*huggingface"
        r"|Name or service not known|Temporary failure in name resolution",
        "the hub cannot be reached. model.path=<directory> for weights that are here, data=jsonl data.path=<file>, or HF_HUB_OFFLINE=1 with "
        "a filled cache.",
    ),
    _meaning(
        r"401 Client Error|403 Client Error|GatedRepoError|RepositoryNotFoundError",
        "the hub refuses this model or data set: accept its licence there, and export HF_TOKEN.",
    ),
    _meaning(
        r"No space left on device|Disk quota exceeded", "the disk is full. method.args.save_total_limit=1, or run_root=<a larger disk>."
    ),
    _meaning(
        r"does not support.*bf16|bfloat16 is not supported|\"\w+\" not implemented for 'BFloat16'",
        "this GPU or build does not compute in bf16. precision=fp16 or precision=fp32.",
    ),
    _meaning(
        r"Failed to load .*flash.?attn|flash_attn.*undefined symbol", "flash-attention does not fit this torch. hardware.attention=sdpa."
    ),
    _meaning(
        r"exitcode\s*: -9|Signal 9 \(SIGKILL\)",
        "a rank was killed from outside: most often the kernel, for the host's memory (`dmesg | grep -i oom`). "
        "hardware.dataloader.num_workers=0, or a smaller model.",
    ),
    _meaning(
        r"exitcode\s*: -(7|11)|Signal (7|11) |Segmentation fault|Bus error",
        "a rank crashed in native code. SIGBUS is most often a full /dev/shm (runtime.shm_gb); else user_env.AMD_SERIALIZE_KERNEL=3 or "
        "debug=memory_fault finds the kernel.",
    ),
]


def of(lines: Iterable[str]) -> str | None:
    """What these lines mean, or None where the table has nothing for them."""
    text = "\n".join(lines)
    return next((meaning.text for meaning in MEANINGS if meaning.pattern.search(text)), None)
