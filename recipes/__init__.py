"""The programs that ranks run. Each reads one resolved `config.yaml` and writes into its run directory; none composes a configuration."""

import os
import sys

from recipes.common.rank_log import redirect

# `python -m recipes.<method>` runs this first: what torch and the libraries say while they are imported is in the rank's log too.
redirect(sys.argv, os.environ)
