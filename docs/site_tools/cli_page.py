# SPDX-License-Identifier: Apache-2.0
"""The page of the command line, made from the parsers: a heading for each command, group and flag, so that the search for a
flag leads to its line.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TITLES = {"positional arguments": "arguments", "options": "options"}
"""argparse's own groups. The others are named by the command."""


def command_line() -> str:
    """The page."""
    sys.path.insert(0, str(ROOT))
    os.environ["COLUMNS"] = "94"  # what a page is wide
    from offload.cli.main import build_parser

    parser = build_parser()
    lines = ["# Command line", "", "Made from the parsers: what `--help` says.", ""]
    for name, command in commands(parser):
        lines += [f"## python -m offload {name}", "", *described(command.description or "")]
        usage = command.format_usage().removeprefix("usage: ").rstrip()
        lines += ["```output", re.sub(r"^       ", "", usage, flags=re.MULTILINE), "```", ""]
        place = name.replace(" ", "-")
        for group in command._action_groups:
            actions = [one for one in group._group_actions if shown(one)]
            if actions:
                title = TITLES.get(group.title or "", group.title or "")
                lines += [f"### {name}: {title} {{#{place}-flags-{title.replace(' ', '-')}}}", ""]
                lines += [sentence(group.description), ""] if group.description else []
            for one in actions:
                lines += [f"#### `{said(one)}` {{#{anchor(place, one)}}}", "", sentence(one.help or ""), ""]
    return "\n".join(lines)


def commands(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser, those below it after it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield before + name, child
                yield from commands(child, f"{before}{name} ")


def shown(action: argparse.Action) -> bool:
    """What has a line of its own: not --help, which every command has, and not commands below, which have a heading."""
    return not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def anchor(place: str, action: argparse.Action) -> str:
    """The place of a flag on the page; of an argument without one as it is written, since a flag may have the same name."""
    name = action.option_strings[-1] if action.option_strings else f"{action.metavar or action.dest}"
    return f"{place}-{name.lstrip('-')}"


def said(action: argparse.Action) -> str:
    """A flag as it is typed, and what it takes."""
    if not action.option_strings:
        return f"{action.metavar or action.dest}"
    takes = "" if action.nargs == 0 else f"{action.metavar or '|'.join(action.choices or [action.dest.upper()])}"
    takes = f"[{takes}]" if action.nargs == "?" else takes
    return f"{', '.join(action.option_strings)} {takes}".rstrip()


def sentence(text: str) -> str:
    """Help as a sentence: it begins with a capital where it begins with a word. A bar or a star in it is none of markdown's."""
    text = text % {} if "%%" in text else text
    if re.match(r"[a-z-]+[,:;]?( |$)", text):
        text = text[0].upper() + text[1:]
    text = re.sub(r"([*_<|])", r"\\\1", text)
    return f"{text.removesuffix('.')}."


def described(text: str) -> list[str]:
    """A command's description: paragraphs, and lines that stand indented as commands."""
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        if re.search(r"^ ", paragraph, re.MULTILINE):
            commands = paragraph.strip().startswith("python ")
            lines += ["```bash" if commands else "```output", re.sub(r"^  ", "", paragraph, flags=re.MULTILINE), "```", ""]
        else:
            lines += [paragraph, ""]
    return lines
