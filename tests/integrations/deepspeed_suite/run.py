# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSpeed's own tests on `offload.deepspeed`, file by file, and writes a table of what came of them.

    DEEPSPEED_TESTS=/path/to/DeepSpeed python -m tests.integrations.deepspeed_suite.run [--retry counted] [file ...]

Fetches nothing. `outcomes.json` holds what came of every file in one run of one version of this package; `outcomes.md` is the
table made of it. A file that is named is run again, `--retry failed` runs the items that did not pass, `--retry counted` those
of them that count, `--retry open` those that nothing explains: what comes of them is kept where the version is the table's. A
whole run that was stopped goes on where it was (in the middle of a file by `--scratch`).

Each file is run by pytest in a process that is forked from this one, which has imported everything and done nothing, and each
item's ranks are forked from that: importing torch takes longer than most items.

`reasons.json` says why an item does not pass: the first pattern found in the item's name or in its last line decides. A word
is "internal: ...", "needs a GPU", "refused: ...", "DeepSpeed: ..." (it is wrong, as ...) or "skipped: ..." (the test skips
itself); what has none is "open", and what did not end in its time "hung".
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FILES = (
    *("runtime/zero", "v1/zero", "runtime/half_precision/test_*.py", "v1/half_precision", "checkpoint", "ops/adam", "ops/lion"),
    *("ops/adagrad", "runtime/test_*.py", "runtime/activation_checkpointing"),
)
ITEM_SECONDS = float(os.environ.setdefault("SUITE_ITEM_SECONDS", "60"))
COLLECTING_SECONDS = 300
_IMPORTED = (
    *("pytest", "hypothesis", "torch._dynamo", "torch.distributed.tensor", "torch.nn.parallel", "torch.utils.checkpoint"),
    *("torch._subclasses.schema_check_mode", "torch.profiler", "transformers", "offload.engine"),
)
PASSED = ("passed", "xfailed")
NOT_COUNTED = ("internal", "needs a GPU", "skipped")
WORDS = ("internal", "needs a GPU", "refused", "DeepSpeed", "skipped", "open")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--state", type=Path, default=HERE / "outcomes.json", help="what came of every file, kept and amended")
    parser.add_argument("--table", type=Path, default=HERE / "outcomes.md", help="the table made of it")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "deepspeed-suite", help="of a run that is under way")
    parser.add_argument("--retry", choices=["failed", "counted", "open"], default=None, help="only items that did not pass")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("files", nargs="*", help="below unit/; default: all that are covered")
    given = parser.parse_args()
    kept = json.loads(given.state.read_text()) if given.state.is_file() else {"version": None, "files": {}}
    reasons = json.loads((HERE / "reasons.json").read_text())
    if not given.table_only:
        now, whole = version(), not (given.files or given.retry)
        keeps = whole or kept["version"] == now
        if kept["version"] != now:
            print(f"The table is of {kept['version']}: " + ("begun anew" if whole else "what is found is not kept"), flush=True)
            kept = {"version": now, "files": {} if whole else kept["files"]}
        elif whole and set(files(_tests(), FILES)) <= set(kept["files"]):
            kept["files"] = {}
        for _file in _ran(given, kept, reasons):
            if keeps:
                given.state.write_text(json.dumps(kept, indent=0) + "\n")
        if not keeps:
            return
    given.table.write_text(table(kept, reasons))
    print(given.table.read_text().partition("| not passed")[0])


def _ran(given: argparse.Namespace, kept: dict[str, Any], reasons: Mapping[str, str]) -> Iterator[str]:
    """Runs file after file, and sets what came of each in `kept` before it is given."""
    tests, state = _tests(), kept["files"]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # nothing of it is touched, and so copied, by a collection in a process that is forked
    for file in files(tests, given.files or FILES):
        words = words_of(file, state.get(file, {"others": {}}), reasons)
        only = [name for name, word in words.items() if is_retried(word, given.retry)]
        if (given.retry and not only) or (file in state and not given.files and not given.retry):
            continue
        amends = given.retry is not None and "" not in only  # "": the file was not collected
        found, seconds = run(tests, file, given.scratch / kept["version"], only if amends else None)
        state[file] = merged(state.get(file), found, seconds, amends)
        kept["files"] = state = dict(sorted(state.items()))
        print(f"{file}: {state[file]['passed']} pass, {Counter(words_of(file, state[file], reasons).values())}", flush=True)
        yield file


