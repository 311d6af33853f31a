"""The fixtures of the acceptance tests: a seed, a folder for NVMe, and `opened`, which opens an engine in a setup."""

from __future__ import annotations

from ..acceptance.conftest import nvme, opened, settled

__all__ = ["nvme", "opened", "settled"]
