"""Output of the tuner: the tuned file, a table, a chart of the gain over the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ._tune_results import MIN_GAIN, ClassResult, Findings, TransportKind, TransportTimes, geometric_mean
from ._tuned_file import FORMAT

_TRANSPORTS: dict[TransportKind, tuple[str, str]] = {
    "direct_store": ("the copy engine", "Direct stores into pinned memory"),
    "mapped_addresses": ("copying them first", "Addresses read from pinned memory"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when the tuner ran; versions as the packages report them, date as ``YYYY-MM-DD``."""

    gpu: str
    triton: str
    torch: str
    date: str


def document(machine: Machine, findings: Findings) -> dict[str, Any]:
    """The tuned file's content, see `_tuned_file`; times in microseconds."""
    return {
        "format": FORMAT,
        "gpu": machine.gpu,
        "triton": machine.triton,
        "torch": machine.torch,
        "date": machine.date,
        "complete": findings.complete,
        "direct_store_bytes": findings.threshold("direct_store"),
        "classes": {name: _class_entry(result) for name, result in findings.classes.items()},
        "transports": [
            {
                "kind": result.kind,
                "device_bytes": result.device_bytes,
                "config": str(result.config),
                "better": result.is_better,
                "usual": _transport_entry(result.usual),
                "other": _transport_entry(result.other),
            }
            for result in findings.transports
        ],
        "rejected": {str(config): why for config, why in findings.rejected.items()},
        "unusable": dict(findings.unusable),
        "skipped": dict(findings.skipped),
    }


def _class_entry(result: ClassResult) -> dict[str, Any]:
    times, default = result.times, result.default_times
    return {
        "tile_bytes": result.config.tile_bytes,
        "num_warps": result.config.num_warps,
        "gain": round(result.gain, 4),
        "alone_us": round(geometric_mean(times.alone_us), 3),
        "busy_us": round(geometric_mean(times.busy_us), 3),
        "default_alone_us": round(geometric_mean(default.alone_us), 3),
        "default_busy_us": round(geometric_mean(default.busy_us), 3),
        "default": str(result.group.default),
        "workloads": list(result.workloads),
    }


def _transport_entry(times: TransportTimes) -> dict[str, float]:
    return {
        "host_us": round(times.alone.host_us, 3),
        "landed_us": round(times.alone.landed_us, 3),
        "busy_landed_us": round(times.busy.landed_us, 3),
        "stream_us": round(times.stream_us, 3),
    }


def table(findings: Findings) -> str:
    """All findings as a text table for a terminal; times in microseconds, the default's first."""
    rows = [("size class", "default", "tuned", "alone us", "busy us", "gain")]
    for name, result in findings.classes.items():
        entry = _class_entry(result)
        tuned = str(result.config) if result.config != result.group.default else "default"
        rows.append(
            (
                name,
                entry["default"],
                tuned,
                f"{entry['default_alone_us']:.2f} -> {entry['alone_us']:.2f}",
                f"{entry['default_busy_us']:.2f} -> {entry['busy_us']:.2f}",
                f"{result.gain:.1%}",
            )
        )
    parts = [_aligned(rows)]
    if findings.transports:
        head = ("transport", "bytes", "landed us", "busy landed us", "host us", "stream us", "better")
        parts.append(_aligned([head, *_transport_rows(findings)]))
    notes = [f"configuration {config} rejected: {why}" for config, why in findings.rejected.items()]
    notes += [f"{kind} not usable: {why}" for kind, why in findings.unusable.items()]
    notes += [f"{what} skipped: {why}" for what, why in findings.skipped.items()]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join([*parts, "\n".join(_verdict(findings))])


def _transport_rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    for result in findings.transports:
        usual, other = result.usual, result.other
        yield (
            result.kind,
            str(result.device_bytes),
            f"{usual.alone.landed_us:.1f} -> {other.alone.landed_us:.1f}",
            f"{usual.busy.landed_us:.1f} -> {other.busy.landed_us:.1f}",
            f"{usual.alone.host_us:.1f} -> {other.alone.host_us:.1f}",
            f"{usual.stream_us:.2f} -> {other.stream_us:.2f}",
            "yes" if result.is_better else "no",
        )


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _verdict(findings: Findings) -> Iterator[str]:
    """One line on the gain from tuned configurations, then one line for each kind of transport."""
    won = [result for result in findings.classes.values() if result.config != result.group.default]
    if won:
        most = max(result.gain for result in won)
        yield f"Tuning gains up to {most:.1%}, in {len(won)} of {len(findings.classes)} size classes."
    elif findings.classes:
        yield f"Tuning gains nothing: no configuration is {MIN_GAIN:.0%} faster than the default in any size class."
    for kind, (usual, other) in _TRANSPORTS.items():
        threshold = findings.threshold(kind)
        if threshold is None:
            yield f"{other}: not compared with {usual}."
        elif threshold:
            yield f"{other}: better than {usual} for packs of up to {threshold} bytes."
        else:
            yield f"{other}: not better than {usual} at any size."


def chart(machine: Machine, findings: Findings) -> str:
    """Gain over the default by size class, on the idle and on the busy GPU, as an SVG."""
    bars = [
        (name, label, 1 - geometric_mean(own / base for own, base in zip(times, defaults, strict=True)))
        for name, result in findings.classes.items()
        for label, times, defaults in (
            ("alone", result.times.alone_us, result.default_times.alone_us),
            ("busy", result.times.busy_us, result.default_times.busy_us),
        )
    ]
    reach = max([0.1, *(abs(gain) for _, _, gain in bars)])
    lowest = min([0.0, *(gain for _, _, gain in bars)])
    left, width, row, top = 130, 420, 15, 54
    scale = width / (reach - lowest)
    zero = left - lowest * scale
    lines = []
    y = top
    for index, (name, label, gain) in enumerate(bars):
        if index % 2 == 0:
            y += 8
            lines.append(f'<text x="{left - 8}" y="{y + row}" text-anchor="end">{escape(name)}</text>')
        x, length = zero + min(gain, 0) * scale, abs(gain) * scale
        colour = "#4c78a8" if label == "alone" else "#f58518"
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{row - 3}" fill="{colour}"/>')
        lines.append(f'<text x="{zero + max(gain, 0) * scale + 5:.1f}" y="{y + row - 5}">{gain:+.1%} {label}</text>')
        y += row
    height = y + 16
    head = f"Time saved by tuning, {machine.gpu}, Triton {machine.triton}, {machine.date}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{height}" viewBox="0 0 680 {height}"'
            ' font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="16" y="24" font-size="14">{escape(head)}</text>',
            '<text x="16" y="42" fill="#555">GPU time of the gather against the default configuration</text>',
            f'<line x1="{zero:.1f}" y1="{top}" x2="{zero:.1f}" y2="{y + 4}" stroke="#999"/>',
            *lines,
            "</svg>",
            "",
        ]
    )