def _tests() -> Path:
    tests = Path(os.environ.get("DEEPSPEED_TESTS", ""))
    tests = tests / "tests" if (tests / "tests" / "unit").is_dir() else tests
    if not (tests / "unit" / "common.py").is_file():
        raise SystemExit("DEEPSPEED_TESTS names no folder with DeepSpeed's tests: its repository, or the folder tests in it.")
    return tests


def files(tests: Path, patterns: Sequence[str]) -> list[str]:
    """Test files below unit/, in order."""
    found: dict[str, None] = {}
    for pattern in patterns:
        for path in sorted((tests / "unit").glob(pattern.removeprefix("unit/"))):
            inner = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found.update({str(one.relative_to(tests)): None for one in inner})
    return list(found)


def merged(
    before: Mapping[str, Any] | None, found: Iterable[Mapping[str, Any]], seconds: float, amends: bool
) -> dict[str, Any]:
    """The row of a file: how many items pass, what came of each other one, and the seconds of processor time it took."""
    now = {one["item"].partition("::")[2]: one for one in found}
    passed = sum(one["outcome"] in PASSED for one in now.values())
    others = {name: [one["outcome"], last_line(one["why"])] for name, one in now.items() if one["outcome"] not in PASSED}
    if amends and before is not None:
        passed += before["passed"]
        others = {name: said for name, said in before["others"].items() if name not in now} | others
        seconds += before["cpu_seconds"]
    return {"cpu_seconds": round(seconds, 1), "passed": passed, "others": others}


