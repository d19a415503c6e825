"""Merge results of several runs and print their tables.

python -m bench.engine.report OUT... --into bench/results/nvidia-h200    # merge several runs, e.g. of two engines
python -m bench.engine.report OUT                                        # only print the tables
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command_line import Parser, UsageError, check_folder, read_result
from bench.json_file import write_json

Row = Mapping[str, Any]
_LISTS = ("rows", "consumed", "verify", "backlog", "errors", "skipped")
_NOTES = ("errors", "skipped")
_COLUMNS = ("step", "sample_tokens", "snapshot", "output_object", "builder", "get_output")


def merge(parts: Sequence[Row], commit: str | None = None, options: Row | None = None) -> dict[str, dict[str, Any]]:
    """Merge results of single stages into `engine` for engine.json and `gap` for gap.json.

    Parameters
    ----------
    parts
        What `stage_process` wrote, one for each stage.
    commit, options
        What was measured, and with which options of `bench.engine.run`.
    """
    gpus = sorted({part["gpu"] for part in parts if part["gpu"]})
    engine: dict[str, Any] = {
        "bench": "engine",
        "gpu": gpus[0] if len(gpus) == 1 else gpus or None,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": {part["engine"]: part["versions"] for part in parts},
        "options": {part["engine"]: options for part in parts},
        **{name: [] for name in _LISTS},
    }
    gap: dict[str, Any] = {"bench": "engine_gap", "gpu": engine["gpu"], "stages": {}}
    for part in parts:
        origin = {"engine": part["engine"], "stage": part["stage"]}
        engine["rows"] += part["rows"]
        for name in ("consumed", "verify", "backlog", "errors"):
            engine[name] += [{**origin, **entry} for entry in part[name]]
        engine["skipped"] += [{**origin, "what": entry} for entry in part["skipped"]]
        gap["stages"][f"{part['engine']} {part['stage']}"] = part["gap"]
    return {"engine": engine, "gap": gap}


def join(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Merge several runs, keeping in each list the latest entries of each engine, stage and number of requests.

    Skipped and failed work is kept for the latest run of a stage only. Each entry names its commit.

    Raises
    ------
    UsageError
        A folder has no such results, or they can't be read.
    """
    found = [read_engine(folder) for folder in folders]
    whole: dict[str, Any] = {**found[-1], "versions": {}, "options": {}, **{name: [] for name in _LISTS}}
    for number, result in enumerate(found):
        whole["versions"] |= result["versions"]
        whole["options"] |= result.get("options", {})
        for name in _LISTS:
            later = {
                _place(entry, name)
                for other in found[number + 1 :]
                for entry in other["rows" if name in _NOTES else name]
            }
            whole[name] += [
                {"commit": result["commit"], **entry} for entry in result[name] if _place(entry, name) not in later
            ]
    stages: dict[str, Any] = {}
    for gap in map(read_gap, folders):
        stages |= {name: timelines for name, timelines in gap["stages"].items() if timelines}
    return {"engine": whole, "gap": {"bench": "engine_gap", "gpu": whole["gpu"], "stages": stages}}


def read_engine(folder: Path) -> dict[str, Any]:
    """Read the engine.json of a folder that `bench.engine.run` wrote."""
    return read_result(folder / "engine.json", "engine", ("gpu", "commit", "versions", *_LISTS))


def read_gap(folder: Path) -> dict[str, Any]:
    """Read the gap.json of such a folder; the result has no stages if there is no such file."""
    file = folder / "gap.json"
    return read_result(file, "engine_gap", ("gpu", "stages")) if file.exists() else {"gpu": None, "stages": {}}


def _place(entry: Row, name: str) -> tuple[Any, ...]:
    return entry["engine"], entry["stage"], None if name in _NOTES else entry["requests"]


def summary(result: Row) -> str:
    """Tables of a result as Markdown."""
    lines = [
        f"{result['gpu']}: times in us, p50/p99. `+`: with the sender thread, and nobody takes its chunks (on 0.30",
        "every put then polls up to 64 unread ones); `++`: with a process that takes them, as a next stage does.",
        "",
    ]
    for engine, stage in sorted({(row["engine"], row["stage"]) for row in _all_rows(result)}):
        rows = [(row, " +" if row["sender"] else "") for row in result["rows"]]
        rows += [(row, " ++") for row in result["consumed"]]
        rows = [(row, mark) for row, mark in rows if (row["engine"], row["stage"]) == (engine, stage)]
        lines += [f"### {engine} {stage}", ""]
        lines += _table(
            ("requests", "variant", "tokens/s", "chunks/s", *_COLUMNS, "pinned MiB", "equal", "steps"),
            (_cells(row, mark) for row, mark in sorted(rows, key=lambda entry: (entry[0]["requests"], entry[1]))),
        )
    if result["backlog"]:
        lines += ["### A consumer that lags without limit", ""]
        lines += _table(
            ("engine", "stage", "variant", "held", "step", "step without", "pinned MiB", "without", "equal", "steps"),
            (_backlog_cells(entry) for entry in result["backlog"]),
        )
    lines += _not_packed(_all_rows(result))
    unequal = [entry for entry in result["verify"] if entry["difference"]]
    compared = [entry for entry in result["verify"] if entry["variant"] != "stock"]
    lines += [f"Hashed passes compared with stock's: {len(compared)}, {len(unequal)} with a difference"]
    lines += [f"* {_of(entry)} {entry['variant']} {entry['requests']}: {entry['difference']}" for entry in unequal]
    lines += [
        f"* CHUNKS DIFFER: {_of(entry)} {entry['variant']} {entry['requests']}: {entry['chunk_difference']}"
        for entry in result["verify"]
        if entry["stage"] == "thinker" and entry["chunk_difference"]  # chunks of other stages depend on the load
    ]
    lines += [f"* FAILED: {_of(entry)} {entry['at']}" for entry in result["errors"]]
    if skipped := len(result["skipped"]):
        lines += [f"{skipped} pass{'es' * (skipped > 1)} not done (listed in engine.json)"]
    return "\n".join([*lines, "", *targets(result)])


