# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/deepspeed.md from the drop-in itself: key by key, and name by name.

python docs/deepspeed_page.py            # rewrites what stands between the table markers
python docs/deepspeed_page.py --check    # fails if that would change anything
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import offload.deepspeed as deepspeed
from offload.deepspeed.engine import DeepSpeedEngine
from offload.deepspeed.names import MODULES
from offload.deepspeed_config.keys import SECTIONS

PAGE = Path(__file__).with_name("deepspeed.md")
ENTRY_POINTS = PAGE.parents[1] / "tests" / "integrations" / "entry_points.json"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
ENGINE = "`engine` of `initialize`"


def rows(*lines: tuple[str, ...]) -> str:
    head, *rest = (" | ".join(map(_cell, line)) for line in lines)
    return "\n".join(f"| {line} |" for line in (head, " | ".join("---" for _ in lines[0]), *rest)) + "\n"


def _cell(text: str) -> str:
    """Without what Markdown would take for its own, but for the places where a name may break."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("&lt;wbr>", "<wbr>")


def compared() -> str:
    return f"Compared with DeepSpeed {deepspeed.__version__}.\n"


def keys() -> str:
    def said() -> Iterator[tuple[str, str, str]]:
        for name, section in SECTIONS.items():
            place = f"`{name}`" if name else "top level"
            yield from ((place, f"`{key}`", text) for key, text in section.translated.items())
            for key, refusal in section.refused.items():
                neutral = [one for one in refusal.harmless if one is not None]
                accepted = f" (but for {', '.join(str(one).lower() for one in neutral)})" if neutral else ""
                yield place, f"`{key}`", f"**refused**{accepted}: {refusal.instead}"
            if section.without_effect:
                yield place, ", ".join(f"`{key}`" for key in section.without_effect), "without effect"
            if section.is_open:
                yield place, "any other", "without effect"

    return rows(("section", "key", "what becomes of it"), *said())


def names() -> str:
    """Everything that can be imported, and what its docstring says of it first."""
    found: list[tuple[str, str, str]] = []
    modules: Mapping[str, Mapping[str, Any]] = {"": {name: getattr(deepspeed, name) for name in deepspeed.__all__}, **MODULES}
    modules = {**modules, **{name: _defined_in(getattr(deepspeed, name)) for name in ("zero", "comm", "checkpointing")}}
    for path, content in modules.items():
        public = {name: value for name, value in content.items() if not name.startswith("_") and _is_own(value)}
        plain = [name for name in public if not _first(public[name])]
        place = "deepspeed" + "".join(f".<wbr>{part}" for part in path.split(".") if part)  # may break there
        found += [(place, f"`{name}`", _first(public[name])) for name in sorted(public) if name not in plain]
        if plain:
            found.append((place, ", ".join(f"`{name}`" for name in sorted(plain)), ""))
    return rows(("module", "name", "what it is here"), *found)


def engine() -> str:
    found = []
    for name, value in sorted(inspect.getmembers(DeepSpeedEngine)):
        where = next((base for base in DeepSpeedEngine.__mro__ if name in vars(base)), object)
        if (
            not name.startswith("_")
            and where.__module__.startswith("offload.")
            and (callable(value) or isinstance(value, property))
        ):
            found.append((f"`{name}`", _first(value)))
    plain = [name for name, text in found if not text]
    lines = [line for line in found if line[1]]
    return rows(("of the engine", "what it does here"), *lines, (", ".join(plain), "as there"))


def tools() -> str:
    """Of tests/integrations/entry_points.py: each run of a tool's own entry point beside the same without DeepSpeed."""
    lines = []
    for tool, said in json.loads(ENTRY_POINTS.read_text(encoding="utf-8")).items():
        versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items() if name != tool)
        place = f"{tool} {said['versions'][tool]} ({versions}): `{said['entry point']}`"
        for run in said["runs"]:
            lines.append((place, f"{run['config']}, {run['tuning']}", f"{run['losses']:.1e}", f"{run['weights']:.1e}"))
            place = ""
    return rows(("tool and entry point", "its config, and what is trained", "losses differ by", "weights differ by"), *lines)


def _defined_in(module: Any) -> Mapping[str, Any]:
    """Without what it imported for itself."""
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}


def _is_own(value: object) -> bool:
    home = getattr(value, "__module__", None) or ""
    return not inspect.ismodule(value) and (home.startswith("offload.") or isinstance(value, (str, int, float, dict, list)))


def _first(value: object) -> str:
    """The first sentence of its own docstring."""
    own = value if inspect.isclass(value) or inspect.isfunction(value) else getattr(value, "fget", None)
    text = inspect.cleandoc(own.__doc__) if own is not None and own.__doc__ and not _is_generated(own) else ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph + " ")[0].rstrip(" .:")


def _is_generated(value: object) -> bool:
    return inspect.isclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")


TABLES: Mapping[str, Callable[[], str]] = {"compared": compared, "keys": keys, "names": names, "engine": engine, "tools": tools}


def rendered(text: str) -> str:
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the page is older than the drop-in")
    given = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new = rendered(text)
    if given.check and new != text:
        sys.exit(f"{PAGE.name} is older than the drop-in: python docs/{Path(__file__).name}")
    if not given.check:
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
