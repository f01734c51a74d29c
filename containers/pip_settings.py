"""Read the host's settings for pip, for uv and for the pip in a container."""

from __future__ import annotations

import ast
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

SECTIONS = ("global", "install", ":env:")  # of pip's configuration; later ones override earlier
# pip's option -> uv's variable with the same meaning, and the separator of its values. If another
# option is necessary, uv fails, and then pip installs.
TRANSLATED = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "retries": ("PIP_RETRIES", " "),  # not of uv: install.install_lock reads it
}
# Options for the sources of files. Others, such as a cache, apply only to the host.
PASSED = (*TRANSLATED, "timeout")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def pip_options(python: str = sys.executable) -> dict[str, list[str]]:
    """Return the values of each option of this Python's pip, from its files and PIP_* variables."""
    argv = [python, "-m", "pip", "config", "list"]
    env = {**os.environ, "PIP_QUIET": "0"}  # or pip would print nothing
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=False)
    return parse(done.stdout)


def parse(listed: str) -> dict[str, list[str]]:
    """Return the options in the output of `pip config list`."""
    lines = re.findall(r"(?m)^(\S+)\.(?:default-)?([a-z-]+)=(['\"].*)$", listed)
    return {
        option: ast.literal_eval(value).split()
        for source in SECTIONS
        for section, option, value in lines
        if section == source
    }


def uv_settings(options: Mapping[str, list[str]]) -> dict[str, str]:
    """Translate pip's options into uv's variables."""
    return {
        variable: separator.join(options[option])
        for option, (variable, separator) in TRANSLATED.items()
        if options.get(option)
    }


def for_container(options: Mapping[str, list[str]], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a container's pip the host's settings and proxies."""
    # Unlike pip's own certificates, the system's may include a company's authority.
    bundles = [environ.get(name) for name in BUNDLES] + [ssl.get_default_verify_paths().cafile]
    options = {"cert": [bundle for bundle in bundles if bundle][:1], **options}
    settings = {
        f"PIP_{name.replace('-', '_').upper()}": " ".join(map(absolute, options[name]))
        for name in PASSED
        if options.get(name)
    }
    proxies = {name: environ.get(name) or environ.get(name.lower()) for name in PROXIES}
    return settings | {name: proxy for name, proxy in proxies.items() if proxy}


def absolute(value: str) -> str:
    """Return an existing path as an absolute one, and any other value unchanged."""
    path = Path(value).expanduser()
    return str(path.absolute()) if path.exists() else value


def local_folders(settings: Mapping[str, str]) -> list[str]:
    """Return the host's folders in the settings. The container has them at the same paths."""
    folders = set()
    for option in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        for url in map(urlsplit, settings.get(option, "").split()):
            path = Path(unquote(url.path))
            # Pages of a local index refer to ../../files/..., so mount the parent of the index. But
            # a mount directly below / could hide parts of the image.
            is_index = option != "PIP_FIND_LINKS" and len(path.parts) > 3
            folder = path.parent if is_index or path.is_file() else path
            if url.scheme in ("", "file") and folder.is_dir() and len(folder.parts) > 1:
                folders.add(str(folder))
    return sorted(folders)
