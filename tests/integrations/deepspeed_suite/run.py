"""Runs DeepSpeed's own tests on `offload.deepspeed`, file by file, and writes a table of what came of them.

    DEEPSPEED_TESTS=/path/to/DeepSpeed/tests python -m tests.integrations.deepspeed_suite.run [--out FOLDER] [file ...]

Fetches nothing. `reasons.json` says, for items that do not pass, why: the first pattern that is found in the item's name or in
its last line decides. A word in it is "internal", "needs a GPU", "refused: ...", "DeepSpeed: ..." (it is wrong, as ...) or
"skipped: ..." (the test skips itself); what has none is "open".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FILES = (
    *("runtime/zero", "v1/zero", "runtime/half_precision/test_*.py", "v1/half_precision", "checkpoint", "ops/adam", "ops/lion"),
    *("ops/adagrad", "runtime/test_*.py", "runtime/activation_checkpointing"),
)
FILE_SECONDS = 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="where outcomes lie; what is there already is not run again")
    parser.add_argument("--table", type=Path, default=None, help="write the table here")
    parser.add_argument("-k", dest="keyword", default=None, help="pytest's -k")
    parser.add_argument("files", nargs="*", help="below unit/; default: all that are covered")
    given = parser.parse_args()
    tests = Path(os.environ.get("DEEPSPEED_TESTS", ""))
    tests = tests / "tests" if (tests / "tests" / "unit").is_dir() else tests
    if not (tests / "unit" / "common.py").is_file():
        raise SystemExit("DEEPSPEED_TESTS names no folder with DeepSpeed's tests: its repository, or the folder tests in it.")
    out = given.out or Path(tempfile.mkdtemp(prefix="deepspeed-suite-"))
    out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for file in files(tests, given.files or FILES):
        found += run(tests, file, out, given.keyword)
    report = table(found, json.loads((HERE / "reasons.json").read_text()))
    if given.table is not None:
        given.table.write_text(report)
    print(report)


def files(tests: Path, patterns: Sequence[str]) -> list[str]:
    """Test files below unit/, in order."""
    found: dict[str, None] = {}
    for pattern in patterns:
        for path in sorted((tests / "unit").glob(pattern)):
            inner = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found.update({str(one.relative_to(tests)): None for one in inner})
    return list(found)


def run(tests: Path, file: str, out: Path, keyword: str | None) -> list[dict[str, Any]]:
    """The outcomes of a file's items. A process that ends in the middle of an item is begun anew after it."""
    folder = out / file.replace("/", "-").removesuffix(".py")
    folder.mkdir(exist_ok=True)
    outcomes, current = folder / "outcomes", folder / "current"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(tests))),
        "SUITE_OUTCOMES": str(outcomes),
        "OMP_NUM_THREADS": "1",
        "OFFLOAD_ACCELERATOR": os.environ.get("OFFLOAD_ACCELERATOR", "cpu"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.integrations.deepspeed_suite.plugin",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "addopts=", "--rootdir", str(tests), "--basetemp", str(folder / "temporary"), "-m", "not nightly", file]
    if keyword is not None:
        command += ["-k", keyword]
    while True:
        current.unlink(missing_ok=True)
        with (folder / "log").open("a") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, timeout=FILE_SECONDS, check=False)
        found = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
        last = current.read_text() if current.exists() else None
        if last is None or any(one["item"] == last for one in found):
            break
        with outcomes.open("a") as file_:
            file_.write(json.dumps({"item": last, "outcome": "failed", "why": "ENDED: the process ended or hung in it"}) + "\n")
    counts = Counter(one["outcome"] for one in found)
    print(f"{file}: {dict(counts)}", flush=True)
    return found


def last_line(why: str) -> str:
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    said = [
        line
        for line in lines
        if re.match(r"(E +)?[A-Za-z_.]*(Error|Exception|Lacking|Wrongly|Unfit|NotDone|WrongValue)\b", line)
    ]
    return (said[-1] if said else lines[-1] if lines else "").removeprefix("E ").strip()


def reason(one: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    if one["outcome"] in ("passed", "xfailed"):
        return ""
    text = f"{one['item']}\n{last_line(one['why'])}"
    return next((word for pattern, word in reasons.items() if re.search(pattern, text)), "open")


def table(found: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> str:
    """In Markdown: counts by file, then every item that did not pass, with its word."""
    by_file: dict[str, Counter[str]] = {}
    for one in found:
        word = "passed" if one["outcome"] in ("passed", "xfailed") else reason(one, reasons).partition(":")[0]
        by_file.setdefault(one["item"].partition("::")[0], Counter())[word] += 1
    total = sum(by_file.values(), Counter())
    words = ["passed", *sorted(word for word in total if word != "passed")]
    lines = [f"| file | items | {' | '.join(words)} |", "|---" * (len(words) + 2) + "|"]
    for file, counts in by_file.items():
        lines.append(f"| {file} | {sum(counts.values())} | {' | '.join(str(counts[word] or '') for word in words)} |")
    lines.append(f"| all | {sum(total.values())} | {' | '.join(str(total[word]) for word in words)} |")
    counted = total["passed"] + total["refused"] + total["open"] + total["DeepSpeed"]
    lines += ["", f"Of {counted} items that neither look at internals nor need a GPU {total['passed']} pass."]
    lines += ["", "| not passed | why |", "|---|---|"]
    for one in found:
        if one["outcome"] not in ("passed", "xfailed"):
            lines.append(f"| {one['item'].replace('|', '/')} | {reason(one, reasons)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
