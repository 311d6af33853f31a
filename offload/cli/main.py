# SPDX-License-Identifier: Apache-2.0
"""The command line: its parser, and what a failure looks like from the outside.

Exit codes: 0 done (also where Ctrl-C ended a training run and its table was printed); 1 failed, and of `plan`: it does not
fit; 2 the command, the configuration, the model or a path cannot be what was asked for, in every command; 130 interrupted
before there was anything to show.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import offload
from offload.cli import bench, explain, export, importing, info
from offload.cli.plans import plan, probe
from offload.cli.training import train
from offload.errors import ConfigError, InitializerError, OffloadError, UsageError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
_REFUSALS = (ConfigError, InitializerError, UsageError)

_COMMANDS = {
    "train": (train, "train a causal language model with its states on the device, in CPU memory or on NVMe"),
    "plan": (plan, "say what training would take: bytes in each tier, smallest budgets, bytes moved in a step"),
    "explain": (explain, "say what a trace shows: what is hidden, who waits for what, and what to change"),
    "probe": (probe, "measure this machine: memory, drive, and device links"),
    "export": (export, "write a checkpoint's weights as safetensors that from_pretrained reads, without the model"),
    "import": (importing, "convert a checkpoint of DeepSpeed or torch.distributed into one of this package"),
    "bench": (bench, "time the Adam kernel or file I/O on this machine"),
    "info": (info, "versions, what was built, which backends work, environment variables"),
}


_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")


class _Paragraphs(argparse.HelpFormatter):
    """Paragraphs are filled to the width of the terminal; what has indented lines stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            one if re.search(r"^ ", one, re.MULTILINE) else super(_Paragraphs, self)._fill_text(one, width, indent)
            for one in paragraphs
        )


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, with what was probably meant; the usage is a --help away."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", _Paragraphs)
        super().__init__(*args, **keywords)
        self.set_defaults(parser=self)  # the innermost of a command line stays

    def error(self, message: str) -> NoReturn:
        if (choice := _CHOICE.search(message)) is not None:
            message += _meant(choice[1], re.findall(r"[\w.-]+", choice[2]))
        self.exit(REFUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """For what no parser took."""
        flag = unknown[0].split("=")[0]
        meant = _meant(flag, list(self._option_string_actions)) if flag != "--" else ""
        self.error(f"unknown: {' '.join(unknown)}{meant}")


def _meant(text: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(text, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Parsed arguments hold `run`, which takes them and returns the exit code."""
    parser = _OneLineParser(prog="python -m offload", description=offload.__doc__)
    parser.add_argument("--version", action="version", version=f"offload {offload.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__))
    asked = commands.add_parser("help", help="this list, or what a command takes: help COMMAND", description=_help.__doc__)
    asked.add_argument("about", nargs="*", metavar="COMMAND", help="such as train, or bench io")
    asked.set_defaults(run=_help)
    return parser


def _takers(parser: argparse.ArgumentParser, flag: str) -> list[str]:
    """The commands that have this flag."""
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return [name for name, one in commands.choices.items() if flag in one._option_string_actions]


def _help(args: argparse.Namespace) -> int:
    """List the commands, or say what one takes."""
    if args.about:
        build_parser().parse_args([*args.about, "--help"])  # exits
    print(_commands())
    return 0


def _commands() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(("python -m offload COMMAND ...; help COMMAND, or COMMAND --help, says more", "", *lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors of this package are one line on stderr, without a traceback."""
    parser = build_parser()
    first = next(iter(sys.argv[1:] if argv is None else argv), "").split("=")[0]
    if first not in parser._option_string_actions and (takers := _takers(parser, first)):
        parser.error(f"{first} stands before the command: name that first ({', '.join(takers)})")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    if args.command is None:
        return _help(argparse.Namespace(about=()))
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`: nobody reads on, and the interpreter's own flush is to be quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OffloadError as error:
        print(f"offload {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED if isinstance(error, _REFUSALS) else FAILED
    except KeyboardInterrupt:
        print(f"offload {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
