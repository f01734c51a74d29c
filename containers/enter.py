"""The first program in a container: mounted secrets become variables of this process, then the command takes its place.

So no secret stands in the image, nor in the environment that the engine shows of a container. Standard library only.

    python3 containers/enter.py python3 -m torch.distributed.run ...
"""

import os
import sys
from pathlib import Path

SECRETS = Path("/run/secrets")

for file in sorted(SECRETS.glob("*")) if SECRETS.is_dir() else []:
    os.environ[file.name] = file.read_text(encoding="utf-8")
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print(f"{sys.argv[1]}: {error.strerror}. The image lacks it, or PATH does not name it.", file=sys.stderr)
    sys.exit(127)
