"""What ``omni-runner doctor`` has found, as text or as JSON, and its verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omni_runner import compat
from omni_runner.deploy import StageVerdict


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether the drop-in is on for a whole deployment, and what decides that."""

    on: bool
    detail: str


@dataclass(slots=True)
class Report:
    """Everything that ``doctor`` has found.

    Attributes
    ----------
    versions, machine, environment : dict
        What to print under these headings.
    switch : Switch
        State of the variable, and of the entry point that reads it.
    names : list of (str, str or None)
        Each engine name that is built on, and what is wrong with it.
    deploy : str
        The deployment given by ``--deploy``; empty if none was.
    stages : list of StageVerdict
        Stages of that deployment.
    problems : list of str
        What prevents the drop-in wherever it is requested.
    warnings : list of str
        Findings that do not prevent it.
    """

    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    switch: Switch = field(default_factory=lambda: Switch(False, "unreadable"))
    names: list[tuple[str, str | None]] = field(default_factory=list)
    deploy: str = ""
    stages: list[StageVerdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Whether the drop-in would be active; for a given deployment, in at least one of its stages."""
        if self.problems:
            return False
        return any(stage.packed for stage in self.stages) if self.deploy else self.switch.on

    @property
    def verdict(self) -> str:
        """One line that says whether the drop-in would be active, and if not, why."""
        if self.problems:
            return f"not active: {'; '.join(self.problems)}"
        if self.deploy:
            sure = [f"{stage.stage_id} ({stage.name})" for stage in self.stages if stage.packed and stage.kind == "ar"]
            unsure = [str(stage.stage_id) for stage in self.stages if stage.packed and stage.kind != "ar"]
            parts = [f"active in stage {', '.join(sure)}"] if sure else []
            if unsure:
                condition = "it is an AR stage" if len(unsure) == 1 else "these are AR stages"
                parts.append(f"would be active in stage {', '.join(unsure)} if {condition}, which cannot be told here")
            return "; ".join(parts) or "not active in any stage"
        if self.switch.on:
            return "active: AR stages that qualify take the packed path (--deploy YAML tells which do)"
        return f"not active: {self.switch.detail}; worker_cls in a deploy YAML may switch it on (--deploy YAML tells)"


def as_json(report: Report) -> str:
    """Return the report as one JSON object."""
    content = dataclasses.asdict(report)
    content["names"] = [{"name": name, "problem": problem} for name, problem in report.names]
    return json.dumps({**content, "active": report.active, "verdict": report.verdict}, indent=2)


def as_text(report: Report, *, verbose: bool = False) -> str:
    """Return the report as text; `verbose` lists every engine name that is built on."""
    lines = ["versions", *_pairs(report.versions), "machine", *_pairs(report.machine), "switch"]
    lines += [*_pairs(report.environment), f"  {report.switch.detail}"]
    if report.names:
        wrong = [problem for _, problem in report.names if problem]
        fine = [f"{name}: ok" for name, problem in report.names if not problem]
        lines.append(f"names of the engine (known to work: vllm-omni {', '.join(compat.KNOWN_VERSIONS)})")
        lines.append(f"  {len(fine)} of {len(report.names)} as expected")
        lines += [f"  {text}" for text in (wrong + fine if verbose else wrong)]
    if report.deploy:
        lines.append(f"deployment {report.deploy}")
        rows = [("stage", "name", "kind", "output path", "why")]
        for stage in report.stages:
            path = "packed" if stage.packed else "stock"
            rows.append((str(stage.stage_id), stage.name, stage.kind, path, "; ".join(stage.why)))
        lines += _columns(rows)
    lines += [f"warning: {text}" for text in report.warnings]
    return "\n".join([*lines, "", report.verdict])


def _pairs(entries: Mapping[str, str]) -> list[str]:
    return _columns([*entries.items()])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as aligned lines."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
