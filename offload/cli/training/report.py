# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a run, and the same as JSON."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

import offload
from offload.cli.corpus import TokenStream
from offload.cli.process import rss_peak_nbytes
from offload.cli.text import format_count, format_nbytes, format_rate, format_seconds, table
from offload.cli.training.measuring import PHASES, EngineMeter, IoTotals

_TAIL_STEPS = 5
_STATES = ("parameters", "optimizer states", "gradients")


def make_report(
    args: argparse.Namespace,
    title: str,
    model: nn.Module,
    stream: TokenStream,
    config: offload.Config,
    meter: EngineMeter,
    io: IoTotals,
) -> dict[str, Any]:
    """Everything the table says, in bytes and seconds. `io`: the counters when the last step ended."""
    stats, measurements, losses = meter.latest, meter.measurements, meter.measurements.losses
    numel = sum(parameter.numel() for parameter in model.parameters())
    training_io = io - meter.initial_io
    return {
        "offload": offload.__version__,
        "model": {"title": title, "parameter_numel": numel},
        "data": {
            "source": args.data,
            "document_count": stream.document_count,
            "token_count": len(stream),
            "vocabulary_size": stream.vocabulary_size,
        },
        "batch": {"sequence": args.sequence, "batch": args.batch, "accumulate": args.accumulate},
        "placement": stats["placement"],
        "states": stats["planned"],
        "memory": _memory(config, meter),
        "resumed_step_count": measurements.resumed_step_count,
        "step_count": measurements.step_count,
        "wanted_step_count": args.steps,
        "skipped_step_count": stats["skipped_steps"],
        "token_count": measurements.token_count,
        "losses": losses,
        "held_out": {"loss": measurements.held_out_loss, "token_count": measurements.held_out_tokens},
        "seconds": dict(measurements.seconds),
        "waits": dict(sorted(measurements.waits.items())),
        "io": {
            "backend": stats["io_backend"],
            "initial_written_nbytes": meter.initial_io.written_nbytes,
            "read_nbytes": training_io.read_nbytes,
            "written_nbytes": training_io.written_nbytes,
            "read_seconds": training_io.read_seconds,
            "write_seconds": training_io.write_seconds,
        },
        "interrupted": measurements.interrupted,
    }


def _memory(config: offload.Config, meter: EngineMeter) -> dict[str, Any]:
    return {
        "cpu": {
            "budget_nbytes": config.cpu_memory,
            "planned_nbytes": meter.planned_nbytes("cpu"),
            "peak_nbytes": meter.host_peak_nbytes,
        },
        "device": {
            "budget_nbytes": config.device_memory,
            "planned_nbytes": meter.planned_nbytes("device"),
            "peak_nbytes": meter.device_peak_nbytes,
        },
        "process": {"before_nbytes": meter.measurements.rss_before_nbytes, "peak_nbytes": rss_peak_nbytes()},
    }


def print_report(report: dict[str, Any]) -> None:
    """The table, on standard output."""
    sections = [_headline(report), _states_table(report), _memory_table(report)]
    if report["step_count"]:
        sections += [_time_table(report), _waits_table(report), _io_table(report)]
    print("\n" + "\n\n".join(section for section in sections if section))


def _headline(report: dict[str, Any]) -> str:
    model, losses, seconds = report["model"], report["losses"], report["seconds"]
    lines = [f"{model['title']}: {format_count(model['parameter_numel'])} parameters"]
    before = report["resumed_step_count"]
    if not losses:
        ended = "interrupted before the first step ended" if report["interrupted"] else f"all {before} steps were done before"
        return f"{lines[0]}\n{ended}"
    rate = report["token_count"] / seconds["training"]
    ended = " (ended by a signal)" if report["interrupted"] else ""
    wanted = report["wanted_step_count"]
    if not ended and wanted is not None and before + report["step_count"] < wanted:
        ended = f" (of {wanted - before}: the time that --seconds gives was over)"
    resumed = f" after the {before} of earlier runs" if before else ""
    lines.append(
        f"{report['step_count']} steps{resumed} in {format_seconds(seconds['training'])}{ended}, {report['token_count']} "
        f"tokens, {rate:.1f} tokens/s"
    )
    tail = losses[-_TAIL_STEPS:]
    mean = f" (mean of the last {len(tail)} steps {sum(tail) / len(tail):.4f})" if len(losses) > len(tail) else ""
    held_out = report["held_out"]
    after = f", held out {held_out['loss']:.4f} ({held_out['token_count']} tokens)" if held_out["loss"] is not None else ""
    lines.append(f"loss: first {losses[0]:.4f}, last {losses[-1]:.4f}{mean}{after}")
    if report["skipped_step_count"]:
        lines.append(f"{report['skipped_step_count']} steps left out because a gradient was not finite")
    return "\n".join(lines)


