"""The results file, the tables made of it, and the project's targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

Document = dict[str, Any]

_DISTRIBUTIONS = {"cuda.bindings": "cuda-bindings"}
_RIVALS = ("stock_v2", "memcpy_batch", "torch_cat")
_ALIGNMENT_BYTES = 16  # of a column in our slab


def file_in(folder: Path, gpu: str) -> Path:
    """Path of a GPU's results; the folder is the GPU's name in lower-case letters, digits and hyphens."""
    return folder / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") / "snapshot.json"


def merge(documents: Sequence[Document]) -> Document:
    """Merge runs of different scenarios on one kind of GPU into one document.

    All rows of a scenario come from one run, so ratios compare providers that were measured side by side. Each row
    names its commit.

    Raises
    ------
    ValueError
        The documents are of different GPUs or versions, or two of them have the same scenario.
    """
    first = documents[0]
    for document in documents[1:]:
        for key in ("bench", "gpu", "versions"):
            if document[key] != first[key]:
                raise ValueError(f"{key} differs: {first[key]} and {document[key]}")
    rows: dict[str, list[dict[str, Any]]] = {}
    scenarios: dict[str, Any] = {}
    for document in documents:
        if twice := [name for name in document["scenarios"] if name in scenarios]:
            raise ValueError(f"more than one file has {', '.join(twice)}: expected each scenario in one file only")
        of_commit = [{"commit": document["commit"], **row} for row in document["rows"]]
        rows |= {name: [row for row in of_commit if row["scenario"] == name] for name in document["scenarios"]}
        scenarios |= document["scenarios"]
    return {**documents[-1], "scenarios": scenarios, "rows": [row for name in scenarios for row in rows[name]]}


def version_of(package: str) -> str | None:
    """Version of an installed package; None where it is absent."""
    try:
        return metadata.version(_DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return None


def report(document: Document) -> str:
    """The table and the targets. No targets for the CPU, where figures mean nothing."""
    if document["gpu"] == "cpu":
        return f"{table(document)}\n\nno targets: this was measured on the CPU, where the figures mean nothing"
    return f"{table(document)}\n\n{targets_table(document)}"


def table(document: Document) -> str:
    """All rows, with medians in microseconds, and p99.9 for two of the host times."""
    head = (
        "scenario",
        "provider",
        "host",
        "p99.9",
        "steady",
        "p99.9",
        "busy",
        "landed",
        "ready",
        "stream",
        "d2h MB",
        "payload MB",
        "pinned",
        "compiled",
    )
    lines: list[Sequence[str]] = [head]
    for row in document["rows"]:
        lines.append(
            (
                row["scenario"],
                row["provider"],
                _cell(_get(row, "host_us")),
                _cell(_get(row, "host_us", "p999")),
                _cell(_get(row, "host_steady_us")),
                _cell(_get(row, "host_steady_us", "p999")),
                _cell(_get(row, "host_busy_us")),
                _cell(_get(row, "landed_us")),
                _cell(_get(row, "ready_us")),
                _cell(row["compute_stream_us"]),
                _cell(row["d2h_bytes"] and row["d2h_bytes"] / 1e6, "{:.3f}"),
                _cell(row["payload_bytes"] / 1e6, "{:.3f}"),
                _cell(row["pinned_allocations"], "{}"),
                _cell(row["compilations"], "{}"),
            )
        )
        if "error" in row or "note" in row:
            lines.append(("", f"  {row.get('error') or row.get('note')}"))
    return _align(lines, left=(0, 1))


def _cell(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)


def _align(lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Pad cells to columns, the `left` ones flush left. A line with fewer cells is a remark and stays unchanged."""
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    texts = []
    for line in lines:
        if len(line) == len(widths):
            padded = [
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            texts.append("  ".join(padded).rstrip())
        else:
            texts.append("".join(line))
    return "\n".join(texts)


def _get(row: dict[str, Any] | None, measure: str, rank: str = "p50") -> float | None:
    figures = None if row is None else row.get(measure)
    return figures if figures is None or not isinstance(figures, dict) else figures[rank]


class _Rows:
    """Rows by scenario and provider."""

    def __init__(self, document: Document) -> None:
        self._rows = {(row["scenario"], row["provider"]): row for row in document["rows"]}
        self.scenarios = list(document["scenarios"])
        self.about = document["scenarios"]

    def get(self, scenario: str, provider: str, measure: str, rank: str = "p50") -> float | None:
        return _get(self._rows.get((scenario, provider)), measure, rank)

    def ratio(self, measure: str, scenario: str, dividend: str, divisor: str) -> float | None:
        """The dividend's figure divided by the divisor's; None where one is missing or the divisor's is 0."""
        above, below = self.get(scenario, dividend, measure), self.get(scenario, divisor, measure)
        return above / below if above is not None and below else None


@dataclass(frozen=True)
class Target:
    """One of the project's targets.

    Attributes
    ----------
    what : str
        Description of the figure.
    limit : float
        The lowest allowed figure if `at_least`, else the highest.
    at_least : bool
        Whether the limit is a lower one.
    figure : callable
        Computes the figure and the scenario it comes from (may be empty); None where a row is missing.
    unit : str
        Unit printed after the figure.
    """

    what: str
    limit: float
    at_least: bool
    figure: Callable[[_Rows], tuple[float, str] | None]
    unit: str = "x"


_Found = tuple[float, str] | None
_Figure = Callable[[_Rows], _Found]


def _plain(figure: float | None, where: str = "") -> _Found:
    return None if figure is None else (figure, where)


def _faster(measure: str, scenario: str, rival: str) -> _Figure:
    return lambda rows: _plain(rows.ratio(measure, scenario, rival, "ours"))


def _slower(measure: str, scenario: str, ceiling: str) -> _Figure:
    return lambda rows: _plain(rows.ratio(measure, scenario, "ours", ceiling))


def _least_lead(measure: str, rival: str) -> _Figure:
    """The smallest lead over a rival, and its scenario."""

    def figure(rows: _Rows) -> _Found:
        leads = [
            (lead, scenario)
            for scenario in rows.scenarios
            if (lead := rows.ratio(measure, scenario, rival, "ours")) is not None
        ]
        return min(leads, default=None)

    return figure


def _worst_tail(measure: str) -> _Figure:
    def figure(rows: _Rows) -> _Found:
        tails = [
            (tail / typical, scenario)
            for scenario in rows.scenarios
            if (tail := rows.get(scenario, "ours", measure, "p999"))
            and (typical := rows.get(scenario, "ours", measure))
        ]
        return max(tails, default=None)

    return figure


def _surplus(*only: str) -> _Figure:
    """The most bytes per leaf that are copied beyond what the consumers get."""

    def figure(rows: _Rows) -> _Found:
        surplus = [
            ((copied - needed) / rows.about[scenario]["leaves"], scenario)
            for scenario in only or rows.scenarios
            if (copied := rows.get(scenario, "ours", "d2h_bytes")) is not None
            and (needed := rows.get(scenario, "ours", "payload_bytes")) is not None
        ]
        return max(surplus, default=None)

    return figure


def _most(measure: str) -> _Figure:
    def figure(rows: _Rows) -> _Found:
        counts = [
            (count, scenario)
            for scenario in rows.scenarios
            if (count := rows.get(scenario, "ours", measure)) is not None
        ]
        return max(counts, default=None)

    return figure


def _growth(measure: str) -> _Figure:
    def figure(rows: _Rows) -> _Found:
        many, one = (rows.get(f"thinker_decode_{count}", "ours", measure) for count in (256, 1))
        return _plain(many / one if many and one else None)

    return figure


def _per_leaf(measure: str) -> _Figure:
    def figure(rows: _Rows) -> _Found:
        many, few = (rows.get(name, "ours", measure) for name in ("many_leaves", "few_leaves"))
        if many is None or few is None:
            return None
        count = rows.about["many_leaves"]["leaves"] - rows.about["few_leaves"]["leaves"]
        return _plain((many - few) / count)

    return figure


def _both(what: str, limit: float, at_least: bool, figure: Callable[[str], _Figure], unit: str = "x") -> list[Target]:
    """A target for the host time, once for isolated calls and once for calls in quick succession."""
    return [
        Target(f"{name}{what}", limit, at_least, figure(measure), unit)
        for name, measure in (("host", "host_us"), ("host, steady", "host_steady_us"))
    ]


TARGETS = (
    *(
        target
        for scenario, limit in (
            ("thinker_decode_64", 15),
            ("talker_decode_64", 6),
            ("tts_decode_64", 12),
            ("thinker_prefill_8k", 8),
        )
        for target in _both(
            f", {scenario}: stock V1 / ours",
            limit,
            True,
            partial(_faster, scenario=scenario, rival="stock_v1"),
        )
    ),
    *_both(
        ", thinker_decode_64: MRv2 / ours", 10, True, partial(_faster, scenario="thinker_decode_64", rival="stock_v2")
    ),
    *(
        target
        for rival in _RIVALS
        for target in _both(f", closest scenario: {rival} / ours", 1, True, partial(_least_lead, rival=rival))
    ),
    *_both(" p99.9 / p50, worst scenario", 3, False, _worst_tail),
    Target("ready, thinker_decode_64: stock V1 / ours", 4, True, _faster("ready_us", "thinker_decode_64", "stock_v1")),
    *(
        Target(
            f"landed, {name}: ours / one copy",
            1.04,
            False,
            _slower("landed_us", name, "one_copy"),
        )
        for name in ("thinker_prefill_8k", "thinker_prefill_32k")
    ),
    Target(
        "stream, thinker_prefill_32k: ours / device copy",
        1.05,
        False,
        _slower("compute_stream_us", "thinker_prefill_32k", "device_copy"),
    ),
    Target(
        "stream, thinker_decode_64",
        4,
        False,
        lambda rows: _plain(rows.get("thinker_decode_64", "ours", "compute_stream_us")),
        "us",
    ),
    Target("d2h beyond the payload, per leaf, worst scenario", _ALIGNMENT_BYTES, False, _surplus(), "B"),
    *(
        Target(f"d2h beyond the payload, per leaf, {name}", _ALIGNMENT_BYTES, False, _surplus(name), "B")
        for name in ("thinker_padded", "thinker_subset")
    ),
    *_both(", growth: thinker_decode 256 / 1", 1.3, False, _growth),
    *_both(", growth: per leaf from 2 to 128", 0.5, False, _per_leaf, "us"),
    Target("pinned allocations while measured, worst scenario", 0, False, _most("pinned_allocations"), ""),
    Target("compilations while measured, worst scenario", 0, False, _most("compilations"), ""),
)


def targets_table(document: Document) -> str:
    """Each target, what was found and whether it is met."""
    rows = _Rows(document)
    lines: list[Sequence[str]] = [("what", "found", "target", "met")]
    for target in TARGETS:
        found = target.figure(rows)
        limit = f"{'>=' if target.at_least else '<='} {target.limit:g} {target.unit}".rstrip()
        if found is None:
            lines.append((target.what, "-", limit, "not measured"))
            continue
        figure, where = found
        met = figure >= target.limit if target.at_least else figure <= target.limit
        verdict = f"{'yes' if met else 'NO'}  {where}".rstrip()
        lines.append((target.what, f"{figure:.2f} {target.unit}".rstrip(), limit, verdict))
    return _align(lines, left=(0, 3))
