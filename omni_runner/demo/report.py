"""Format the output of the demo."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from omni_runner.demo.payload_log import Comparison, Run
from omni_runner.replay import Replay

_MOST_DIFFERENCES = 10


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines, with the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def human_bytes(nbytes: int) -> str:
    """Format a size in B, KiB or MiB, with about three digits."""
    if nbytes < 2**10:
        return f"{nbytes} B"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def engine_report(stock: Run, packed: Run, comparison: Comparison) -> str:
    """Format the two runs side by side, and the verdict."""
    counted = packed.facts["counters"]
    pack = counted["pack"] or {"packs": 0, "launches": 0, "copies": 0}
    rows = [("", "stock", "packed")]

    def both(label: str, stock_cell: object, packed_cell: object) -> None:
        rows.append((label, str(stock_cell), str(packed_cell)))

    both("steps", len(stock.steps), len(packed.steps))
    both("requests", stock.requests, packed.requests)
    both("payloads", stock.payloads, packed.payloads)
    both("payload bytes", human_bytes(stock.payload_bytes), human_bytes(packed.payload_bytes))
    if stock.facts["prefix_rows"]:
        both("rows from the prefix cache", *(run.facts["prefix_rows"] for run in (stock, packed)))
    both("steps packed by column", "-", counted["columns"])
    both("steps packed whole", "-", sum(counted["whole"].values()))
    both("steps without consumer", "-", counted["empty"])
    both("packs", "-", pack["packs"])
    both("kernel launches", "-", pack["launches"])
    both("device-to-host copies", "-", pack["copies"])
    builder = [f"{statistics.median(run.facts['builder_us']):.0f} us" for run in (stock, packed)]
    both("builder, CPU time of a step, p50", *builder)
    note = (
        [] if pack["launches"] else ["  (on a CPU a pack is plain copying: nothing to launch, no device to copy from)"]
    )
    return "\n".join([table(rows), *note, *_engine_verdict(comparison)])


def _engine_verdict(comparison: Comparison) -> list[str]:
    found = comparison.differences
    if found:
        shown = [f"    {text}" for text in found[:_MOST_DIFFERENCES]]
        more = [f"    and {len(found) - len(shown)} more"] if len(found) > len(shown) else []
        return [f"  DIFFERENT in {len(found)} places:", *shown, *more]
    return [
        f"  identical: all tokens, and {comparison.tensors:,} payload tensors of "
        f"{human_bytes(comparison.nbytes)}, byte for byte"
    ]


def traces_report(replays: Sequence[tuple[str, Replay]]) -> str:
    """Format one line per replayed trace, and the differences."""
    head = ("", "steps", "payloads", "bytes", "packs", "launches", "copies", "direct", "pack call, p50", "verdict")
    rows: list[tuple[str, ...]] = [head]
    differences = []
    for name, result in replays:
        numbers = (result.packs, result.launches, result.copies, result.direct_stores)
        rows.append(
            (
                name,
                str(result.steps),
                str(result.payloads),
                human_bytes(result.payload_bytes),
                *map(str, numbers),
                f"{result.host_us:.0f} us" if result.host_us else "-",
                "identical" if result.identical else "DIFFERENT",
            )
        )
        differences += [f"    {name}, {text}" for text in result.differences[:_MOST_DIFFERENCES]]
    return "\n".join([table(rows), *differences])