def _states_table(report: dict[str, Any]) -> str:
    numel = report["model"]["parameter_numel"]

    def row(name: str, nbytes: int, where: str) -> tuple[str, ...]:
        return name, format_nbytes(nbytes), where, f"{nbytes / numel:.2f}"

    states = [line for line in report["states"] if _is_state(line, report["placement"])]
    rows = [row(line["purpose"], line["nbytes"], line["tier"]) for line in states]
    rows.append(row("states together", sum(line["nbytes"] for line in states), ""))
    rows += [row(_buffer_name(line), line["nbytes"], line["tier"]) for line in report["states"] if line not in states]
    return "What there is and where it lived\n" + table(("", "bytes", "where", "B/parameter"), rows, left_columns=(0, 2))


def _is_state(line: dict[str, Any], placement: dict[str, str]) -> bool:
    """Whether the line is a state in its home. Gradients that live on NVMe have buffers of the same name in host memory."""
    if line["purpose"] == "gradients":
        return placement["gradients"] != "nvme" or line["tier"] == "nvme"
    return line["purpose"] in _STATES


def _buffer_name(line: dict[str, Any]) -> str:
    return line["purpose"] if line["purpose"] == "parameters in use" else f"staging: {line['purpose']}"


def _memory_table(report: dict[str, Any]) -> str:
    def cell(nbytes: int | None) -> str:
        return "-" if nbytes is None else format_nbytes(nbytes)

    memory = report["memory"]
    rows = []
    for tier, name in (("cpu", "host memory, engine"), ("device", "device memory, engine")):
        part = memory[tier]
        if part["planned_nbytes"] or part["budget_nbytes"] or part["peak_nbytes"]:
            rows.append((name, cell(part["budget_nbytes"]), cell(part["planned_nbytes"]), cell(part["peak_nbytes"])))
    process = memory["process"]
    rows.append(("host memory, whole process", "", "", cell(process["peak_nbytes"])))
    rows.append(("  of it Python and libraries before the model", "", "", cell(process["before_nbytes"])))
    return "Memory\n" + table(("", "budget", "planned", "measured peak"), rows)


def _time_table(report: dict[str, Any]) -> str:
    seconds, steps = report["seconds"], report["step_count"]
    training = seconds["training"]

    def row(name: str, share: str) -> tuple[str, ...]:
        return name, format_seconds(seconds[name]), format_seconds(seconds[name] / steps), share

    rows = [row(name, f"{100 * seconds[name] / training:.1f} %") for name in PHASES if name in seconds]
    rows.append(row("training", "100 %"))
    for name, title in (
        ("build", "before: build the model without memory"),
        ("initialize", "before: fill the tiers"),
        ("save", "after: the rest of the last checkpoint"),
        ("evaluation", "held-out loss"),
        ("export", "after: export"),
        ("close", "after: finish and close"),
        ("total", "whole command"),
    ):
        if name in seconds and not (name == "save" and seconds[name] < 0.01):  # then nothing was left to write
            rows.append((title, format_seconds(seconds[name]), "", ""))
    return "Time\n" + table(("", "total", "per step", "share"), rows)


def _waits_table(report: dict[str, Any]) -> str:
    waits, steps = report["waits"], report["step_count"]
    if not waits:
        return ""
    rows = [(name, format_seconds(seconds), format_seconds(seconds / steps)) for name, seconds in waits.items()]
    return "What was waited for (wait, work: in the model's thread; lane: in the update's, beside it)\n" + table(
        ("", "total", "per step"), rows
    )


def _io_table(report: dict[str, Any]) -> str:
    io, steps, training = report["io"], report["step_count"], report["seconds"]["training"]
    if io["backend"] is None:
        return ""

    def row(done: str, busy_seconds: float) -> tuple[str, ...]:
        nbytes = io[f"{done}_nbytes"]
        rates = (format_rate(nbytes, training), format_rate(nbytes, busy_seconds))
        return done, format_nbytes(nbytes), format_nbytes(nbytes / steps), *rates

    rows = [row("read", io["read_seconds"]), row("written", io["write_seconds"])]
    return f"NVMe, by {io['backend']}\n" + table(("", "total", "per step", "over the run", "while busy"), rows)
