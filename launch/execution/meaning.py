"""Tell what the last lines of a failed process usually mean, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOST_ANOTHER = (
    "this process lost another one, a rank or the server, which ended first. The reason is "
    "further up, or in the other's log."
)

# (pattern, its meaning). The first pattern that matches decides.
MEANINGS = [
    # This is first because ROCr also reports it as HSA_STATUS_ERROR_OUT_OF_RESOURCES
    # (ROCm/rocminfo#34). Source: ROCm/ROCm-docker#90, #116
    (
        r"/dev/(?:kfd|dri/\w+).*(?:Permission denied|Operation not permitted)"
        r"|(?:Permission denied|Operation not permitted).*/dev/(?:kfd|dri)",
        "you may not open the GPU's device. `ls -ln /dev/kfd /dev/dri/renderD*` shows its groups "
        "(render, video): join them and log in again. Your own container needs their numbers "
        "(--group-add). python launch/doctor.py checks all of it.",
    ),
    (
        r"memory access fault by gpu|HSA_STATUS_ERROR_MEMORY_(?:FAULT|APERTURE_VIOLATION)"
        r"|illegal memory access",
        "a kernel touched memory that is not its own. debug=memory_fault repeats the run slowly "
        "and names the kernel. First suspects on AMD: HSA_OVERRIDE_GFX_VERSION on a supported "
        "GPU; on Strix Halo, a kernel before 6.18.4 or linux-firmware before 20260110.",
    ),
    (
        r"HW Exception by GPU.*(?:hang|reset)|GPU Hang|hipErrorLaunchTimeOut|amdgpu: GPU reset",
        "the GPU hung, and the driver reset it. `dmesg | grep -i amdgpu` says more; XGMI and RAS "
        "errors mean broken hardware. On Strix Halo: user_env.HSA_ENABLE_SDMA=0, "
        "hardware.dataloader.num_workers=0 and hardware.dataloader.pin_memory=false.",
    ),
    (
        r"(?:hip|cuda) out of memory|torch\.OutOfMemoryError|hipErrorOutOfMemory|(?:hip"
        r"|cuda) error: out of memory",
        "the GPU's memory is full. For ranks: a smaller method.args.per_device_train_batch_size "
        "or max_length, method.args.gradient_checkpointing=true, adapter=lora, or topology=fsdp "
        "on more GPUs; mode=plan shows what takes how much. For a server: a smaller "
        "topology.server_memory_share. If much is `reserved by PyTorch but unallocated`: "
        "user_env.PYTORCH_ALLOC_CONF=expandable_segments:True, on NVIDIA without vLLM only "
        "(docs/memory.md, Pieces).",
    ),
    # Source: pytorch/pytorch#128601 (memory is full), #193890 (memory is not full)
    (
        r"(?:HIP|CU)BLAS_STATUS_ALLOC_FAILED|rocblas_status_memory_error",
        "the library of matrix products got no memory. Most often the GPU's is full, in torch's "
        "cache or by another process: a smaller method.args.per_device_train_batch_size or "
        "max_length. If much is free, one batched operation exceeds torch's workspace.",
    ),
    # Source: ROCm/rocm-systems#3461, #5686 (code built for another GPU)
    (
        r"HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION|illegal shader instruction"
        r"|an illegal instruction was encountered",
        "the GPU met an instruction that it does not have, usually code for another GPU. unset "
        "HSA_OVERRIDE_GFX_VERSION if the GPU is supported; container=auto takes the right image; "
        "debug=memory_fault finds the kernel.",
    ),
    # Source: HIP's list of error codes (hipErrorLaunchFailure)
    (
        r"unspecified launch failure|(?:hip|cuda)ErrorLaunchFailure",
        "a kernel ended in an exception on the GPU, perhaps launched earlier than where Python "
        "stood. debug=memory_fault runs kernels one by one; `dmesg | grep -i amdgpu` may say why.",
    ),
    # Source: triton.runtime.errors.OutOfResources; vllm-project/vllm#56021
    (
        r"out of resource: shared memory",
        "a Triton kernel needs more shared memory (LDS) than this GPU has. For ranks: "
        "method.args.use_liger_kernel=false, method.args.torch_compile=false. For vLLM on "
        "Radeon: unset VLLM_ROCM_USE_AITER.",
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        "some weights took no part in a step's loss, as experts of a mixture may: "
        "method.args.ddp_find_unused_parameters=true.",
    ),
    (
        r"HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        "ROCr had no queue, scratch memory or other resource left, often because the GPU's "
        "memory is full. AMD's workaround on Instinct: "
        "user_env.HSA_ENABLE_SCRATCH_ASYNC_RECLAIM=0 and user_env.HSA_NO_SCRATCH_RECLAIM=1.",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory"
        r"|larger than the maximum number of tokens that can be stored"
        r"|Free memory on device .* is less than desired",
        "the server has no room for its cache: another process holds this GPU's memory, or the "
        "model is too large. topology.server_max_length=N shortens it, "
        "topology.server_memory_share= changes its part of the GPU, "
        "topology.server_tensor_parallel=N spreads it; topology.server_cache_gb may be too small.",
    ),
    (
        r"Error in memory profiling\. Initial free memory",
        "another process freed memory while vLLM measured how much is free. Start again, or set "
        "topology.server_cache_gb=N so that vLLM does not measure.",
    ),
    (
        r"TensileLibrary.*(?:not found|cannot|No such file|Illegal seek)"
        r"|rocBLAS error: Cannot read",
        "rocBLAS has no kernels for this GPU. container=rocm_gfx906 has them for gfx906, which "
        "left rocBLAS with ROCm 6.4; without a container, use ROCm 6.3.",
    ),
    (
        r"unsupported target: 'gfx906'",
        "this Triton compiles nothing for gfx906: 3.7 rejects it, 3.8 takes it, as in "
        "container=rocm_gfx906. Without a container: pip uninstall triton pytorch-triton-rocm; "
        "TRL's head then computes in torch and needs more memory than the plan says.",
    ),
    (
        r"invalid device function|no kernel image is available|HSA_STATUS_ERROR_INVALID_(?:ISA"
        r"|CODE_OBJECT)|named symbol not found|device kernel image is invalid"
        r"|hipErrorNoBinaryForGpu",
        "a library holds no kernel for this GPU. container=auto takes the right image; unset "
        "HSA_OVERRIDE_GFX_VERSION if the GPU is supported; HIP_VISIBLE_DEVICES leaves out an "
        "integrated GPU next to the card.",
    ),
    (
        r"No (?:HIP|CUDA) GPUs are available|hipErrorNoDevice|no ROCm-capable device"
        r"|invalid device ordinal",
        "the process sees no GPU, or fewer than planned. Join the groups of /dev/kfd and "
        "/dev/dri/renderD* (render, video), or fix HIP_VISIBLE_DEVICES.",
    ),
    (
        r"/dev/shm.*No space left|unable to (?:write to|mmap|open|resize) .*torch_"
        r"|creating shared memory segment|out of shared memory|insufficient shared memory",
        "/dev/shm is too small. In a container: runtime.shm_gb=N. Without one: "
        "mount -o remount,size=NG /dev/shm.",
    ),
    (
        r"collective operation timeout|ProcessGroup\w+.*(?:before timing out|timed out)"
        r"|Timed out waiting \d+ms for (?:recv|send) operation",
        "one rank did not reach a collective in which the others wait. Look for the rank that "
        "failed or hung first. On a new machine: iommu=pt on the host, and "
        "user_env.NCCL_P2P_DISABLE=1 between consumer cards.",
    ),
    (r"ncclRemoteError|remote process (?:has )?(?:exited|terminated)", LOST_ANOTHER),
    (
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclInvalidUsage",
        "RCCL could not set up or use its links. user_env.NCCL_DEBUG=INFO says why; usually a "
        "small /dev/shm (runtime.shm_gb) or a host without iommu=pt.",
    ),
    (
        r"address already in use|EADDRINUSE|Errno 98\b",
        "a port is taken by another run or a leftover process. `ss -ltnp` names it; the same "
        "command again takes another port.",
    ),
    (
        r"RendezvousTimeoutError|rendezvous.*timed? ?out|DistStoreError.*timed out"
        r"|Timed out after \d+ seconds waiting for clients",
        "not all nodes or ranks came to the rendezvous in time: a node did not start, or cannot "
        "reach the first node's port.",
    ),
    (
        r"GatedRepoError|RepositoryNotFoundError|Cannot access gated repo"
        r"|40[13] Client Error.*huggingface",
        "the hub refuses this model or data set: its name is wrong, or it is private or gated. "
        "Accept its licence there and export HF_TOKEN.",
    ),
    # Keep this before the unreachable hub, since transformers turns this error into that one.
    # Source: huggingface.co/docs/hub/rate-limits
    (
        r"\b429 (?:Client Error|Too Many Requests).*huggingface"
        r"|429 Too Many Requests: you have reached your '",
        "the hub was asked too often from this address or account. Start again in five minutes; "
        "HF_TOKEN allows more; model.path=<directory> or user_env.HF_HUB_OFFLINE=1 with a filled "
        "cache asks nothing.",
    ),
    (
        r"couldn't connect to '?https://huggingface|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|cannot find the requested files in the (?:disk|local) cache|(?:Max retries exceeded"
        r"|ConnectTimeout|ConnectionError|ConnectError).*huggingface"
        r"|huggingface.*(?:Max retries exceeded|timed out)",
        "the hub cannot be reached. Use model.path=<directory> and data=jsonl data.path=<file>, "
        "or user_env.HF_HUB_OFFLINE=1 with a filled cache.",
    ),
    (
        r"Name or service not known|Temporary failure in name resolution|getaddrinfo failed",
        "a name cannot be resolved, because this machine or its container has no network or name "
        "server. Without a network: model.path=<directory>, data=jsonl or data=reasoning, "
        "tracking=none.",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full. method.args.save_total_limit=1, or run_root=<a larger disk>.",
    ),
    (
        r"does(?:n't| not) support.*\b(?:bf16|bfloat16)|b(?:float|f)16 is (?:not|only) supported"
        r"|\"\w+\" not implemented for 'BFloat16'",
        "this GPU or build does not compute in bf16. precision=fp16 or precision=fp32.",
    ),
    (
        r"Failed to load .*flash.?attn|flash_attn.*undefined symbol|FlashAttention only supports",
        "flash-attention does not fit this torch or this GPU. hardware.attention=sdpa.",
    ),
    (
        r"unrecognized arguments:.*--(?:weight-transfer-config|logprobs-mode)"
        r"|No module named '?vllm",
        "this vLLM is missing or does not work with TRL's server mode. The images of container= "
        "have one that does (containers/images.lock.yaml).",
    ),
    (
        r"signal 9 \(SIGKILL\)|died unexpectedly \(exit code: (?:-9|None)\)"
        r"|DefaultCPUAllocator: (?:can't|not enough)|^MemoryError\b|\] MemoryError\b"
        r"|Cannot allocate memory",
        "the host's memory is full (`dmesg | grep -i oom` shows what the kernel killed), or "
        "somebody killed the process. hardware.dataloader.num_workers=0, or a smaller model.",
    ),
    (
        r"signal (?:7|11) \(|Segmentation fault|Bus error",
        "the process crashed in native code. SIGBUS (7) is most often a full /dev/shm "
        "(runtime.shm_gb). For SIGSEGV (11), debug=memory_fault finds a kernel of the GPU.",
    ),
    # This is last, because any other message explains more.
    (
        r"Connection (?:closed|reset) by peer|TCPStore.*(?:Broken pipe|Connection)"
        r"|failed to recv, got 0 bytes",
        LOST_ANOTHER,
    ),
]


def of(lines: Iterable[str]) -> str | None:
    """Return what these lines mean; None if no pattern matches."""
    text = "\n".join(lines)
    flags = re.IGNORECASE | re.MULTILINE
    return next((meaning for row, meaning in MEANINGS if re.search(row, text, flags)), None)
