# SPDX-License-Identifier: Apache-2.0
"""docs/huggingface.md: every block of code runs, in order, as one script."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained("checkpoint")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        if "BitsAndBytesConfig" in block and importlib.util.find_spec("bitsandbytes") is None:
            continue
        exec(compile(block, f"huggingface.md, block {number}", "exec"), names)
    names["engine"].close()  # type: ignore[attr-defined]
