"""Define names of environment variables that several packages use."""

import re

# names of variables and arguments with secrets: HF_TOKEN and HF_TOKEN_READ, but not max_tokens or
# eos_token; DB_PASS and MYSQL_PWD
SECRET = re.compile(
    r"((?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)TOKEN(?![A-Z])|SECRET|PASSWORD|PASSWD|PASSPHRASE|(SQL|DB)_PWD|"
    r"(API|ACCESS|PRIVATE)_?KEY|CREDENTIAL|(?:^|[_.])(?:PASS|PAT|AUTH)(?:$|_))",
    re.IGNORECASE,
)
# URLs with a password or token: https://user:password@host, https://token@host, ?token=...
SECRET_URL = re.compile(
    r"https?://[^/?#\s@]+@|\w://[^/?#\s@]*:[^/?#\s@]+@|"
    r"\w://\S*[?&][\w-]*(?:token|signature|password|secret|api_?key)=",
    re.IGNORECASE,
)


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable's name or value looks like a secret.

    Programs also accept a proxy without a scheme: user:password@proxy:3128.
    """
    is_proxy_login = name.lower().endswith("_proxy") and "@" in value
    is_named = SECRET.search(name) or name.upper().endswith(("_KEY", "_PW", "_PWD"))
    return bool(is_named or SECRET_URL.search(value)) or is_proxy_login


# variables of the GPU stack, which affect results or speed
GPU_STACK = re.compile(
    r"(HF|OMP|MKL|KMP|GOMP|NCCL|RCCL|GLOO|UCX|FI|HSA|HIP|ROC[A-Z]*|AMD|GPU|MIOPEN|HIPBLASLT|CUDA|"
    r"PYTORCH|TORCH|TORCHINDUCTOR|TOKENIZERS|TRITON|VLLM)_\w+"
)
# What programs need on this machine. Without XDG_CACHE_HOME, models would be downloaded again;
# without CC, Triton would use another compiler.
HOST = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|COLUMNS|TMPDIR|TEMP|TMP|"
    r"XDG_CACHE_HOME|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|CC|CXX|MALLOC_\w+|PYTHON\w+|"
    r"(HTTPS?|FTP|ALL|NO)_PROXY|(https?|ftp|all|no)_proxy|SSL_CERT_(FILE|DIR)|"
    r"(REQUESTS|CURL)_CA_BUNDLE|NETRC|(WANDB|MLFLOW|COMET|NEPTUNE|SWANLAB|TRACKIO|CLEARML|AZUREML|"
    r"CODECARBON|DAGSHUB|DVCLIVE|FLYTE|KUBEFLOW)_\w+"
)
# what trainers read in addition, which could contradict the composition
READ_BY_TRAINERS = re.compile(
    r"(ACCELERATE|PET|FSDP|DEEPSPEED|DS|TRANSFORMERS|TORCHDYNAMO|FLASH_ATTENTION|AITER|BNB)_\w+"
)


def is_public(name: str, value: str) -> bool:
    """Return whether records may contain a variable: its name is known, and it is not a secret."""
    is_known = any(names.fullmatch(name) for names in (GPU_STACK, HOST, READ_BY_TRAINERS))
    return is_known and not is_secret(name, value)


# ranks and rendezvous of torchrun, Slurm and MPI
RANK_NAMES = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|"
    r"(PET|TORCHELASTIC|SLURM|OMPI|PMI|PMIX|MV2|MPI|PALS|FLUX)_\w+"
)

# variables that a container sets for itself
CONTAINER_VARIABLES = (
    "HOME",
    "USER",
    "LOGNAME",
    "HF_HOME",
    "HF_DATASETS_CACHE",
    "PYTHONPYCACHEPREFIX",
    "TORCHINDUCTOR_CACHE_DIR",
)

# size of the KV cache on a CPU, which only serves small models
CPU_CACHE_GIB = 1

# alternative names of one variable; torch uses the first that is set
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def is_expandable(options: str) -> bool:
    """Return whether `options` of torch's allocator enable expandable segments."""
    return "expandable_segments:true" in options.lower().replace(" ", "")
