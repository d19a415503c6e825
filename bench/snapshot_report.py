#!/usr/bin/env python3
"""Tables and the chart of results of bench/snapshot.py; needs no GPU. Several files are merged: one run in parts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parent.parent)]

from bench._snapshot import chart, results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="snapshot.json")
    parser.add_argument("--merged", type=Path, help="write the merged results here")
    parser.add_argument("--chart", type=Path, help="write the chart here, .svg or .png; needs matplotlib")
    options = parser.parse_args(arguments)
    document = results.merge([json.loads(file.read_text(encoding="utf-8")) for file in options.files])
    print(f"{results.table(document)}\n\n{results.targets_table(document)}")
    if options.merged is not None:
        results.write(document, options.merged)
    if options.chart is not None:
        chart.draw(document, options.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
