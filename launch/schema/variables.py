"""Define names of environment variables that several packages use."""

from __future__ import annotations

import re

# names of variables and arguments with secrets: HF_TOKEN and HF_TOKEN_READ, but not max_tokens or
# eos_token
SECRET = re.compile(
    r"((?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)TOKEN(?![A-Z])|SECRET|PASSWORD|API_?KEY|CREDENTIAL)",
    re.IGNORECASE,
)

# variables that a container sets for itself
CONTAINER_VARIABLES = (
    "HOME",
    "USER",
    "LOGNAME",
    "HF_HOME",
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
