# SPDX-License-Identifier: Apache-2.0
"""Faults of the drive under runs that save and resume: right data or the right error, and the last checkpoint always good.

Every fault comes from a seed: its kind, the transfer that it strikes, the placement, the order of all transfers.
"""

from __future__ import annotations

import errno
import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import offload
from tests.drives import drive_is
from tests.tiers.faulty_io import Fault, FaultyBackend

from ..acceptance.models import Setup, adamw, stack
from ..acceptance.runs import assert_same_bits

STEPS = 4
SETUPS = (
    Setup("nvme", "nvme", "deferred"),
    Setup("nvme", "nvme", "deferred", "backward"),
    Setup("nvme", "nvme", "cpu"),
    Setup("cpu", "nvme", "cpu"),
    Setup("device", "nvme", "deferred"),
    Setup("nvme", "device", "deferred"),
)
KINDS = (
    Fault("errno", errno.EIO),
    Fault("errno", errno.ENOSPC),
    Fault("errno", errno.EIO),
    Fault("bit_flip"),
    Fault("bit_flip"),
    Fault("short"),
    Fault("delay"),
)
CODES = {"errno": (errno.EIO, errno.ENOSPC), "bit_flip": (errno.EBADMSG,), "short": (), "delay": ()}


@dataclass
class Outcome:
    """What became of one seed's run. `refused`: the fault was found, by an error or in a checkpoint that was passed over."""

    kind: str
    struck: bool
    refused: bool


class Runs:
    """One tiny training, with a save beside it after every step."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, patch
        self.transfers: dict[str, int] = {}
        self.expected = self.train(Setup("device", "device", "cpu"), FaultyBackend(0), root / "plain")

    def train(self, setup: Setup, backend: FaultyBackend, saves: Path) -> dict[str, torch.Tensor]:
        """From the last checkpoint in `saves` to the last step; the weights."""
        self.patch.setenv("OFFLOAD_ACCELERATOR", setup.accelerator)
        drive_is(self.patch, backend)
        model = stack(width=8, blocks=1)
        engine = offload.initialize(model, adamw(model), setup.fields(self.root / "nvme"))
        try:
            resumed = engine.resume_or_start(saves)
            for n in range(0 if resumed is None else resumed["n"], STEPS):
                model(torch.randn(3, 8, generator=torch.Generator().manual_seed(n))).square().mean().backward()
                engine.step()
                engine.zero_grad()
                engine.save_checkpoint(saves / f"step-{n + 1}", client_state={"n": n + 1}, keep_last=2, wait=n % 2 == 0)
            return engine.state_dict()
        finally:
            failed = engine.stats()["failure"] is not None
            if failed:
                with pytest.raises(offload.EngineFailedError):
                    engine.step()
            engine.close()

    def transfer_count(self, setup: Setup) -> int:
        if setup.name not in self.transfers:
            backend = FaultyBackend(1)
            assert_same_bits(self.train(setup, backend, self.root / "counted" / setup.name), self.expected)
            self.transfers[setup.name] = backend.submitted_count
        return self.transfers[setup.name]

    def with_fault(self, seed: int) -> Outcome:
        draw = random.Random(seed)
        setup, fault = draw.choice(SETUPS), draw.choice(KINDS)
        index = draw.randrange(self.transfer_count(setup))
        backend, saves = FaultyBackend(seed, {index: fault}), self.root / "saves" / str(seed)
        refused, what = False, f"seed {seed}: {fault} in transfer {index} of {setup.name}"
        try:
            weights = self.train(setup, backend, saves)
        except offload.StorageError as error:
            refused = True
            assert error.errno in CODES[fault.kind], f"{what}: {error}"
            self.check_message(str(error))
            weights = self.train(draw.choice(SETUPS), FaultyBackend(seed + 1), saves)
        assert_same_bits(weights, self.expected, what)
        struck = backend.struck.get(index)
        if fault.kind == "bit_flip" and struck is not None and struck.suffix == ".safetensors":
            refused = self.is_passed_over(saves, what)
        return Outcome(fault.kind, struck is not None, refused)

    def check_message(self, said: str) -> None:
        """It names the file, and whose bytes they are, or that earlier checkpoints are good."""
        if ".swap" in said:
            assert "parameters of" in said or "states of" in said
        else:
            assert ".safetensors" in said and "Earlier checkpoints are untouched" in said

    def is_passed_over(self, saves: Path, what: str) -> bool:
        """Whether a checkpoint is damaged; a resume takes the one before it then, and training ends as it would have."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = self.train(SETUPS[2], FaultyBackend(0), saves)
        assert_same_bits(weights, self.expected, what)
        return any("an older checkpoint was resumed from" in str(one.message) for one in caught)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    (tmp_path / "nvme").mkdir()
    return Runs(tmp_path, monkeypatch)


def check(runs: Runs, seeds: range) -> None:
    outcomes = [runs.with_fault(seed) for seed in seeds]
    struck = [outcome for outcome in outcomes if outcome.struck]
    assert len(struck) >= 0.95 * len(seeds)
    assert all(outcome.refused for outcome in struck if outcome.kind == "errno")
    assert not any(outcome.refused for outcome in outcomes if outcome.kind in ("short", "delay"))
    found = [outcome.refused for outcome in struck if outcome.kind == "bit_flip"]
    assert sum(found) >= 0.3 * len(found)  # the others changed what was never read again, or a checkpoint that was retired


def test_some_faults(runs: Runs) -> None:
    check(runs, range(24))


@pytest.mark.slow
def test_a_thousand_faults(runs: Runs) -> None:
    check(runs, range(24, 1124))
