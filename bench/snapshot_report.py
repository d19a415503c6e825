#!/usr/bin/env python3
"""Print tables and draw the chart of bench/snapshot.py's results, without a GPU. Merges files as parts of one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parent.parent)]

from bench._snapshot import chart, results
from bench.command_line import Parser, UsageError, check_file, read_result
from bench.json_file import write_json

_FIELDS = ("gpu", "date", "commit", "versions", "scenarios", "rows")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="snapshot.json")
    parser.add_argument("--merged", type=Path, help="write the merged results here")
    parser.add_argument("--chart", type=Path, help="write the chart here, .svg or .png; needs matplotlib")
    options = parser.parse_args(arguments)
    try:
        document = _merged(options.files)
        if options.merged is not None:
            check_file("--merged", options.merged)
        if options.chart is not None:
            _check_chart(options.chart)
    except UsageError as error:
        parser.error(str(error))
    print(results.report(document))
    if options.merged is not None:
        write_json(document, options.merged)
    if options.chart is not None:
        chart.draw(document, options.chart)
    return 0


def _merged(files: Sequence[Path]) -> results.Document:
    if len({file.resolve() for file in files}) < len(files):
        raise UsageError(f"given {' '.join(map(str, files))}, expected each file once")
    documents = [read_result(file, "snapshot", _FIELDS) for file in files]
    try:
        return results.merge(documents)
    except ValueError as error:
        raise UsageError(f"cannot merge {', '.join(map(str, files))}: {error}") from error


def _check_chart(file: Path) -> None:
    if file.suffix not in (".svg", ".png"):
        raise UsageError(f"--chart: given {file}, expected a name that ends in .svg or .png")
    if not chart.is_possible():
        raise UsageError("--chart needs matplotlib: pip install -r requirements/bench.txt")
    check_file("--chart", file)


if __name__ == "__main__":
    sys.exit(main())
