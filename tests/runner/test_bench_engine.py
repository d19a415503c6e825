"""bench/engine without an engine: the order of things, what fits into the time, tables and figures."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bench.engine.run", reason="the benchmarks are in a checkout only")

from bench.engine import plan as plan_module
from bench.engine import run as run_module
from bench.engine.cells import Pass
from bench.engine.digests import Trail
from bench.engine.phases import PROFILE_S, Phase, all_phases, turn_s
from bench.engine.plan import Plan
from bench.engine.plot import draw_throughput
from bench.engine.probes import Probes, Span
from bench.engine.report import join, merge, summary
from bench.engine.run import Child, Session
from bench.engine.stages import EXTRAS, VARIANTS

MS = 1_000_000


class TestPhases:
    def test_the_more_important_comes_first(self) -> None:
        names = [str(phase) for phase in all_phases([1, 8, 64], 1, EXTRAS)]
        assert names == ["verify", "cells 64", "cells 8", "cells 1", "consumer", "backlog", "traces", "profile"]

    def test_further_rounds_come_behind_the_extras_and_before_the_profiler(self) -> None:
        phases = all_phases([8, 64], 2, ("profile", "consumer"))
        assert [str(phase) for phase in phases[3:]] == ["consumer", "cells 64", "cells 8", "consumer", "profile"]
        assert [phase.is_repeated for phase in phases] == [False] * 4 + [True] * 3 + [False]

    @pytest.mark.parametrize("phase", [Phase("verify"), Phase("cells", 64)], ids=str)
    def test_a_phase_survives_the_pipe(self, phase: Phase) -> None:
        assert Phase.parse(str(phase)) == phase

    def test_shares_of_the_time(self) -> None:
        assert turn_s(Phase("verify"), 100, profiles=3, share=0.2) == 100
        assert turn_s(Phase("cells", 8), 100, profiles=3, share=0.2) == 20
        assert turn_s(Phase("cells", 8, is_repeated=True), 100, profiles=2, share=0.5) == (100 - 2 * PROFILE_S) * 0.5
        assert turn_s(Phase("cells", 8, is_repeated=True), 10, profiles=2, share=0.5) == 0


class FakeBench:
    """Takes the time it is told, and yields passes of 100 steps of 10 ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.costs_s: defaultdict[str, float] = defaultdict(float)
        self.done: list[str] = []

    def hashed(self, variant: str, requests: int, **_: Any) -> Trail:
        self._take("hashed", f"{variant} {requests}")
        trail = Trail()
        trail.tokens[0].append([1])
        trail.payloads[0].append(("different",) if variant == "stock_batched_clones" else ("same",))
        return trail

    def measured(self, variant: str, requests: int, *, sender: bool, consumer: bool = False) -> Pass:
        self._take("measured", f"{variant} {requests} {'+' * (sender + consumer)}")
        spans = [Span(number * 10 * MS, (number * 10 + 4) * MS, 0, 0) for number in range(100)]
        return Pass(
            {"execute_model": spans, "builder": spans}, seconds=1.0, tokens=requests * 100, chunks=7, gc_us=(5.0, 40.0)
        )

    def recover(self) -> None:
        self.done.append("recovered")

    def _take(self, what: str, which: str) -> None:
        self.now += self.costs_s[what]
        self.done.append(which)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    monkeypatch.setattr(plan_module, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


@pytest.fixture
def plan(bench: FakeBench, tmp_path: Path) -> Plan:
    args = argparse.Namespace(
        stage="thinker", requests=[1, 8, 64], variants=list(VARIANTS), out=tmp_path / "thinker.json", scratch=tmp_path
    )
    facts = {"engine": "0.30", "gpu": "G", "versions": {}}
    return Plan(bench, args, facts, say=lambda *_: None)  # type: ignore[arg-type]


def written(plan: Plan) -> dict[str, Any]:
    return json.loads(plan.args.out.read_text())  # type: ignore[no-any-return]


def test_probes_time_garbage_collections_while_on() -> None:
    probes = Probes(SimpleNamespace(), SimpleNamespace())
    try:
        gc.collect()
        assert not probes.gc_us
        probes.start()
        gc.collect()
        probes.stop()
        assert probes.gc_us
        assert all(pause > 0 for pause in probes.gc_us)
    finally:
        gc.callbacks.remove(probes._watch_gc)


class TestPlan:
    def test_hashed_passes_are_made_whatever_they_take(self, plan: Plan, bench: FakeBench) -> None:
        bench.costs_s["hashed"] = 1.0
        plan.turn(Phase("verify"), 11.5)
        assert [entry.split()[1] for entry in bench.done] == [count for count in ("64", "8", "1") for _ in VARIANTS]
        assert not written(plan)["skipped"]

    def test_without_any_time_they_are_skipped(self, plan: Plan, bench: FakeBench) -> None:
        plan.turn(Phase("verify"), 0.0)
        assert not bench.done
        assert len(written(plan)["skipped"]) == 3  # of requests; without stock's there is nothing to compare with

    def test_rows_and_consumed_have_one_form(self, plan: Plan) -> None:
        for phase in (Phase("verify"), Phase("cells", 64), Phase("consumer")):
            plan.turn(phase, 100.0)
        result = written(plan)
        assert len(result["rows"]) == 2 * len(VARIANTS)
        assert [row["variant"] for row in result["consumed"]] == list(VARIANTS)
        assert {tuple(row) for row in [*result["rows"], *result["consumed"]]} == {tuple(result["rows"][0])}
        for row in result["consumed"]:
            assert (row["engine"], row["stage"], row["requests"], row["sender"]) == ("0.30", "thinker", 64, True)
            assert row["step_us"] == {"p50": 10_000.0, "p99": 10_000.0}
            assert row["builder_us"] == {"p50": 4_000.0, "p99": 4_000.0}
            assert row["chunks_per_s"] == 7
            assert row["steps"] == 99 - 15 - 3
            assert row["gc_us"] == {"longest": 40.0, "total": 45.0}
            assert row["payloads_equal"] is (row["variant"] != "stock_batched_clones")

    def test_rounds_take_turns_in_both_directions(self, plan: Plan, bench: FakeBench) -> None:
        for _ in range(2):
            plan.turn(Phase("cells", 8), 100.0)
        there, back = [f"{variant} 8 " for variant in VARIANTS], [f"{variant} 8 " for variant in reversed(VARIANTS)]
        assert [done.rstrip("+") for done in bench.done] == [*there, *back, *back, *there]

    def test_what_was_measured_once_is_not_called_skipped(self, plan: Plan, bench: FakeBench) -> None:
        plan.turn(Phase("cells", 64), 100.0)
        plan.turn(Phase("cells", 64), 0.0)
        assert not written(plan)["skipped"]

    def test_rounds_are_pooled(self, plan: Plan) -> None:
        for phase in (Phase("cells", 8), Phase("consumer"), Phase("cells", 8), Phase("consumer")):
            plan.turn(phase, 100.0)
        result = written(plan)
        assert {row["passes"] for row in [*result["rows"], *result["consumed"]]} == {2}
        assert {row["steps"] for row in [*result["rows"], *result["consumed"]]} == {2 * 81}

    def test_nothing_is_begun_that_would_not_end_in_time(self, plan: Plan, bench: FakeBench) -> None:
        bench.costs_s["measured"] = 3.0
        plan.turn(Phase("cells", 64), 14.5)
        # Four take 12 s; what the last one took does not fit any more.
        assert bench.done == [f"{variant} 64 " for variant in VARIANTS]
        assert written(plan)["skipped"] == [f"{variant} 64 sender True" for variant in reversed(VARIANTS)]

    def test_what_fails_is_noted(self, plan: Plan, bench: FakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> Pass:
            raise RuntimeError("no chunks")

        monkeypatch.setattr(bench, "measured", broken)
        plan.turn(Phase("consumer"), 100.0)
        assert [error["at"] for error in written(plan)["errors"]] == [f"{name} 64 with a consumer" for name in VARIANTS]
        assert bench.done == ["recovered"] * len(VARIANTS)


FAKE_STAGE = textwrap.dedent(
    """
    import json, sys, time
    from pathlib import Path
    stage, out, start_s, dies_at = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    time.sleep(start_s)
    result = {"engine": "0.30", "stage": stage, "gpu": "G", "versions": {}, "gap": {}}
    result |= {name: [] for name in ("rows", "consumed", "verify", "backlog", "skipped", "errors")}
    out.write_text(json.dumps(result))
    out.with_suffix(".ready").touch()
    for turns, line in enumerate(iter(sys.stdin.readline, ""), start=1):
        seconds, _, phase = line.strip().partition(" ")
        if phase == dies_at:
            sys.exit(3)
        with (out.parent / "order").open("a") as order:
            print(stage, phase, file=order)
        out.with_suffix(".turns").write_text(str(turns))
    """
)


class TestSession:
    @pytest.fixture
    def session(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
        monkeypatch.setattr(run_module, "GRACE_S", 3.0)
        args = argparse.Namespace(
            out=tmp_path,
            commit="abc",
            seconds=0.0,
            requests=[1, 64],
            rounds=1,
            extras=("consumer", "backlog", "profile"),
        )
        session = Session(args, tmp_path)
        session.deadline = time.monotonic() + 30.0
        return session

    @staticmethod
    def add(session: Session, stage: str, *, start_s: float = 0.0, dies_at: str = "never") -> None:
        result = session.scratch / f"{stage}.json"
        command = [sys.executable, "-c", FAKE_STAGE, stage, str(result), str(start_s), dies_at]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        session.children.append(Child(stage, process, result, session._phases(stage)))

    @staticmethod
    def order(session: Session) -> list[str]:
        return (session.scratch / "order").read_text().splitlines()

    def test_all_stages_are_verified_first(self, session: Session) -> None:
        for stage in ("tts", "thinker"):
            self.add(session, stage)
        session.wait_until_ready()
        session.measure()
        assert self.order(session) == [
            *("thinker verify", "tts verify", "thinker cells 64", "tts cells 64", "thinker cells 1", "tts cells 1"),
            *("thinker consumer", "tts consumer", "thinker backlog", "thinker profile", "tts profile"),
        ]
        found = session.write()
        assert found["errors"] == found["skipped"] == []

    def test_a_late_stage_catches_up(self, session: Session) -> None:
        self.add(session, "thinker")
        self.add(session, "tts", start_s=1.5)
        while not session.children[0].ready:
            time.sleep(0.05)
        session.measure()
        order = self.order(session)
        assert order.index("tts verify") < order.index("tts cells 64") < order.index("tts profile")
        assert len(order) == 11

    def test_a_stage_that_dies_is_an_error_and_the_others_go_on(self, session: Session) -> None:
        self.add(session, "thinker", dies_at="cells 1")
        self.add(session, "tts")
        session.wait_until_ready()
        session.measure()
        found = session.write()
        (error,) = found["errors"]
        assert (error["engine"], error["stage"], error["at"]) == ("0.30", "thinker", "cells 1")
        assert "status 3" in error["traceback"]
        assert [entry["what"] for entry in found["skipped"]] == ["cells 1", "consumer", "backlog", "profile"]
        assert self.order(session)[-1] == "tts profile"

    def test_what_there_is_no_time_for_is_listed(self, session: Session) -> None:
        self.add(session, "talker")
        session.wait_until_ready()
        session.deadline = time.monotonic() + 2.0
        session.measure()
        found = session.write()
        assert found["errors"] == []
        assert [entry["what"] for entry in found["skipped"]] == ["verify", "cells 64", "cells 1", "profile"]


def figures(p50: float, p99: float) -> dict[str, float]:
    return {"p50": p50, "p99": p99}


def made_up_row(variant: str, sender: bool, tokens_per_s: float, step: dict[str, float]) -> dict[str, Any]:
    timed = ("sample_tokens", "snapshot", "output_object", "builder", "get_output")
    return {
        "engine": "0.30", "stage": "thinker", "variant": variant, "sender": sender, "requests": 64,
        "tokens_per_s": tokens_per_s, "chunks_per_s": 100.0 if sender else None, "step_us": step,
        **{f"{key}_us": figures(800 if variant == "ours" else 4000, 9000) for key in timed},
        "pinned_bytes": 1 << 20, "steps": 148, "passes": 1, "path": {}, "payloads_equal": True,
    }  # fmt: skip


def with_handover(row: dict[str, Any], p50: float) -> dict[str, Any]:
    return {**row, "snapshot_us": figures(p50, 9000), "output_object_us": figures(p50, 9000)}


@pytest.fixture
def result() -> dict[str, Any]:
    part = {
        "engine": "0.30", "stage": "thinker", "gpu": "G", "versions": {}, "skipped": [], "errors": [],
        "verify": [{"variant": variant, "requests": 64, "difference": None, "chunk_difference": None}
                   for variant in VARIANTS],
        "gap": {},
        "rows": [made_up_row(variant, False, 5000, figures(12_000, 14_000)) for variant in VARIANTS]
        + [with_handover(made_up_row(variant, True, 2500, figures(20_000, 60_000)), p50)
           for variant, p50 in zip(VARIANTS, (2000, 2000, 2000, 800), strict=True)],
        "consumed": [
            with_handover(made_up_row("stock", True, 3000, figures(16_000, 30_000)), 8000),
            made_up_row("stock_batched_clones", True, 4000, figures(14_000, 20_000)),
            made_up_row("ours", True, 4800, figures(12_300, 14_000)),
        ],
        "backlog": [
            {
                "variant": "ours", "requests": 64, "held_payloads": 9, "step_us": figures(10, 11), "steps": 222,
                "step_us_without": figures(10, 10), "pinned_bytes": 2 << 20, "pinned_bytes_without": 1 << 20,
                "payloads_equal": True, "difference": None,
            },
        ],
    }  # fmt: skip
    return merge([part])["engine"]


class TestReport:
    def test_targets_for_unread_and_taken_chunks(self, result: dict[str, Any]) -> None:
        lines = summary(result).splitlines()

        def line(what: str) -> list[str]:
            (found,) = [line for line in lines if line.startswith(f"| thinker: {what} |")]
            return [cell.strip() for cell in found.strip("|").split("|")][1:]

        assert line("step with the sender / without, ours") == ["<= 1.05", "1.67", "NO", "1.02", "yes"]
        assert line("step p99 / p50 with the sender, ours") == ["<= 1.2", "3.00", "NO", "1.14", "yes"]
        assert line("tokens/s with the sender, ours / stock") == [">= 1.4", "1.00", "NO", "1.60", "yes"]
        assert line("tokens/s with the sender, ours / batched clones") == [">= 1", "1.00", "yes", "1.20", "yes"]
        assert line("sample_tokens, stock / ours") == [">= 2", "5.00", "yes", "-", ""]
        assert line("step p99 with an unbounded backlog / without, ours") == ["<= 1.2", "1.10", "yes", "-", ""]
        assert line("snapshot + output object, stock / ours") == [">= 5", "5.00", "yes", "-", ""]
        what = "snapshot + output object with the sender, stock / ours"
        assert line(what) == [">= 5", "2.50", "NO", "10.00", "yes"]

    def test_stock_is_not_compared_with_itself(self, result: dict[str, Any]) -> None:
        assert "Hashed passes compared with stock's: 3, 0 with a difference" in summary(result).splitlines()

    def test_the_table_has_both(self, result: dict[str, Any]) -> None:
        ours = [line for line in summary(result).splitlines() if line.startswith("| 64 | ours")]
        assert [line.split("|")[2].strip() for line in ours] == ["ours", "ours +", "ours ++"]
        assert all(line.endswith("| 148 |") for line in ours)

    def test_what_was_not_done_is_counted(self, result: dict[str, Any]) -> None:
        skipped = [{"engine": "0.30", "stage": "thinker", "what": f"cells {count}"} for count in range(77)]
        lines = summary({**result, "skipped": skipped}).splitlines()
        assert [line for line in lines if "not done" in line] == ["77 passes not done (listed in engine.json)"]
        assert "1 pass not done" in summary({**result, "skipped": skipped[:1]})
        assert "not done" not in summary(result)

    def test_results_without_a_consumer_are_read(self, result: dict[str, Any]) -> None:
        lines = summary({**result, "consumed": [], "backlog": []}).splitlines()
        assert "| thinker: tokens/s with the sender, ours / stock | >= 1.4 | 1.00 | NO | - |  |" in lines


class TestThroughput:
    def test_both_kinds_of_bars(self, result: dict[str, Any]) -> None:
        drawn = draw_throughput(result, "0.30", ["thinker", "tts"])
        assert "a process takes the chunks" in drawn
        assert "4,800 (1.60x)" in drawn
        assert "2,500 (1.00x)" in drawn
        assert "step 12.3, p99 14 ms" in drawn

    def test_without_a_consumer_there_is_one_kind(self, result: dict[str, Any]) -> None:
        drawn = draw_throughput({**result, "consumed": []}, "0.30", ["thinker"])
        assert "takes the chunks" not in drawn
        assert "2,500 (1.00x)" in drawn


def test_joined_results_take_a_number_of_requests_from_one_call(tmp_path: Path) -> None:
    def call(name: str, requests: Sequence[int]) -> Path:
        rows = [
            {"engine": "0.30", "stage": "thinker", "requests": count, "variant": variant}
            for count in requests
            for variant in ("stock", "ours")
        ]
        about = {"engine": "0.30", "stage": "thinker"}
        lists: dict[str, Any] = {"consumed": [], "verify": [], "errors": []}
        lists["backlog"] = [{**about, "requests": 64}] if name == "a" else []
        lists["skipped"] = [{**about, "what": f"something of {name}"}]
        folder = tmp_path / name
        folder.mkdir()
        head = {"bench": "engine", "gpu": "G", "commit": name, "versions": {}}
        if name == "b":
            head["options"] = {"0.30": {"rounds": 3}}
        (folder / "engine.json").write_text(json.dumps({**head, "rows": rows, **lists}))
        (folder / "gap.json").write_text(json.dumps({"bench": "engine_gap", "gpu": "G", "stages": {}}))
        return folder

    joined = join([call("a", [8, 64]), call("b", [64])])["engine"]
    assert [(row["requests"], row["commit"]) for row in joined["rows"]] == [(8, "a")] * 2 + [(64, "b")] * 2
    assert [entry["commit"] for entry in joined["backlog"]] == ["a"]
    assert [entry["what"] for entry in joined["skipped"]] == ["something of b"]
    assert joined["options"] == {"0.30": {"rounds": 3}}
