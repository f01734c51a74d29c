"""Train by DPO with several configurations in turn on a rank; test_dpo_ranks.py starts it."""

from __future__ import annotations

import os
import sys

from recipes.dpo import dpo
from tests.integration.adapter_ranks import train

if __name__ == "__main__":
    for config in sys.argv[1:]:
        train(config, dpo)
    sys.stdout.flush()
    os._exit(0)  # as recipes/rank/program.py ends ranks of gloo
