# SPDX-License-Identifier: Apache-2.0
"""`zero_to_fp32`: whole fp32 weights from a folder of checkpoints, without the model. DeepSpeed's
checkpoints and this package's are read.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.config import expanded
from offload.deepspeed.folder import UNIVERSAL, read_latest
from offload.deepspeed.owners import are_gathered, owner_of
from offload.errors import ConfigError


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return the weights by name, on the CPU. Without a `tag` it reads the checkpoint that `checkpoint_dir`/latest names."""
    del lazy_mode
    name = tag if tag is not None else read_latest(expanded(checkpoint_dir))
    if name is None:
        raise ConfigError(f"Unable to find 'latest' file in {checkpoint_dir!r}: name a tag.")
    return offload.read_values(expanded(checkpoint_dir) / name, trained_only=exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights into `output_dir`: as pytorch_model.bin or safetensors, with an index where there are several files."""
    from huggingface_hub import save_torch_state_dict

    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    output = expanded(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".writing-") as folder:  # several ranks may write, and one read already
        if max_shard_size is None and not safe_serialization:
            torch.save(values, Path(folder) / "pytorch_model.bin")
        else:
            save_torch_state_dict(
                values, folder, max_shard_size=max_shard_size or "1000GB", safe_serialization=safe_serialization
            )
        for written in sorted(Path(folder).iterdir(), key=lambda one: one.suffix == ".json"):  # the index after what it names
            written.replace(output / written.name)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load the weights into a model: on the CPU, or into the tiers where an engine has the model."""
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    engine = owner_of(model.parameters())
    if engine is not None and not are_gathered(model.parameters()):
        engine.load_state_dict(values)
        return model
    model = model if engine is not None else model.cpu()
    model.load_state_dict(values, strict=False)
    return model


def convert_to_universal(args: Any) -> None:
    """Convert what `save_checkpoint` wrote into args.input_folder to a universal checkpoint in args.output_folder."""
    folder = expanded(args.output_folder)
    offload.export_universal_checkpoint(args.input_folder, folder)
    (folder.parent / UNIVERSAL).write_text(folder.name)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return the tensors, each in memory of its own, so that a save writes no more than each has."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)((name, clone_tensors_for_torch_save(one, device)) for name, one in item.items())  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):  # a tuple of a class with names of its own becomes a plain one, as there
        return (list if isinstance(item, list) else tuple)(clone_tensors_for_torch_save(one, device) for one in item)
    return item


def main(arguments: Sequence[str] | None = None) -> None:
    """python -m offload.deepspeed.recovery CHECKPOINT_DIR OUTPUT_DIR"""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Write whole fp32 weights of a folder of checkpoints.")
    parser.add_argument("checkpoint_dir", help="the folder that holds the file 'latest'")
    parser.add_argument("output_dir", help="where the weights are written")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true")
    parser.add_argument("-t", "--tag", default=None)
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="without effect")
    given = vars(parser.parse_args(arguments))
    given.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**given)


if __name__ == "__main__":
    main()
