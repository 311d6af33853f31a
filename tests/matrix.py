# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel beside several Pythons and versions of torch, and runs the tests of the core there.

  python tests/matrix.py --package dist/offload-0.2.0-...whl --out docs/matrix.json python3.10:2.6.0 python3.13:2.15.0
  python tests/matrix.py --package dist/offload-0.2.0.tar.gz python3:2.13.0
  python tests/matrix.py --package dist/offload-0.2.0-...aarch64.whl --interpreter ./python-under-qemu native

Each pair has an environment of its own, where the wheel is all there is of this project: no checkout, no compiler on PATH.
The tests are those that need torch alone. Their counts are written to --out, from which docs/compatibility.md says what was
tested; what it holds of other environments stays.
Of a source distribution the tests are its own: it is installed with a compiler in reach, and tested without one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("numpy", "safetensors", "psutil", "aiofiles", "isal", "rich", "pytest", "hypothesis", "setuptools")
TESTS = ("native", "layout", "planning", "tiers", "acceptance/test_torch_steps.py", "acceptance/test_unfreezing.py")
HEADER = "native/include/offload.h"
"""With which a test compares the binding."""
TRAINING = """
import platform, torch, offload
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
places = {"parameters": "nvme", "optimizer_states": "nvme", "nvme": "scratch"}
with offload.initialize(model, torch.optim.AdamW(model.parameters()), places) as engine:
    losses = []
    for _ in range(5):
        loss = model(torch.ones(4, 64)).square().mean()
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        losses.append(loss.item())
    engine.save_checkpoint("checkpoint")
    engine.load_checkpoint("checkpoint")
    assert losses[-1] < losses[0] and offload._native.available() and engine.stats()["io"] is not None
flags = set(open("/proc/cpuinfo").read().split())
levels = {"avx512bw": "avx512", "avx2": "avx2"}  # the best first
best = next((level for flag, level in levels.items() if flag in flags), "scalar")
best = "neon" if platform.machine() == "aarch64" else best  # an emulator shows the other machine's flags
assert offload._native.simd_level() == best, offload._native.simd_level()
assert "liburing" not in open("/proc/self/maps").read()
"""
"""From a drive, with the native library and the kernels of this processor."""
TOOLS = ("sh", "env", "cat", "ls")
"""All that a bare environment has on PATH."""


def environment(python: str, torch: str, folder: Path) -> Path:
    """The interpreter of an environment with this torch; made where it is missing."""
    home = folder / f"{Path(python).name}-torch-{torch}"
    own = home / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", home], check=True)
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"torch=={torch}", *NEEDED], check=True)
    return own


def put_tests(package: Path, place: Path) -> None:
    """The tests and their settings: a source distribution's own, else this checkout's."""
    if package.suffix == ".whl":
        shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)
        (place / HEADER).parent.mkdir(parents=True)
        shutil.copy(ROOT / HEADER, place / HEADER)
        return
    unpacked = place / "unpacked"
    with tarfile.open(package) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    for name in ("tests", "pyproject.toml", "native"):
        (source / name).rename(place / name)
    shutil.rmtree(unpacked)


def run_tests(own: Path, place: Path, settings: dict[str, str], tests: Sequence[str]) -> dict[str, int]:
    """How many passed, failed, ..."""
    done = subprocess.run(
        [own, "-m", "pytest", "-q", "-m", "not gpu and not slow", *(f"tests/{one}" for one in tests)],
        cwd=place,
        env=settings,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        print(done.stdout[-6000:])
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.rstrip().rsplit("\n", 1)[-1])
    return {word: int(number) for number, word in counts}


def install(python: str, torch: str, package: Path, folder: Path) -> Path:
    """The interpreter of an environment with this torch and the package."""
    own = environment(python, torch, folder)
    subprocess.run([own, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", package], check=True)
    return own


def run(own: Path, package: Path, tests: Sequence[str]) -> dict[str, object]:
    """What came of the interpreter `own`, which has the package."""
    with tempfile.TemporaryDirectory() as place:
        put_tests(package, Path(place))
        (bare := Path(place, "bin")).mkdir()
        for tool in TOOLS:
            (bare / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        started = time.monotonic()
        settings = kept | {"PATH": str(bare), "OMP_NUM_THREADS": "1", "OFFLOAD_ACCELERATOR": "cpu", "LANG": "C.UTF-8"}
        subprocess.run([own, "-c", TRAINING], cwd=place, env=settings, check=True)
        counted = run_tests(own, Path(place), settings, tests) if tests else {}
    versions = "import sys, platform, torch; print('{}.{}.{}'.format(*sys.version_info), torch.__version__, platform.machine())"
    found_python, found_torch, machine = subprocess.check_output([own, "-c", versions], text=True).split()
    print(counted or "trained", f"{time.monotonic() - started:.0f} s", flush=True)
    found = {"trained": True, "python": found_python, "torch": found_torch, "machine": machine, "package": package.name}
    return found | ({"tests": list(tests), **counted} if tests else {})


def keep(result: dict[str, object], out: Path) -> None:
    """Write it among the others, in the place of one of the same environment."""
    same = ("python", "torch", "machine")
    others = json.loads(out.read_text())["results"] if out.is_file() else []
    others = [one for one in others if any(one[name] != result[name] for name in same)]
    results = sorted([*others, result], key=lambda one: [str(one[name]) for name in ("machine", "python", "torch")])
    out.write_text(json.dumps({"results": results}, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="PYTHON:TORCH", help="or, with --interpreter, folders and files in tests/")
    parser.add_argument("--package", type=Path, required=True, help="a wheel, or a source distribution")
    parser.add_argument("--only-train", action="store_true", help="train a small model from a drive, and run no tests")
    parser.add_argument("--interpreter", type=Path, help="one that has torch and the package, such as an emulated one")
    parser.add_argument("--environments", type=Path, default=ROOT / ".matrix", help="kept for the next run")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    args = parser.parse_args()
    package, tests = args.package.absolute(), () if args.only_train else TESTS
    results = []
    for pair in [args.interpreter] if args.interpreter else args.pairs:
        if args.interpreter is not None:
            own, tests = args.interpreter.absolute(), () if args.only_train else args.pairs
        else:
            own = install(*pair.rsplit(":", 1), package, args.environments.absolute())
        print(f"== {pair}", flush=True)
        results.append(run(own, package, tests))
        if args.out is not None:
            keep(results[-1], args.out)
    bad = [one for one in results if one.get("failed") or one.get("error") or not (args.only_train or one.get("passed"))]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
