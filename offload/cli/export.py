# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint's weights as safetensors shards with index and config, as `engine.export` does.

Needs neither the model nor a GPU, and little memory: byte ranges are read, checked, rounded and written one after
another. What is written is the same, byte for byte, as the run that saved the checkpoint would have exported.

  python -m offload export ckpt/step-1000 out/ --dtype bf16

With --format deepspeed-universal: masters, moments and steps as a universal checkpoint, which DeepSpeed loads at any stage
({"checkpoint": {"load_universal": true}}).

  python -m offload export ckpt/global_step1000 ckpt/global_step1000_universal --format deepspeed-universal
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from offload.build.assembly import DTYPES
from offload.checkpoint.export.offline import check_exportable, export_checkpoint
from offload.checkpoint.export.universal import check_universal, export_universal
from offload.checkpoint.format.manifest import MANIFEST_NAME
from offload.checkpoint.format.staged_folder import require_replaceable
from offload.cli.arguments import check_can_be_written, looking_at_paths
from offload.cli.progress import ProgressLine
from offload.cli.text import format_nbytes
from offload.config import parse_nbytes
from offload.errors import UsageError

_WEIGHTS, _UNIVERSAL = "safetensors", "deepspeed-universal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a folder that save_checkpoint made")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make; it must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="dtype of the weights; fp32 is the master's precision (default: what the model ran in)",
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest size of a file (default 5GB)")
    parser.add_argument(
        "--format", choices=(_WEIGHTS, _UNIVERSAL), default=_WEIGHTS, help=f"what to write (default {_WEIGHTS})"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`export`. Returns 0."""
    if not os.path.isfile(args.checkpoint / MANIFEST_NAME):
        raise UsageError(
            f"'{args.checkpoint}' is no checkpoint: name a folder that save_checkpoint made (it holds {MANIFEST_NAME})."
        )
    with looking_at_paths():
        require_replaceable(args.out, replace=False)
        check_can_be_written(args.out, "OUT")
        (check_exportable if args.format == _WEIGHTS else check_universal)(args.checkpoint)
    progress = ProgressLine()
    if args.format == _UNIVERSAL:
        if args.dtype is not None:
            raise UsageError(f"--dtype {args.dtype} with --format {_UNIVERSAL}: it is in fp32. Leave --dtype out.")
        with progress.showing():
            count = export_universal(args.checkpoint, args.out)
        print(f"{count} parameters with their states: {args.out}")
        return 0
    dtype = DTYPES[args.dtype] if args.dtype is not None else None
    max_shard_nbytes = parse_nbytes(args.max_shard_size, "--max-shard-size")
    with progress.showing():
        count = export_checkpoint(args.checkpoint, args.out, dtype, max_shard_nbytes)
    files = sorted(args.out.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    print(f"{count} tensors in {len(files)} file{'s' if len(files) > 1 else ''}, {format_nbytes(total)}: {args.out}")
    return 0
