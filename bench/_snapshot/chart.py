"""The chart of a results file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from bench._snapshot.results import Document

# Fixed, so that a provider has the same colour in every chart. Ours stands out; ceilings are pale.
_LOOKS = {
    "ours": ("#d1495b", "ours"),
    "stock_v1": ("#30638e", "stock vllm-omni, V1"),
    "stock_v2": ("#6a9fc9", "stock vllm-omni, MRv2"),
    "torch_cat": ("#8d96a3", "torch.cat + one copy"),
    "foreach_copy": ("#b9b4a5", "torch._foreach_copy_ + one copy"),
    "memcpy_batch": ("#edae49", "cudaMemcpyBatchAsync + one copy"),
    "one_copy": ("#e3e3e3", "one copy, nothing else"),
}
_PANELS = (
    ("host_us", "Host time on the critical path: call and hand-over to the builder, GPU idle", tuple(_LOOKS)),
    ("ready_us", "From the call until every request's payload exists", ("ours", "stock_v1", "stock_v2")),
)
_DOTS = {"host_us": ("host_steady_us", "dot: the same in quick succession")}  # a second figure on each bar
_ORDER = (
    "thinker_decode_1",
    "thinker_decode_8",
    "thinker_decode_64",
    "thinker_decode_256",
    "thinker_padded",
    "thinker_mixed",
    "thinker_changing",
    "thinker_subset",
    "thinker_prefill_8k",
    "thinker_prefill_32k",
    "talker_decode_64",
    "tts_decode_64",
    "few_leaves",
    "many_leaves",
)  # traces follow
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4}
_WIDTH_IN, _PANEL_IN = 12.0, 3.4
_BARS_WIDTH = 0.84  # total width of the bars of a scenario


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(document: Document, file: Path) -> None:
    """Draw the chart; the file's suffix decides the format.

    Bars are medians on a logarithmic axis; a thin line extends to p99.9 or the edge of the chart. A dot is the median
    of calls in quick succession, if measured.
    """
    import matplotlib  # noqa: PLC0415  only charts need it

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "omni-runner"  # the same data always gives the same file
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(len(_PANELS), 1, figsize=(_WIDTH_IN, _PANEL_IN * len(_PANELS)), layout="constrained")
    for axis, (measure, title, providers) in zip(axes, _PANELS, strict=True):
        _panel(axis, document, measure, providers)
        dots = _dots(axis, document, measure, providers)
        axis.set_title(f"{title}; {dots}" if dots else title, loc="left", fontsize=10)
    axes[0].legend(ncols=4, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, 1.28))
    versions = document["versions"]
    commits = sorted({row.get("commit", document["commit"]) or "unknown" for row in document["rows"]})
    figure.supxlabel(
        f"{document['gpu']}, torch {versions['torch']}, commit {', '.join(commits)}, {document['date'][:10]}",
        fontsize=8,
        color="#555555",
    )
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def _scenarios(document: Document) -> list[str]:
    measured = document["scenarios"]
    return [name for name in _ORDER if name in measured] + [name for name in measured if name not in _ORDER]


def _placed(
    document: Document, measure: str, providers: tuple[str, ...], provider: str
) -> tuple[list[float], list[dict[str, float]]]:
    """The x positions of a provider's bars, and the figures of each bar."""
    rows = {(row["scenario"], row["provider"]): row.get(measure) for row in document["rows"]}
    offset = (providers.index(provider) - (len(providers) - 1) / 2) * _BARS_WIDTH / len(providers)
    found = [
        (number + offset, figures)
        for number, name in enumerate(_scenarios(document))
        if (figures := rows.get((name, provider)))
    ]
    return [at for at, _ in found], [figures for _, figures in found]


def _dots(axis: Any, document: Document, measure: str, providers: tuple[str, ...]) -> str:
    """Mark the second figure of each bar; returns what the mark means, or "" if nothing was drawn."""
    other, meaning = _DOTS.get(measure, ("", ""))
    drawn = False
    for provider in providers:
        at, figures = _placed(document, other, providers, provider)
        if at:
            axis.scatter(
                at, [each["p50"] for each in figures], 5, "#ffffff", linewidths=0.5, edgecolors="#222222", zorder=3
            )
            drawn = True
    return meaning if drawn else ""


def _panel(axis: Any, document: Document, measure: str, providers: tuple[str, ...]) -> None:
    scenarios = _scenarios(document)
    largest = 0.0
    for provider in providers:
        at, found = _placed(document, measure, providers, provider)
        if not found:
            continue
        typical = [figures["p50"] for figures in found]
        largest = max(largest, *typical)
        colour, label = _LOOKS[provider]
        axis.bar(at, typical, _BARS_WIDTH / len(providers) * 0.92, color=colour, label=label)
        axis.vlines(at, typical, [figures["p999"] for figures in found], color="#444444", linewidth=0.6)
        if provider in ("ours", "stock_v1"):
            for x, value in zip(at, typical, strict=True):
                axis.text(x, value * 1.08, f"{value:.0f}", ha="center", va="bottom", fontsize=6, bbox=_LABEL_BOX)
    axis.set_yscale("log")
    if largest:
        axis.set_ylim(top=4 * largest)
    axis.set_ylabel("microseconds")
    axis.set_xticks(range(len(scenarios)), [name.replace("_", "\n", 1) for name in scenarios], fontsize=8)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.margins(x=0.01)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
