# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import and that are not here: their use raises an error that says why."""

from __future__ import annotations

from typing import Any

from torch import nn

from offload.errors import UsageError

_WHOLE_LAYERS = "every rank computes whole layers here; what does not fit in its memory goes to cpu or nvme"


class PipelineModule(nn.Module):
    def __init__(self, *args: Any, **keywords: Any) -> None:
        raise UsageError(f"PipelineModule is not in offload: {_WHOLE_LAYERS}. Make an ordinary module of the layers.")


class LayerSpec:
    def __init__(self, *args: Any, **keywords: Any) -> None:
        raise UsageError(f"LayerSpec is not in offload: {_WHOLE_LAYERS}. Make an ordinary module of the layers.")


class TiedLayerSpec(LayerSpec):
    pass
