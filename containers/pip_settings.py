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

PIP_SETTING = re.compile(r"([a-z:]+)\.([a-z-]+)=(['\"].*)")
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
}
# Options for the sources of files. Others, such as a cache, apply only to the host.
PASSED = (*TRANSLATED, "timeout", "retries")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def pip_config(python: str = sys.executable) -> str:
    """Return the output of `pip config list`."""
    verbosity = ("PIP_VERBOSE", "PIP_QUIET", "PIP_LOG")  # variables that change pip's output
    env = {name: value for name, value in os.environ.items() if name not in verbosity}
    argv = [python, "-m", "pip", "config", "list"]
    return subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=False).stdout


def pip_options(listed: str, *sections: str) -> dict[str, str]:
    """Parse `pip config list` into options and values.

    Later sections override earlier ones, and PIP_* variables override all.
    """
    settings = [
        match.groups() for match in map(PIP_SETTING.fullmatch, listed.splitlines()) if match
    ]
    return {
        option.replace("default-", "", 1): " ".join(str(ast.literal_eval(value)).split())
        for source in (*sections, ":env:")
        for section, option, value in settings
        if section == source
    }


def uv_settings(listed: str) -> dict[str, str]:
    """Translate `pip config list` into uv's variables."""
    options = pip_options(listed, "global", "install")
    return {
        variable: separator.join(options[option].split())
        for option, (variable, separator) in TRANSLATED.items()
        if options.get(option)
    }


def for_container(listed: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a container's pip the host's settings and proxies."""
    options = pip_options(listed, "global", "install", "download")
    if "cert" not in options:
        # Unlike pip's own certificates, the system's may include a company's authority.
        bundle = next((environ[name] for name in BUNDLES if environ.get(name)), None)
        options["cert"] = bundle or ssl.get_default_verify_paths().cafile or ""
    settings = {
        f"PIP_{option.replace('-', '_').upper()}": " ".join(map(absolute, options[option].split()))
        for option in PASSED
        if options.get(option)
    }
    for name in PROXIES:  # may be in upper or lower case
        proxy = environ.get(name) or environ.get(name.lower())
        settings |= {name: proxy} if proxy else {}
    return settings


def absolute(value: str) -> str:
    """Return an existing path as an absolute one, and any other value unchanged."""
    path = Path(value).expanduser()
    return str(path.absolute()) if path.exists() else value


def local_folders(settings: Mapping[str, str]) -> list[Path]:
    """Return the host's folders in the settings. The container has them at the same paths."""
    folders = []
    for option in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        for value in settings.get(option, "").split():
            url = urlsplit(value)
            if url.scheme not in ("", "file"):
                continue
            path = Path(unquote(url.path))
            # Pages of a local index refer to ../../files/..., so mount the parent of the index. But
            # a mount directly below / could hide parts of the image.
            is_index = option != "PIP_FIND_LINKS" and len(path.parts) > 3
            folders.append(path.parent if is_index or path.is_file() else path)
    return sorted({folder for folder in folders if folder.is_dir() and len(folder.parts) > 1})
