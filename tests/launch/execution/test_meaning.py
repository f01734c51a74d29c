"""Test each row of meaning.py by real messages, and that no row claims to know others."""

from __future__ import annotations

import re

import pytest

from launch.config.request import Request
from launch.execution.meaning import MEANINGS, of

# Part of an explanation -> messages of drivers, ROCm, PyTorch, vLLM, the hub and Python.
SAMPLES = {
    "you may not open the GPU's device": [
        "Unable to open /dev/kfd read-write: Permission denied",
        "Unable to open /dev/kfd read-write: Operation not permitted\n"
        "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate",
    ],
    "touched memory that is not its own": [
        "Memory access fault by GPU node-1 (Agent handle: 0x55d0c8) on address 0x7f2a4c000000. "
        "Reason: Page not present.",
        ":0:rocdevice.cpp :2984: HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: The agent "
        "attempted to access memory beyond the largest legal",
    ],
    "the GPU hung": [
        "HW Exception by GPU node-1 (Agent handle: 0x5566e2) reason :GPU Hang",
        "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",
    ],
    "the GPU's memory is full": [
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 15.98 GiB",
    ],
    "the library of matrix products got no memory": [
        "RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling "
        "`hipblasCreate(handle)`",
    ],
    "an instruction that it does not have": [
        "Callback: Queue 0x7f3056e00000 aborting with error : "
        "HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION: The agent attempted to execute an illegal "
        "shader instruction. code: 0x2a",
    ],
    "a kernel ended in an exception": [
        "torch.AcceleratorError: HIP error: unspecified launch failure\nSearch for "
        "`hipErrorLaunchFailure' in https://rocm.docs.amd.com",
    ],
    "more shared memory (LDS)": [
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
        "131072, Hardware limit: 65536. Reducing block sizes or `num_stages` may help.",
    ],
    "took no part in a step's loss": [
        "RuntimeError: Expected to have finished reduction in the prior iteration before "
        "starting a new one. This error indicates that your module has parameters that were "
        "not used in producing loss.",
    ],
    "no queue, scratch memory": [
        "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary "
        "resources. code: 0x1008",
    ],
    "the server has no room for its cache": [
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        "ValueError: To serve at least one request with the models's max seq len (40960), "
        "(5.62 GiB KV cache is needed, which is larger than the available KV cache memory (2.1 "
        "GiB).",
    ],
    "while vLLM measured": [
        "AssertionError: Error in memory profiling. Initial free memory 120.1 GiB, current "
        "free memory 124.6 GiB. This happens when other processes sharing the same container "
        "release GPU memory while vLLM is profiling during initialization.",
    ],
    "rocBLAS has no kernels": [
        "rocBLAS error: Cannot read /opt/rocm/lib/../lib/rocblas/library/TensileLibrary.dat: "
        "Illegal seek for GPU arch : gfx906",
    ],
    "this Triton compiles nothing for gfx906": [
        "/x/trl/kernels/chunked_logprob.py:76:0: error: unsupported target: 'gfx906'",
    ],
    "holds no kernel for this GPU": [
        "RuntimeError: HIP error: invalid device function",
    ],
    "the process sees no GPU": [
        "RuntimeError: No HIP GPUs are available",
    ],
    "/dev/shm is too small": [
        "RuntimeError: unable to write to file </torch_4127_2087>: No space left on device (28)",
        "Error while creating shared memory segment /dev/shm/nccl-Xq3hPa (size 9637888)",
        "DataLoader worker (pid 311) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
    ],
    "did not reach a collective": [
        "[rank0]:[E1121 10:02:11 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1, "
        "Timeout(ms)=600000) ran for 600047 milliseconds before timing out.",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
        "Timed out waiting 1800000ms for recv operation",
    ],
    "this process lost another one": [
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process "
        "exited or there was a network error",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection "
        "closed by peer [127.0.0.1]:41153",
        "[c10d] sendBytes failed on SocketImpl(fd=67): Broken pipe ... TCPStore.cpp:106: "
        "Connection was closed",
    ],
    "RCCL could not set up": [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, "
        "unhandled system error",
    ],
    "a port is taken": [
        "OSError: [Errno 98] Address already in use",
        "RuntimeError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use",
    ],
    "came to the rendezvous in time": [
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. "
        "1/2 clients joined.",
    ],
    "the hub refuses": [
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-67)\n"
        "Cannot access gated repo for url "
        "https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json.",
    ],
    "the hub was asked too often": [
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: "
        "https://huggingface.co/api/models/x/revision/main",
        "429 Too Many Requests: you have reached your 'api' rate limit.\nRetry after 55 "
        "seconds (0/2500 requests remaining in current 300s window).\nUrl: "
        "https://huggingface.co/api/models/x.\nOSError: We couldn't connect to "
        "'https://huggingface.co' to load the files",
    ],
    "the hub cannot be reached": [
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and "
        "couldn't find them in the cached files.",
        "requests.exceptions.ConnectionError: (ProtocolError('Connection aborted.', "
        "ConnectionResetError(104, 'Connection reset by peer')), 'huggingface.co')",
    ],
    "a name cannot be resolved": [
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    ],
    "the disk is full": [
        "OSError: [Errno 28] No space left on device",
    ],
    "does not compute in bf16": [
        "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu if you "
        "want to train the model on CPU.",
        "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'BFloat16'",
    ],
    "flash-attention does not fit": [
        "ImportError: /usr/lib/flash_attn_2_cuda.so: undefined symbol: "
        "_ZN3c105ErrorC2ENS_14SourceLocationE (flash_attn: undefined symbol)",
        "RuntimeError: FlashAttention only supports AMD MI200 GPUs or newer.",
    ],
    "this vLLM is missing": [
        'cli.py: error: unrecognized arguments: --weight-transfer-config {"backend": "nccl"}',
    ],
    "the host's memory is full": [
        "killed by signal 9 (SIGKILL)",
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 9e11 B.",
    ],
    "crashed in native code": [
        "killed by signal 11 (SIGSEGV)",
        "Fatal Python error: Segmentation fault",
    ],
}
MEAN_NOTHING = [
    "",
    "step 40/400  loss 0.912  reward 0.512  12,345 tok/s  eta 1:05",
    "KeyError: 'prompt'",
    "INFO 11-21 14:00:00 [gpu_worker.py:298] Available KV cache memory: 61.21 GiB",
    "[rank0]:[W1121 ProcessGroupNCCL.cpp:1476] Warning: destroy_process_group() was not called "
    "before program exit",
    "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>, timeout 20",
    "W1121 14:13:17 torch/distributed/elastic/multiprocessing/api.py:1047] Unable to shutdown "
    "process 2962 via 15, killing via 9",
    "exitcode  : 1 (pid: 2963)",
    "urllib3: 429 Client Error: Too Many Requests for url: https://tracker.example.org/api",
    "bash: /opt/run.sh: Permission denied",
    "Fatal Python error: Illegal instruction",
    "downloading https://huggingface.co/Qwen/Qwen3-0.6B/resolve/main/model.safetensors",
]


@pytest.mark.parametrize(
    ("part", "message"),
    [(part, message) for part, messages in SAMPLES.items() for message in messages],
)
def test_a_real_message_is_explained(part, message):
    explanation = of(
        ["Traceback (most recent call last):", *message.splitlines(), "  and something after it"]
    )
    assert part in (explanation or "")


def test_every_row_is_reached():
    """No row stands behind others that take everything it knows."""
    reached = {of([message]) for messages in SAMPLES.values() for message in messages}
    assert reached == {text for _, text in MEANINGS}


@pytest.mark.parametrize("line", MEAN_NOTHING)
def test_a_harmless_line_has_no_explanation(line):
    assert of([line]) is None


def test_remedies_are_overrides_that_exist():
    overrides = [
        pair
        for _, text in MEANINGS
        for pair in re.findall(r"(?<![/\w])([a-z_]+(?:\.\w+)*)=(\w*)", text)
        if pair[0] not in ("iommu", "size")  # of the kernel's command line, and of mount
    ]
    assert {"debug", "container", "topology.server_max_length"} <= dict(overrides).keys()
    for key, value in overrides:
        option = "rocm" if key == "container" else 1  # a group takes one of its options
        assert Request([f"{key}={value if value not in ('', 'N') else option}"]).checked()
