# SPDX-License-Identifier: Apache-2.0
"""Convert another project's checkpoint into one that `engine.load_checkpoint` and `export` take, shard by shard.

  deepspeed-zero        a folder that DeepSpeed's save_checkpoint made, of any ZeRO stage and number of ranks
  deepspeed-universal   the folder that DeepSpeed's ds_to_universal made (with `zero` in it)
  torch-dcp             a folder of torch.distributed.checkpoint (with `.metadata` in it)

Pickles in the source are read by unpicklers that know tensors and plain values only. What the source does not hold
(random states, loss scale, learning rates, ...) is listed, and stays as the run that loads the result has it.

  python -m offload import global_step1000_universal/ ckpt/step-1000
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from offload.checkpoint.format.staged_folder import require_replaceable
from offload.checkpoint_import.converting import KINDS, open_source, write_checkpoint
from offload.cli.arguments import check_can_be_written, looking_at_paths
from offload.cli.progress import ProgressLine
from offload.cli.text import format_count
from offload.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="the folder to convert")
    parser.add_argument("out", type=Path, metavar="OUT", help="the checkpoint to make")
    parser.add_argument("--kind", choices=tuple(KINDS), help="the kind of SRC (default: what it looks like)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`import`. Returns 0."""
    if not os.path.isdir(args.source):
        raise UsageError(f"'{args.source}' is no folder: name the folder of the checkpoint to convert.")
    with looking_at_paths():
        require_replaceable(args.out, replace=True)
        check_can_be_written(args.out, "OUT")
        found = open_source(args.source, args.kind)
    with ProgressLine().showing():
        write_checkpoint(found, args.out)
    trained = [parameter for parameter in found.parameters if parameter.trained]
    numel = sum(parameter.value.numel for parameter in found.parameters)
    print(
        f"{found.kind}: {len(found.parameters)} tensors ({format_count(numel)} elements), {len(trained)} of them with moments, "
        f"{len(found.buffers)} buffers, at step {found.step_count}: {args.out}"
    )
    print(f"not in the source, so kept as the loading run has it: {'; '.join(found.missing)}")
    if len(trained) < len(found.parameters):
        print("tensors without moments are loaded as buffers, as frozen parameters, or with moments of zero")
    return 0
