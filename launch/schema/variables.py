"""Define names of environment variables that more than one room uses."""

from __future__ import annotations

import re

# Names of variables and arguments that hold secrets: HF_TOKEN and HF_TOKEN_READ, but not max_tokens
# or eos_token.
SECRET = re.compile(
    r"((?<!EOS_)(?<!BOS_)(?<!PAD_)(?<!UNK_)TOKEN(?![A-Z])|SECRET|PASSWORD|API_?KEY|CREDENTIAL)",
    re.IGNORECASE,
)

# variables that a container sets for itself
INSIDE = (
    "HOME",
    "USER",
    "LOGNAME",
    "HF_HOME",
    "PYTHONPYCACHEPREFIX",
    "TORCHINDUCTOR_CACHE_DIR",
)

# KV cache of a server on a CPU; our choice, since only small models are served there
CPU_CACHE_GIB = 1

# names of one setting; torch uses the first that is set
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def is_expandable(options: str) -> bool:
    """Return whether these options let torch's allocator map memory in pages."""
    return "expandable_segments:true" in options.lower().replace(" ", "")
