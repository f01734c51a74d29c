"""Turn mounted secrets into variables of this process, then become the command.

So secrets are neither in the image nor in the container environment that the engine shows.
Standard library only.

    python3 containers/enter.py python3 -m torch.distributed.run ...
"""

import os
import sys

SECRETS = b"/run/secrets"

# As bytes: a secret is what the shell had, whatever its encoding. Names that start with a dot
# belong to the launcher.
for file in os.scandir(SECRETS) if os.path.isdir(SECRETS) else []:
    if file.is_file() and not file.name.startswith(b"."):
        with open(file.path, "rb") as content:
            os.environb[file.name] = content.read()
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print(
        f"{sys.argv[1]}: {error.strerror}. The image lacks it, or PATH does not name it.",
        file=sys.stderr,
    )
    sys.exit(127)
