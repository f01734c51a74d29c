"""Run what each rank computes: one program per method.

Each reads one resolved `config.yaml` and writes into its run directory.
"""

import os
import sys

from recipes.rank.rank_log import redirect

# `python -m recipes.<method>` runs this first, so the rank's log also has the output of library
# imports.
redirect(sys.argv, os.environ)
