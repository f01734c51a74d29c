"""Export mounted secrets as environment variables, then execute the command in this process.

So `docker inspect`, which shows variables, shows no secrets. This program needs only Python.

    python3 containers/enter.py python3 -m torch.distributed.run ...
"""

import os
import sys

SECRETS = b"/run/secrets"

# Copy bytes, because the encoding of a secret is unknown. Names that start with a dot belong to the
# launcher.
for file in os.scandir(SECRETS) if os.path.isdir(SECRETS) else []:
    if file.is_file() and not file.name.startswith(b"."):
        with open(file.path, "rb") as content:
            os.environb[file.name] = content.read()
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error.strerror}. It is not in the image, or not on PATH.")
