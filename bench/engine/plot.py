"""Draw the figures of an engine result as SVG, without any library.

python -m bench.engine.plot bench/results/nvidia-h200 --into docs/figures

`gap.svg` shows consecutive decode steps of a stage, stock above ours on one time scale, and the gap between them.
`throughput.svg` shows tokens per second and step times of every variant: without the sender thread, and with it, its
chunks unread or taken by a process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any
from xml.sax.saxutils import escape

from bench.command_line import Parser, UsageError, check_folder
from bench.engine.report import read_engine, read_gap

WIDTH, LEFT, RIGHT = 960, 130, 24
LANE, LANE_GAP = 20, 6
INK, MUTED, GRID, PAPER = "#1f2937", "#6b7280", "#e5e7eb", "#ffffff"
COLOURS = {
    "forward": "#2563eb", "kernels": "#93c5fd", "copies": "#0d9488", "execute_model": "#cbd5e1",
    "sample_tokens": "#94a3b8", "snapshot": "#f59e0b", "output_object": "#dc2626", "get_output": "#ede9fe",
    "update": "#e2e8f0", "builder": "#7c3aed", "send": "#10b981",
}  # fmt: skip
# The spans that each lane shows; later ones are drawn on top of earlier ones.
LANES = (
    ("GPU", ("kernels", "forward")),
    ("copies to host", ("copies",)),
    ("engine thread", ("execute_model", "sample_tokens", "get_output", "update", "snapshot", "output_object")),
    ("builder thread", ("builder",)),
    ("sender thread", ("send",)),
)
LEGEND = {
    "forward": "forward pass", "kernels": "other kernels", "copies": "copy to host", "execute_model": "execute_model",
    "sample_tokens": "sample_tokens", "snapshot": "snapshot", "output_object": "output object",
    "get_output": "get_output (waits)", "builder": "payload builder", "send": "chunk sender",
}  # fmt: skip
VARIANT_COLOURS = {"stock": "#94a3b8", "stock_batched_clones": "#60a5fa", "stock_tuned": "#38bdf8", "ours": "#7c3aed"}
VARIANT_NAMES = {
    "stock": "stock",
    "stock_batched_clones": "stock, clones batched",
    "stock_tuned": "clones batched, Python tuned",
    "ours": "omni-runner",
}
STAGE_NAMES = {"thinker": "Qwen3-Omni Thinker", "talker": "Qwen3-Omni Talker", "tts": "Qwen3-TTS"}


class Drawing:
    """Collects SVG elements from the top down."""

    def __init__(self, title: str, note: str) -> None:
        self.height = 62.0
        self._elements: list[str] = []
        self.text(20, 28, title, size=17, weight=600)
        self.text(20, 48, note, size=12, colour=MUTED)

    def rect(self, x: float, y: float, width: float, height: float, colour: str, **more: str) -> None:
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        size = f'width="{max(width, 0.6):.1f}" height="{height:.1f}"'
        self._elements.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"{attributes}/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str, dash: str = "none") -> None:
        ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        self._elements.append(f'<line {ends} stroke="{colour}" stroke-dasharray="{dash}"/>')

    def text(
        self, x: float, y: float, text: str, size: int = 12, colour: str = INK, anchor: str = "start", weight: int = 400
    ) -> None:
        self._elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.height:.0f}" viewBox="0 0 {WIDTH} {self.height:.0f}"'
        font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
        paper = f'<rect width="{WIDTH}" height="{self.height:.0f}" rx="8" fill="{PAPER}"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
        return "\n".join([head, paper, *self._elements, "</svg>", ""])


def draw_gap(gap: Mapping[str, Any], engine: str, stage: str, sender: bool = True) -> str:
    """Draw consecutive decode steps of stock and ours."""
    found = gap["stages"][f"{engine} {stage}"]
    suffix = "_sender" if sender else ""
    panels = [(variant, found[f"{variant}{suffix}"]) for variant in ("stock", "ours") if f"{variant}{suffix}" in found]
    panels = [(variant, panel) for variant, panel in panels if panel["lanes"]]
    if not panels:
        raise ValueError(f"no timeline of {engine} {stage} {'with' if sender else 'without'} the sender")
    requests = panels[0][1]["requests"]
    drawing = Drawing(
        f"{STAGE_NAMES[stage]}: the gap between decode steps",
        f"{requests} requests, vllm-omni {engine}, {gap['gpu']}, "
        + ("with" if sender else "without") + " the connector's sender thread; a few steps under torch's profiler",
    )  # fmt: skip
    longest = max(panel["lanes"]["end_us"] for _, panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / longest
    for variant, panel in panels:
        _panel(drawing, variant, panel, scale)
    _axis(drawing, longest, scale)
    _legend(drawing, LEGEND, {key: COLOURS[key] for key in LEGEND})
    return drawing.svg()


def _panel(drawing: Drawing, variant: str, panel: Mapping[str, Any], scale: float) -> None:
    lanes = panel["lanes"]
    top = drawing.height + 22
    drawing.text(20, top - 6, VARIANT_NAMES[variant], size=14, weight=600, colour=VARIANT_COLOURS[variant])
    figures = (
        f"gap {median(panel['gap_us']) / 1e3:.2f} ms, GPU idle in it {median(panel['idle_us']) / 1e3:.2f} ms, "
        f"step {median(panel['step_us']) / 1e3:.2f} ms (medians of {len(panel['gap_us'])} steps)"
    )
    drawing.text(WIDTH - RIGHT, top - 6, figures, colour=MUTED, anchor="end")
    used = [(name, keys) for name, keys in LANES if any(lanes.get(key) for key in keys)]
    bottom = top + len(used) * (LANE + LANE_GAP)
    for before, after in zip(lanes["forward"], lanes["forward"][1:], strict=False):
        drawing.rect(LEFT + before[1] * scale, top, (after[0] - before[1]) * scale, bottom - top, "#fef3c7")
    for number, (name, keys) in enumerate(used):
        y = top + number * (LANE + LANE_GAP)
        drawing.text(LEFT - 10, y + 14, name, colour=MUTED, anchor="end")
        for key in keys:
            inset = 3 if key in ("snapshot", "output_object") else 0
            for start, end in lanes.get(key, []):
                left = max(start, 0.0)
                if end > left:
                    drawing.rect(LEFT + left * scale, y + inset, (end - left) * scale, LANE - 2 * inset, COLOURS[key])
    drawing.height = bottom + 6


def _axis(drawing: Drawing, longest_us: float, scale: float) -> None:
    y = drawing.height + 4
    drawing.line(LEFT, y, WIDTH - RIGHT, y, GRID)
    tick = _tick(longest_us / 1e3)
    count = int(longest_us / 1e3 / tick)
    for number in range(count + 1):
        x = LEFT + number * tick * 1e3 * scale
        drawing.line(x, y, x, y + 4, MUTED)
        unit = " ms" if number == count else ""
        drawing.text(x, y + 17, f"{number * tick:g}{unit}", colour=MUTED, anchor="middle")
    drawing.height = y + 24


def _tick(span: float) -> float:
    """A round tick distance that divides `span` into at most ten parts."""
    tick = 10.0 ** len(str(int(span)))
    for finer in (5, 2.5, 2, 1, 0.5, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01):
        candidate = finer * 10 ** (len(str(int(span))) - 1)
        if span / candidate <= 10:
            tick = candidate
    return tick


def _legend(
    drawing: Drawing,
    names: Mapping[str, str],
    colours: Mapping[str, str],
    opacities: Mapping[str, str] = MappingProxyType({}),
) -> None:
    x, y = float(LEFT), drawing.height + 6
    for key, name in names.items():
        width = 18 + 6.4 * len(name) + 14
        if x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + 20
        drawing.rect(x, y, 12, 12, colours[key], rx="2", opacity=opacities.get(key, "1"))
        drawing.text(x + 17, y + 10, name, colour=MUTED)
        x += width
    drawing.height = y + 26


def draw_throughput(result: Mapping[str, Any], engine: str, stages: Sequence[str], requests: int = 64) -> str:
    """Draw tokens per second by stage and variant: bars for unread and for read chunks, a mark for no sender.

    Beside each bar are p50 and p99 of the step time.
    """
    found = _throughput_rows(result, engine, requests)
    kinds = [kind for kind in _KINDS if any(key[2] == kind for key in found)]
    note = (
        f"{requests} requests, vllm-omni {engine}, {result['gpu']}; the mark shows the same variant without the sender"
    )
    drawing = Drawing("Tokens per second with the connector's sender thread", note)
    for stage in stages:
        present = [variant for variant in VARIANT_NAMES if any((stage, variant, kind) in found for kind in kinds)]
        if not present:
            continue
        most = max(row["tokens_per_s"] for (of_stage, _, _), row in found.items() if of_stage == stage)
        scale = (WIDTH - _BARS_LEFT - 250) / most
        drawing.text(20, drawing.height + 18, STAGE_NAMES[stage], size=14, weight=600)
        drawing.height += 28
        for variant in present:
            _throughput_bars(drawing, found, stage, variant, scale)
    drawing.height += 4
    if "consumed" in kinds:
        _legend(drawing, _KINDS, dict.fromkeys(_KINDS, VARIANT_COLOURS["ours"]), {"consumed": _PALE})
    drawing.height += 8
    return drawing.svg()


_BARS_LEFT = 220
_PALE = "0.45"  # opacity of the bars with a reader
_KINDS = {"unread": "nobody takes the chunks", "consumed": "a process takes the chunks, as a next stage does"}
_Rows = Mapping[tuple[str, str, str], Mapping[str, Any]]  # by stage, variant and "alone" or one of _KINDS


def _throughput_rows(result: Mapping[str, Any], engine: str, requests: int) -> _Rows:
    rows = [(row, "unread" if row["sender"] else "alone") for row in result["rows"]]
    rows += [(row, "consumed") for row in result["consumed"]]
    return {
        (row["stage"], row["variant"], kind): row
        for row, kind in rows
        if (row["engine"], row["requests"]) == (engine, requests)
    }


def _throughput_bars(drawing: Drawing, found: _Rows, stage: str, variant: str, scale: float) -> None:
    """The bars of one variant, one below the other."""
    kinds = [kind for kind in _KINDS if (stage, variant, kind) in found]
    top = drawing.height
    drawing.text(_BARS_LEFT - 10, top + 15, VARIANT_NAMES[variant], colour=MUTED, anchor="end")
    alone = found.get((stage, variant, "alone"))
    mark = 0.0 if alone is None else alone["tokens_per_s"] * scale
    for kind in kinds:
        y, row = drawing.height, found[stage, variant, kind]
        rate, step = row["tokens_per_s"], row["step_us"]
        opacity = {"opacity": _PALE} if kind == "consumed" else {}
        drawing.rect(_BARS_LEFT, y, rate * scale, LANE, VARIANT_COLOURS[variant], rx="3", **opacity)
        stock = found.get((stage, "stock", kind))
        gain = "" if stock is None else f" ({rate / stock['tokens_per_s']:.2f}x)"
        x = _BARS_LEFT + max(rate * scale, mark) + 8
        drawing.text(x, y + 14, f"{rate:,.0f}{gain}", weight=600 if variant == "ours" else 400)
        if step is not None:
            drawing.text(x + 96, y + 14, f"step {step['p50'] / 1e3:.1f}, p99 {step['p99'] / 1e3:.0f} ms", colour=MUTED)
        drawing.height += LANE + 3
    if alone is not None and kinds:
        drawing.line(_BARS_LEFT + mark, top - 2, _BARS_LEFT + mark, drawing.height - 1, INK, dash="3 2")
    drawing.height += LANE_GAP + 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder with engine.json and gap.json")
    parser.add_argument("--into", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--engine", default="0.30")
    parser.add_argument("--stage", default="thinker", choices=list(STAGE_NAMES), help="of gap.svg")
    parser.add_argument("--without-sender", action="store_true", help="gap.svg of a stage that sends nothing")
    args = parser.parse_args(arguments)
    try:
        result, gap = read_engine(args.results), read_gap(args.results)
        check_folder("--into", args.into)
    except UsageError as error:
        parser.error(str(error))
    (args.into / "throughput.svg").write_text(draw_throughput(result, args.engine, list(STAGE_NAMES)))
    try:
        drawn = draw_gap(gap, args.engine, args.stage, not args.without_sender)
    except (KeyError, ValueError) as missing:
        raise SystemExit(
            f"throughput.svg in {args.into}; no gap.svg, its timelines were not measured: {missing}"
        ) from None
    (args.into / "gap.svg").write_text(drawn)
    print(f"throughput.svg and gap.svg in {args.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