def version() -> str:
    """The commit, and whether anything but the table was changed since; `SUITE_VERSION` says it where the package is a copy
    outside its repository."""
    said = os.environ.get("SUITE_VERSION")
    if said is not None:
        return said
    commit = _git("rev-parse", "--short", "HEAD")
    table_itself = [f":!{(HERE / name).relative_to(ROOT)}" for name in ("outcomes.json", "outcomes.md")]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *table_itself)
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(tests: Path, file: str, scratch: Path, only: Sequence[str] | None) -> tuple[list[dict[str, Any]], float]:
    """The outcomes of a file's items, and the processor time. A process that ends in the middle of an item is begun anew after
    it."""
    folder = scratch / file.replace("/", "-").removesuffix(".py")
    folder.mkdir(parents=True, exist_ok=True)
    outcomes, current, begun = folder / "outcomes", folder / "current", _spent()
    environment = {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(tests), os.environ.get("PYTHONPATH", ""))),
        "SUITE_OUTCOMES": str(outcomes),
        "OFFLOAD_ACCELERATOR": os.environ.get("OFFLOAD_ACCELERATOR", "cpu"),
    }
    if only is not None:
        (folder / "only").write_text(json.dumps([f"{file}::{name}" if name else file for name in only]))
        environment["SUITE_ONLY"] = str(folder / "only")
    arguments = ["-p", "tests.integrations.deepspeed_suite.plugin", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    arguments += ["--rootdir", str(tests), "--basetemp", str(folder / "temporary"), "-m", "not nightly", file]
    while True:
        current.unlink(missing_ok=True)
        hung = _watched(arguments, tests, environment, folder)
        found = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
        last = current.read_text() if current.exists() else None
        if last is None or any(one["item"] == last for one in found):
            break
        why = "HUNG: and did not heed the signal" if hung else "ENDED: the process ended in it"
        with outcomes.open("a") as file_:
            file_.write(json.dumps({"item": last, "outcome": "failed", "why": why}) + "\n")
    for one in (outcomes, current, folder / "only"):
        one.unlink(missing_ok=True)
    return found, _spent() - begun


def _spent() -> float:
    """The processor time of all processes that were begun here and waited for, in seconds."""
    times = os.times()
    return times.children_user + times.children_system


def _watched(arguments: Sequence[str], tests: Path, environment: Mapping[str, str], folder: Path) -> bool:
    """Run it. Whether it had to be killed, since an item did not end although the plugin's own limits were over."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_pytest, args=(arguments, tests, environment, folder / "log"))
    process.start()
    begun, current = time.time(), folder / "current"
    try:
        while process.is_alive():
            process.join(0.1)
            since = current.stat().st_mtime if current.exists() else begun + COLLECTING_SECONDS
            if time.time() > max(since, begun) + 4 * ITEM_SECONDS:
                return True
        return False
    finally:  # its ranks, too, which a process that was ended has left behind
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _pytest(arguments: Sequence[str], tests: Path, environment: Mapping[str, str], log: Path) -> None:
    os.setsid()
    with log.open("a") as file, open(os.devnull) as nothing:
        for number, place in enumerate((nothing, file, file)):
            os.dup2(place.fileno(), number)
    os.environ.update(environment)
    os.chdir(tests)
    sys.path[:0] = [str(ROOT), str(tests)]
    sys.argv = ["pytest", *arguments]
    import pytest

    code = pytest.main(list(arguments))
    sys.stdout.flush()
    os._exit(code)


def last_line(why: str) -> str:
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    said = [
        line
        for line in lines
        if re.match(r"(E +)?[A-Za-z_.]*(Error|Exception|Lacking|Wrongly|Unfit|NotDone|WrongValue)\b", line)
    ]
    return (said[-1] if said else lines[-1] if lines else "").removeprefix("E ").strip()[:300]


def reason(item: str, outcome: str, why: str, reasons: Mapping[str, str]) -> str:
    if why.startswith("HUNG"):
        return "hung"
    if outcome == "skipped" and why.startswith("skipped: "):
        return why
    kept = why if why.partition(":")[0] in WORDS else "open"  # of a table that was made before lines were kept
    return next((word for pattern, word in reasons.items() if re.search(pattern, f"{item}\n{why}")), kept)


def words_of(file: str, row: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, str]:
    """Of a file's items that did not pass, by name, why."""
    return {name: reason(f"{file}::{name}", *said, reasons) for name, said in row["others"].items()}


def unexplained(word: str) -> bool:
    return word == "internal" or word.partition(":")[0] in ("open", "hung")


def is_retried(word: str, which: str | None) -> bool:
    """Whether an item that did not pass for this reason is run again: of "failed" what may pass on this machine some day, of
    "counted" what counts against the share too."""
    left_out = {"failed": ("needs a GPU", "skipped"), "counted": NOT_COUNTED}.get(which or "")
    return unexplained(word) or (left_out is not None and word.partition(":")[0] not in left_out)


def table(kept: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """In Markdown: counts by file, then every item that did not pass, with its word."""
    state = kept["files"]
    why = {f"{file}::{name}": word for file, row in state.items() for name, word in words_of(file, row, reasons).items()}
    by_file = {file: Counter({"passed": row["passed"]}) for file, row in state.items()}
    for item, word in why.items():
        by_file[item.partition("::")[0]][word.partition(":")[0]] += 1
    total = sum(by_file.values(), Counter())
    words = ["passed", *sorted(word for word in total if word != "passed")]
    counted = sum(total[word] for word in total if word not in NOT_COUNTED)
    lines = ["# DeepSpeed's own tests on offload.deepspeed", "", (HERE / "preface.md").read_text().strip(), ""]
    seconds = sum(row["cpu_seconds"] for row in state.values())
    lines += [
        f"One run of {kept['version']}, in {seconds / 60:.0f} minutes of processor time. Of {counted} items that neither look "
        f"at internals nor need a GPU nor skip themselves, {total['passed']} pass, {total['passed'] / max(counted, 1):.1%}. "
        f"{total['hung']} hung.",
        "",
    ]
    lines += [f"| file | items | {' | '.join(words)} |", "|---" * (len(words) + 2) + "|"]
    for file, counts in by_file.items():
        row = " | ".join(str(counts[word] or "") for word in words)
        lines.append(f"| {file} | {sum(counts.values())} | {row} |")
    lines.append(f"| all | {sum(total.values())} | {' | '.join(str(total[word]) for word in words)} |")
    lines += ["", "| not passed | why |", "|---|---|"]
    lines += [f"| {item.replace('|', '/')} | {word} |" for item, word in why.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