def _all_rows(result: Row) -> list[Row]:
    return [*result["rows"], *result["consumed"]]


_USUAL_PATH = ("columns", "empty", "tokens_packed", "token_copies")


def _not_packed(rows: Sequence[Row]) -> list[str]:
    """List the rows with steps that did not take the path of packed columns: their figures do not measure ours."""
    lines = []
    for row in rows:
        others = {name: count for name, count in row["path"].items() if count and name not in _USUAL_PATH}
        if others:
            lines.append(f"* NOT PACKED: {_of(row)} {row['requests']} requests: {others}")
    return lines


def _of(entry: Row) -> str:
    return f"{entry['engine']} {entry['stage']}"


def targets(result: Row) -> list[str]:
    """Tables of the project's targets for each engine: the target, what was found, and whether it is met.

    Figures with the sender are given twice: with nobody taking the chunks, and with a process that takes them.
    """
    lines = []
    for engine in sorted({row["engine"] for row in _all_rows(result)}):
        rows = []
        for stage, aims in AIMS.items():
            unread, taken = (_Measured(result, engine, stage, consumed=consumed) for consumed in (False, True))
            for aim in aims:
                found, found_taken = _try(aim, unread), _try(aim, taken) if aim.has_sender else None
                if found is not None or found_taken is not None:
                    limit = f"{aim.relation} {aim.limit:g}"
                    rows.append((f"{stage}: {aim.what}", limit, *_verdict(aim, found), *_verdict(aim, found_taken)))
        if rows:
            lines += [f"### {engine}, {AIMS_REQUESTS} requests", ""]
            lines += _table(("what", "target", "found, chunks unread", "met", "chunks taken", "met"), rows)
    return lines


class _Measured:
    """Figures of one engine and stage; with a reader of the chunks if `consumed`. Missing ones raise KeyError."""

    def __init__(self, result: Row, engine: str, stage: str, *, consumed: bool) -> None:
        def is_here(row: Row) -> bool:
            return (row["engine"], row["stage"], row["requests"]) == (engine, stage, AIMS_REQUESTS)

        rows = [row for row in result["rows"] if is_here(row) and not (consumed and row["sender"])]
        rows += [row for row in result["consumed"] if is_here(row) and consumed]
        if consumed:  # rows of one run only
            commits = {row.get("commit") for row in rows if row["sender"]}
            rows = [row for row in rows if row.get("commit") in commits]
        self._rows = {(row["variant"], row["sender"]): row for row in rows}
        self._backlog = {entry["variant"]: entry for entry in result["backlog"] if is_here(entry)}

    def rate(self, variant: str, sender: bool) -> float:
        return float(self._rows[variant, sender]["tokens_per_s"])

    def us(self, key: str, variant: str, sender: bool, quantile: str = "p50") -> float:
        figures = self._rows[variant, sender][f"{key}_us"]
        if figures is None:
            raise KeyError(key)
        return float(figures[quantile])

    def less(self, key: str, sender: bool) -> float:
        """The time of stock divided by the time of ours."""
        return self.us(key, "stock", sender) / self.us(key, "ours", sender)

    def handover(self, sender: bool) -> float:
        """The time of snapshot and output object together, stock divided by ours."""

        def both(variant: str) -> float:
            return self.us("snapshot", variant, sender) + self.us("output_object", variant, sender)

        return both("stock") / both("ours")

    def lagging_p99(self) -> float:
        entry = self._backlog["ours"]
        return float(entry["step_us"]["p99"] / entry["step_us_without"]["p99"])

    def lagging_pinned_mib(self) -> float:
        return float(self._backlog["ours"]["pinned_bytes"] / 2**20)


