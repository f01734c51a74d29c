"""Point links to files outside docs/ at the repository, when MkDocs builds the site.

On GitHub and in an editor the relative links work as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# [text](path) with a relative path; the part from # belongs to the path's page
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that leave docs/, or that lead to a folder or an excluded file.

    MkDocs reports what is left, such as a path that does not exist.
    """
    folder = (DOCS / page.file.src_uri).parent
    pages = {file.src_uri for file in files if not file.inclusion.is_excluded()}

    def rewrite(link: re.Match[str]) -> str:
        text, path = link[1], (folder / link[2]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return link[0]
        if path.is_relative_to(DOCS) and path.relative_to(DOCS).as_posix() in pages:
            return link[0]
        url = f"{config.repo_url.rstrip('/')}/blob/main/{path.relative_to(ROOT).as_posix()}"
        return f"[{text}]({url}{link[3] or ''})" if config.repo_url else text

    return LINK.sub(rewrite, markdown)
