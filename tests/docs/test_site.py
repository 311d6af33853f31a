# SPDX-License-Identifier: Apache-2.0
"""What the pages say that code says is so: error messages, figures, the public API, links."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import offload
from offload.cli.main import build_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_messages_on_the_page_of_errors_are_the_codes() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "offload").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)  # a message over several lines is one text
    quoted = re.findall(r'^## "(.*)"$', (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) >= 15
    assert [words for words in quoted if words not in joined] == []


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    errors = {name for name in offload.__all__ if name.endswith("Error")}
    modules = {"deferred_init": "deferred_init.deferred_init.deferred_init"}  # of the same name as what it exports
    named = {name: modules.get(name, name) for name in offload.__all__ if name not in errors}
    assert [name for name, path in named.items() if f"::: offload.{path}\n" not in page] == []
    assert "::: offload.errors\n" in page


def test_every_flag_of_the_command_line_has_a_heading_of_its_own() -> None:
    page = module(DOCS / "site_tools" / "cli_page.py")
    flags = {
        (flag, f"{name.replace(' ', '-')}-{flag.removeprefix('--')}")
        for name, command in page.commands(build_parser())
        for flag in command._option_string_actions
        if flag not in ("-h", "--help")
    }
    assert len(flags) > 80 and ("--backend", "bench-io-backend") in flags
    text = page.command_line()
    headed = re.findall(r"^#### `(\S+?)(?: .*)?` \{#(\S+)\}\n\n\w", text, re.MULTILINE)  # and what it does
    assert flags <= set(headed)
    places = re.findall(r"\{#(\S+)\}$", text, re.MULTILINE)
    assert len(places) == len(set(places))


def test_memory_of_the_stages_is_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "deferred")
    monkeypatch.setenv("OFFLOAD_DEVICE_NBYTES", "")
    written = json.loads((DOCS / "performance" / "zero_memory.json").read_text())
    assert module(ROOT / "benchmarks" / "zero_memory.py").measured() == written


def test_every_page_of_the_sites_navigation_is_there() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    made = {"index.md", "cli.md", "contributing.md", "security.md", "changelog.md"}
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed - made <= there and made <= listed


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert re.match(r"[a-z]+:", target) or (page.parent / target).exists() or target == "cli.md", f"{page}: {target}"


ROOMS = ("offload", "docs", "tests", "native", "benchmarks")
PATHS = re.compile(r"`([\w.*/-]+(?:\.(?:py|cpp|h|inc|cu|json|md|txt|svg|sh)|/))`")
NAMES = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")


def missing_paths(text: str) -> list[str]:
    """The files and folders that a page names and the repository does not have. A room's are named from the room on."""
    named = set(PATHS.findall(text))
    assert named
    return [
        one for one in sorted(named) if not any(any((ROOT / room).rglob(one)) for room in ROOMS) and not any(ROOT.glob(one))
    ]


def test_every_file_that_the_pages_for_maintainers_name_is_there() -> None:
    assert missing_paths("`step/uses.py` `docs/` `machines/*.json` `step/gone.py`") == ["step/gone.py"]
    for page in (DOCS / "architecture.md", ROOT / "CONTRIBUTING.md", DOCS / "gpu.md"):
        assert missing_paths(page.read_text(encoding="utf-8")) == [], page


def test_every_name_on_the_page_of_the_architecture_is_in_the_code() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "offload").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    named = {one for one in NAMES.findall(page) if not one.endswith((".py", ".md"))}
    assert len(named) > 20 and sorted(one for one in named if one.split(".")[-1] not in words) == []


def test_the_checker_of_the_site_sees_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    entries = [{"location": "index.html#x", "text": ""}, {"location": "api.html#offload.x", "text": ""}]
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": entries}))
    (tmp_path / "other.html").write_text('<p id="here"></p>')
    links = '<a href="other.html#here"></a><a href="other.html#there"></a><a href="gone.html"></a>'
    (tmp_path / "index.html").write_text(f'<script src="https://far.example/x.js"></script>{links}')
    checker = DOCS / "site_tools" / "check.py"
    done = subprocess.run([sys.executable, checker, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.splitlines() == [
        "index.html loads https://far.example/x.js",
        "index.html links to other.html#there, which has no such place",
        "index.html links to gone.html, which is not there",
        "other.html is not searched",
        "api.html#offload.x says nothing",
        "there is no script for the search",
    ]
