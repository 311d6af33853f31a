# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: pages made from the code or from files outside of docs/, and links that lead out of it.

The home page is the README, the command line's page is what the parsers say, the changelog and the pages for contributors
are the files of the repository. What a page links to outside of docs/ is named and not linked: the site stands alone.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from cli_page import command_line  # beside this file, which mkdocs loads by its path

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
ELSEWHERE = re.compile(r"[a-z]+:|//|#")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    for uri, name in FROM_ROOT.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "cli.md", content=command_line()))
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [file.src_uri for file in files.documentation_pages()]
    new = [uri for uri in pages if not re.search(rf": {re.escape(uri)}$", listed, re.MULTILINE)]
    if new:  # what nobody has put into the navigation yet comes last
        config.nav.append({"More": sorted(new)})
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to where the site has what they name."""
    origin = ROOT / FROM_ROOT.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {ROOT / name: uri for uri, name in FROM_ROOT.items()}

    def led(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if ELSEWHERE.match(target):
            return match[0]
        path = Path(os.path.normpath(origin.parent / target))
        if path.is_dir() and (path / "README.md").is_file():
            path = path / "README.md"
        uri = pages.get(path)
        if uri is None and path.is_relative_to(ROOT / "docs"):
            uri = path.relative_to(ROOT / "docs").as_posix()
        if uri is None or path.suffix == ".json":
            assert path.exists(), f"{page.file.src_uri} links to {target}, which is not there"
            return text  # it lies in the repository only
        return f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(page.file.src_uri) or '.')}{anchor})"

    # Not in blocks of code.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(led, part) for part in parts)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """The command line's flags have headings for the search; the page's table of contents ends above them."""
    if page.file.src_uri == "cli.md":
        for command in (command for title in page.toc for command in title.children):
            for group in command.children:
                group.children.clear()
    return html
