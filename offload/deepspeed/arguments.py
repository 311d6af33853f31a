# SPDX-License-Identifier: Apache-2.0
"""The command-line flags of scripts written for DeepSpeed."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, which only sets args.deepspeed, and --deepspeed_config, which `initialize(args=args)` reads."""
    group = parser.add_argument_group("DeepSpeed", "settings in DeepSpeed's keys")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", metavar="FILE", help="settings as JSON")
    return parser
