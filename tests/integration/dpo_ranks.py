"""A rank that trains by DPO with several configurations in turn; test_dpo_ranks.py starts it."""

from __future__ import annotations

import os
import sys

from recipes.dpo import dpo
from tests.integration.adapter_ranks import train

if __name__ == "__main__":
    for config in sys.argv[1:]:
        train(config, dpo)
    sys.stdout.flush()
    os._exit(0)  # as recipes/common/program.py ends ranks of gloo
