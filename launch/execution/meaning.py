"""Tell what the last lines of a failed process usually mean, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOST_ANOTHER = (
    "this process lost another one, a rank or the server, which ended first: the reason is "
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
        "(render, video): join them and log in again; a container of your own needs their "
        "numbers on the host (--group-add). python launch/doctor.py looks at all of it.",
    ),
    (
        r"memory access fault by gpu|HSA_STATUS_ERROR_MEMORY_(?:FAULT|APERTURE_VIOLATION)"
        r"|illegal memory access",
        "a kernel touched memory that is not its own. debug=memory_fault runs the same again, "
        "slowly, so that the fault names its kernel. On AMD the first suspects are "
        "HSA_OVERRIDE_GFX_VERSION on a GPU that is supported without it, and on Strix Halo a "
        "kernel before 6.18.4 or a linux-firmware before 20260110.",
    ),
    (
        r"HW Exception by GPU.*(?:hang|reset)|GPU Hang|hipErrorLaunchTimeOut|amdgpu: GPU reset",
        "the GPU hung, and the driver reset it: `dmesg | grep -i amdgpu` says more (XGMI and RAS "
        "errors mean broken hardware). On Strix Halo: user_env.HSA_ENABLE_SDMA=0, "
        "hardware.dataloader.num_workers=0 and hardware.dataloader.pin_memory=false.",
    ),
    (
        r"(?:hip|cuda) out of memory|torch\.OutOfMemoryError|hipErrorOutOfMemory|(?:hip"
        r"|cuda) error: out of memory",
        "the GPU's memory is full. For ranks: a smaller method.args.per_device_train_batch_size "
        "or max_length, method.args.gradient_checkpointing=true, adapter=lora, or topology=fsdp "
        "on more GPUs (mode=plan shows what takes how much). Where much is `reserved by PyTorch "
        "but unallocated`: user_env.PYTORCH_ALLOC_CONF=expandable_segments:True on NVIDIA "
        "without vLLM; on AMD, where that can hang, max_split_size_mb:128 may help and is slower "
        "(docs/memory.md, Pieces). For a server: a smaller topology.server_memory_share.",
    ),
    # Source: pytorch/pytorch#128601 (memory is full), #193890 (memory is not full)
    (
        r"(?:HIP|CU)BLAS_STATUS_ALLOC_FAILED|rocblas_status_memory_error",
        "the library of matrix products got no memory for itself: most often the GPU's is full, "
        "in torch's cache or by another process. A smaller "
        "method.args.per_device_train_batch_size or max_length. Where much is free, one batched "
        "operation needs more than the workspace that torch has set aside.",
    ),
    # Source: ROCm/rocm-systems#3461, #5686 (code built for another GPU)
    (
        r"HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION|illegal shader instruction"
        r"|an illegal instruction was encountered",
        "the GPU met an instruction that it does not have: code for another one, as a rule. "
        "unset HSA_OVERRIDE_GFX_VERSION where the GPU is supported without it; container=auto "
        "takes the image that serves it. debug=memory_fault finds the kernel.",
    ),
    # Source: HIP's list of error codes (hipErrorLaunchFailure)
    (
        r"unspecified launch failure|(?:hip|cuda)ErrorLaunchFailure",
        "a kernel ended in an exception on the GPU, and the driver says no more; where Python "
        "stood need not be where it was launched. debug=memory_fault runs kernels one by one and "
        "finds it; `dmesg | grep -i amdgpu` may know the reason.",
    ),
    # Source: triton.runtime.errors.OutOfResources; vllm-project/vllm#56021
    (
        r"out of resource: shared memory",
        "a Triton kernel wants more shared memory (LDS) than a workgroup of this GPU gets: its "
        "blocks were chosen for another. For ranks: method.args.use_liger_kernel=false, "
        "method.args.torch_compile=false. For vLLM on Radeon: no VLLM_ROCM_USE_AITER.",
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        (
            "some weights took no part in a step's loss, as experts of a mixture may: "
            "method.args.ddp_find_unused_parameters=true."
        ),
    ),
    (
        r"HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        "ROCr had no queue, scratch memory or other resource of the GPU left; often that is the "
        "GPU's memory, taken by this or another process. AMD's own way around it on Instinct: "
        "user_env.HSA_ENABLE_SCRATCH_ASYNC_RECLAIM=0 and user_env.HSA_NO_SCRATCH_RECLAIM=1.",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory"
        r"|larger than the maximum number of tokens that can be stored"
        r"|Free memory on device .* is less than desired",
        "the server has no room for its cache: another process holds this GPU's memory, or the "
        "model is too long or too large for it. topology.server_max_length=N shortens it, "
        "topology.server_memory_share= gives it less or more of the GPU, "
        "topology.server_tensor_parallel=N spreads it. Where topology.server_cache_gb is given, "
        "it may be too small.",
    ),
    (
        r"Error in memory profiling\. Initial free memory",
        "another process gave memory back while vLLM measured how much it may take, and vLLM "
        "gives up then. Start again; topology.server_cache_gb=N has it take so much without "
        "measuring.",
    ),
    (
        r"TensileLibrary.*(?:not found|cannot|No such file|Illegal seek)"
        r"|rocBLAS error: Cannot read",
        "rocBLAS has no kernels for this GPU (gfx906 left it with ROCm 6.4). The image that the "
        "hardware names has them (container=rocm_gfx906 for gfx906); outside of one, ROCm 6.3.",
    ),
    (
        r"unsupported target: 'gfx906'",
        "this Triton compiles nothing for gfx906: 3.7 refuses it, 3.8 takes it. TRL's head "
        "launches Triton's kernels wherever one is installed. container=rocm_gfx906 holds 3.8; "
        "outside of it, pip uninstall triton pytorch-triton-rocm: the head then computes in "
        "torch, which takes more memory than the plan says.",
    ),
    (
        r"invalid device function|no kernel image is available|HSA_STATUS_ERROR_INVALID_(?:ISA"
        r"|CODE_OBJECT)|named symbol not found|device kernel image is invalid"
        r"|hipErrorNoBinaryForGpu",
        "a library holds no kernel for this GPU. container=auto takes the image that serves it; "
        "unset HSA_OVERRIDE_GFX_VERSION where the GPU is supported without it; where an "
        "integrated GPU stands beside the card, HIP_VISIBLE_DEVICES leaves it out.",
    ),
    (
        r"No (?:HIP|CUDA) GPUs are available|hipErrorNoDevice|no ROCm-capable device"
        r"|invalid device ordinal",
        "the process sees no GPU, or fewer than it was given: you are not in the groups that may "
        "open /dev/kfd and /dev/dri/renderD* (render, video), or HIP_VISIBLE_DEVICES names a GPU "
        "that is not there.",
    ),
    (
        r"/dev/shm.*No space left|unable to (?:write to|mmap|open|resize) .*torch_"
        r"|creating shared memory segment|out of shared memory|insufficient shared memory",
        (
            "/dev/shm is too small. runtime.shm_gb=N gives a container more; outside of one: "
            "mount -o remount,size=NG /dev/shm."
        ),
    ),
    (
        r"collective operation timeout|ProcessGroup\w+.*(?:before timing out|timed out)"
        r"|Timed out waiting \d+ms for (?:recv|send) operation",
        "one rank did not reach a collective that the others wait in. Look for the rank that "
        "failed or hung first; on a fresh machine: iommu=pt on the host, and "
        "user_env.NCCL_P2P_DISABLE=1 between consumer cards.",
    ),
    (r"ncclRemoteError|remote process (?:has )?(?:exited|terminated)", LOST_ANOTHER),
    (
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclInvalidUsage",
        "RCCL could not set up or use its links. user_env.NCCL_DEBUG=INFO says why; a small "
        "/dev/shm (runtime.shm_gb) and a host without iommu=pt are the usual reasons.",
    ),
    (
        r"address already in use|EADDRINUSE|Errno 98\b",
        (
            "a port is taken, by another run or a process that was left. `ss -ltnp` names it; "
            "the same command again takes another port."
        ),
    ),
    (
        r"RendezvousTimeoutError|rendezvous.*timed? ?out|DistStoreError.*timed out"
        r"|Timed out after \d+ seconds waiting for clients",
        (
            "not all nodes or ranks came to the rendezvous in time: a node did not start, or "
            "cannot reach the first one's port."
        ),
    ),
    (
        r"GatedRepoError|RepositoryNotFoundError|Cannot access gated repo"
        r"|40[13] Client Error.*huggingface",
        (
            "the hub refuses this model or data set: a wrong name, or it is private or gated: "
            "accept its licence there and export HF_TOKEN."
        ),
    ),
    # Keep this before the unreachable hub, since transformers turns this error into that one.
    # Source: huggingface.co/docs/hub/rate-limits
    (
        r"\b429 (?:Client Error|Too Many Requests).*huggingface"
        r"|429 Too Many Requests: you have reached your '",
        "the hub was asked too often from this address or account; it counts over five minutes. "
        "Start again after that; export HF_TOKEN, which is allowed more; model.path=<directory> "
        "or user_env.HF_HUB_OFFLINE=1 with a filled cache asks nothing.",
    ),
    (
        r"couldn't connect to '?https://huggingface|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|cannot find the requested files in the (?:disk|local) cache|(?:Max retries exceeded"
        r"|ConnectTimeout|ConnectionError|ConnectError).*huggingface"
        r"|huggingface.*(?:Max retries exceeded|timed out)",
        "the hub cannot be reached. model.path=<directory> for weights that are here, data=jsonl "
        "data.path=<file>, or user_env.HF_HUB_OFFLINE=1 with a filled cache.",
    ),
    (
        r"Name or service not known|Temporary failure in name resolution|getaddrinfo failed",
        "a name cannot be resolved: this machine, or its container, has no network or no name "
        "server. Where that is meant to be so: model.path=<directory>, data=jsonl or "
        "data=reasoning, tracking=none.",
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
        "this vLLM is not one that TRL's server mode works with, or it is not there. The images "
        "of container= hold one that is (containers/images.lock.yaml).",
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
        "(runtime.shm_gb); for SIGSEGV (11) debug=memory_fault finds the GPU's kernel, if it was "
        "one.",
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
    return next((told for pattern, told in MEANINGS if re.search(pattern, text, flags)), None)