@dataclass(frozen=True)
class Aim:
    """One of the project's targets: at least or at most `limit`."""

    what: str
    measure: Callable[[_Measured], float]
    relation: str
    limit: float
    has_sender: bool = False

    def is_met(self, found: float) -> bool:
        return found >= self.limit if self.relation == ">=" else found <= self.limit


AIMS_REQUESTS = 64
_BUDGET_MIB = 1024  # default limit of the pinned memory of a packer
_HANDOVERS = (
    Aim("snapshot + output object, stock / ours", lambda m: m.handover(False), ">=", 5),
    Aim("snapshot + output object with the sender, stock / ours", lambda m: m.handover(True), ">=", 5, True),
)
AIMS: dict[str, tuple[Aim, ...]] = {
    "thinker": (
        Aim(
            "step with the sender / without, ours",
            lambda m: m.us("step", "ours", True) / m.us("step", "ours", False),
            "<=",
            1.05,
            True,
        ),
        Aim(
            "step p99 / p50 with the sender, ours",
            lambda m: m.us("step", "ours", True, "p99") / m.us("step", "ours", True),
            "<=",
            1.2,
            True,
        ),
        Aim(
            "tokens/s with the sender, ours / stock",
            lambda m: m.rate("ours", True) / m.rate("stock", True),
            ">=",
            1.4,
            True,
        ),
        Aim(
            "tokens/s with the sender, ours / batched clones",
            lambda m: m.rate("ours", True) / m.rate("stock_batched_clones", True),
            ">=",
            1,
            True,
        ),
        Aim(
            "tokens/s with the sender, ours / the same with Python tuned",
            lambda m: m.rate("ours", True) / m.rate("stock_tuned", True),
            ">=",
            1,
            True,
        ),
        Aim("sample_tokens, stock / ours", lambda m: m.less("sample_tokens", False), ">=", 2),
        Aim("sample_tokens with the sender, stock / ours", lambda m: m.less("sample_tokens", True), ">=", 3, True),
        *_HANDOVERS,
        Aim("builder with the sender, stock / ours", lambda m: m.less("builder", True), ">=", 8, True),
        Aim("get_output with the sender, ours, ms", lambda m: m.us("get_output", "ours", True) / 1e3, ">=", 3, True),
        Aim("step p99 with an unbounded backlog / without, ours", _Measured.lagging_p99, "<=", 1.2),
        Aim("pinned MiB with an unbounded backlog, ours", _Measured.lagging_pinned_mib, "<=", _BUDGET_MIB),
    ),
    "tts": (
        Aim(
            "tokens/s with the sender, ours / stock",
            lambda m: m.rate("ours", True) / m.rate("stock", True),
            ">=",
            1.1,
            True,
        ),
        Aim("tokens/s, ours / stock", lambda m: m.rate("ours", False) / m.rate("stock", False), ">=", 1),
        *_HANDOVERS,
    ),
}


def _verdict(aim: Aim, found: float | None) -> tuple[str, str]:
    return ("-", "") if found is None else (f"{found:.2f}", "yes" if aim.is_met(found) else "NO")


def _try(aim: Aim, measured: _Measured) -> float | None:
    try:
        return aim.measure(measured)
    except (KeyError, TypeError):  # no such row; no figure in it
        return None


def _cells(row: Row, mark: str) -> Iterator[str]:
    yield str(row["requests"])
    yield row["variant"] + mark
    yield f"{row['tokens_per_s']:.0f}"
    yield "-" if row["chunks_per_s"] is None else f"{row['chunks_per_s']:.0f}"
    for key in _COLUMNS:
        yield _quantiles(row[f"{key}_us"])
    yield _mib(row["pinned_bytes"])
    yield {True: "yes", False: "NO", None: "?"}[row["payloads_equal"]]
    yield str(row["steps"])


def _backlog_cells(entry: Row) -> Iterator[str]:
    yield from (entry["engine"], entry["stage"], entry["variant"], str(entry["held_payloads"]))
    for key in ("step_us", "step_us_without"):
        yield _quantiles(entry[key])
    yield _mib(entry["pinned_bytes"])
    yield _mib(entry["pinned_bytes_without"])
    yield "yes" if entry["payloads_equal"] else "NO"
    yield str(entry.get("steps", "?"))


def _quantiles(figures: Row | None) -> str:
    return "-" if figures is None else f"{figures['p50']:.0f}/{figures['p99']:.0f}"


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.1f}"


def _table(head: Sequence[str], rows: Iterator[Any] | Sequence[Any]) -> list[str]:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return [*(f"| {line} |" for line in lines), ""]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="folders that bench.engine.run wrote")
    parser.add_argument("--into", type=Path, help="folder for engine.json and gap.json")
    args = parser.parse_args(arguments)
    try:
        found = join(args.results)
        if args.into:
            check_folder("--into", args.into)
    except UsageError as error:
        parser.error(str(error))
    if args.into:
        write_json(found["engine"], args.into / "engine.json")
        write_json(found["gap"], args.into / "gap.json", indent=None)
    print(summary(found["engine"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
