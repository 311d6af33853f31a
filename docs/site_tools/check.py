# SPDX-License-Identifier: Apache-2.0
"""python docs/site_tools/check.py SITE: what mkdocs --strict does not see. Exits with 1 where something is wrong.

Every page loads scripts, styles, images and fonts from the site itself alone. Every link between pages, and into one,
leads somewhere. The search has an index of every page, and finds the page that answers each of `ASKED`: the site's own
script is run for that, by Node.js where there is one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ASKED = {
    "LoRA": "quick-start.html",
    "does not fit": "finetune.html",
    "13 B": "what-fits.html",
    "slow": "why-slow.html",
    "clip gradients": "guarantees.html",
    "BudgetError": "errors.html",
    "state_format": "placement.html",
    "save_checkpoint": "api.html",
    "ds_config.json": "coming-from-deepspeed.html",
    "fully_shard": "coming-from-fsdp2.html",
    "CPUOffloadOptimizer": "coming-from-torchao.html",
    "--max-shard-size": "cli.html#export-max-shard-size",
    "--cpu-memory": "cli.html#train-cpu-memory",
    "MANIFEST.json": "checkpoint-format.html",
    "io_uring": "compatibility.html",
}
"""What a reader may type, and a page, or a place on one, that is to be among the first results."""
FIRST = 5
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The names within a page, what it loads and what it links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attributes if value is not None}
        self.names.update(given[name] for name in ("id", "name") if name in given)
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given[LOADED[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


def faults(site: Path) -> list[str]:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name} loads {one}" for one in page.loaded if one.startswith(("http:", "https:", "//"))]
        for link in page.links + page.loaded:
            target, anchor = urldefrag(link)
            if ":" in target or link.startswith("//") or path.name == "404.html":
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                found.append(f"{name} links to {link}, which is not there")
            elif anchor and there in pages and unquote(anchor) not in pages[there].names and anchor != "__comments":
                found.append(f"{name} links to {link}, which has no such place")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    searched = {urldefrag(entry["location"])[0] or "index.html" for entry in index["docs"]}
    found += [f"{path.name} is not searched" for path in pages if path.name != "404.html"
              and path.relative_to(site).as_posix() not in searched]  # fmt: skip
    found += [f"{entry['location']} says nothing" for entry in index["docs"]
              if entry["location"].startswith("api.html#offload.") and not entry["text"].strip()]  # fmt: skip
    return found + not_answered(site)


def not_answered(site: Path) -> list[str]:
    """What the search does not find. Of a site without its script, that."""
    if not any((site / "assets" / "javascripts" / "workers").glob("search.*.js")):
        return ["there is no script for the search"]
    node = shutil.which("node")
    if node is None:
        print("there is no Node.js: what the search finds was not looked at")
        return []
    command = [node, str(Path(__file__).with_name("search.mjs")), str(site), *ASKED]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    wrong = []
    for query, asked in ASKED.items():
        first = [place for places in found[query][:FIRST] for place in places[:FIRST]]
        first = first if "#" in asked else list(dict.fromkeys(urldefrag(place)[0] for place in first))
        if asked not in first:
            wrong.append(f"the search for {query!r} does not give {asked} among its first: {', '.join(first) or 'nothing'}")
    return wrong


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or "links, places, search index and origins are right")
    sys.exit(1 if wrong else 0)
