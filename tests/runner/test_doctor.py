"""``omni-runner doctor``: what it says, and its exit status."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_runner import doctor
from omni_runner.deploy import StageVerdict
from omni_runner.doctor import Report, Switch, as_json, as_text, examine_switch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "deploy"
ON = Switch(True, "it is on")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our variables, none of vLLM's."""
    for name in list(os.environ):
        if name.startswith(("OMNI_RUNNER", "VLLM_PLUGINS")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip leaves it: vLLM finds the entry point."""
    point = SimpleNamespace(name="omni_runner", value="omni_runner:register")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed, leave it alone."""
    monkeypatch.setattr(doctor, "_examine_engine", lambda report, deploy, pipeline: None)


def stage(packed: bool, *why: str, mistake: bool = False) -> StageVerdict:
    return StageVerdict(0, "thinker", "ar", packed, why, mistake)


class TestSwitch:
    def test_off(self) -> None:
        assert not examine_switch(False, None).on

    @pytest.mark.usefixtures("installed")
    def test_on(self) -> None:
        assert examine_switch(True, None).on
        assert examine_switch(True, "other,omni_runner").on

    @pytest.mark.usefixtures("installed")
    def test_not_allowed_by_vllm(self) -> None:
        switch = examine_switch(True, "other")
        assert not switch.on
        assert "VLLM_PLUGINS does not list omni_runner" in switch.detail

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
        switch = examine_switch(True, None)
        assert not switch.on
        assert "no entry point" in switch.detail


class TestVerdict:
    def test_without_a_deployment_the_switch_decides(self) -> None:
        assert Report(switch=ON).active
        assert not Report(switch=Switch(False, "it is off")).active
        assert Report(switch=Switch(False, "it is off")).verdict == "not active: it is off"

    def test_with_a_deployment_its_stages_decide(self) -> None:
        assert Report(deploy="a.yaml", stages=[stage(True)]).verdict == "active in stage 0 (thinker)"
        assert not Report(switch=ON, deploy="a.yaml", stages=[stage(False)]).active

    def test_problems_come_first(self) -> None:
        report = Report(switch=ON, deploy="a.yaml", stages=[stage(True)], problems=["a name is missing"])
        assert not report.active
        assert report.verdict == "not active: a name is missing"


def test_text() -> None:
    report = Report(
        versions={"python": "3.11", "vllm-omni": "0.30.0"},
        machine={"gpu": "none"},
        environment={"OMNI_RUNNER": "1"},
        switch=ON,
        names=[("sample_tokens", None), ("load_model", "load_model is missing")],
        deploy="a.yaml (omni)",
        stages=[stage(False, "async_chunk is off", "speculative decoding is on")],
        warnings=["careful"],
    )
    text = as_text(report)
    assert "  python     3.11\n  vllm-omni  0.30.0\n" in text
    assert "  1 of 2 as expected\n  load_model is missing\n" in text
    assert "  0      thinker  ar    stock        async_chunk is off; speculative decoding is on" in text
    assert text.endswith("warning: careful\n\nnot active in any stage")
    assert "sample_tokens: ok" not in text
    assert "sample_tokens: ok" in as_text(report, verbose=True)


def test_json() -> None:
    report = Report(names=[("load_model", "gone")], deploy="a.yaml", stages=[stage(True, "by OMNI_RUNNER")])
    content = json.loads(as_json(report))
    assert content["active"] is True
    assert content["names"] == [{"name": "load_model", "problem": "gone"}]
    assert content["stages"][0]["why"] == ["by OMNI_RUNNER"]


@pytest.mark.usefixtures("no_engine", "installed")
def test_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 1
    monkeypatch.setenv("OMNI_RUNNER", "1")
    assert doctor.main(["--json"]) == 0
    assert '"active": true' in capsys.readouterr().out


@pytest.mark.usefixtures("no_engine", "installed")
def test_unreadable_variables_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNI_RUNNER", "1")
    monkeypatch.setenv("OMNI_RUNNER_TRACE_STEPS", "all")
    monkeypatch.setenv("OMNI_RUNNER_STRCT", "1")
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "not active: OMNI_RUNNER_TRACE_STEPS='all'" in out
    assert "warning: OMNI_RUNNER_STRCT has no effect" in out


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--deploy", os.curdir], ". is a folder"),
        (["--deploy", "missing.yaml"], "there is no file missing.yaml"),
        (["--pipeline", "qwen3_omni_moe"], "--pipeline goes with --deploy"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_without_an_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    assert doctor.main([]) == 1
    assert "not active: vllm-omni cannot be imported" in capsys.readouterr().out


class TestWithTheEngine:
    @pytest.fixture(autouse=True)
    def _needs_the_engine(self) -> None:
        if importlib.util.find_spec("vllm_omni") is None:
            pytest.skip("vllm-omni is not installed")

    def test_nothing_but_json_on_standard_output(self) -> None:
        """In a process of its own: the engine logs when it is imported."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VLLM_LOGGING_LEVEL": "INFO"}
        command = [sys.executable, "-m", "omni_runner.cli", "doctor", "--json", "--deploy"]
        done = subprocess.run(
            [*command, str(EXAMPLES / "qwen3_omni_moe.yaml")], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert [entry for entry in report["names"] if entry["problem"]] == []
        stages = [(entry["name"], entry["kind"], entry["packed"]) for entry in report["stages"]]
        assert stages == [("thinker", "ar", True), ("talker", "ar", True), ("code2wav", "generation", False)]

    def test_the_bundled_deployment_and_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "examine_switch", lambda enabled, allowed: ON)
        bundled = doctor._package_folder("vllm_omni") / "deploy"
        report = doctor.examine(bundled / "qwen3_omni_moe.yaml")
        assert [stage.packed for stage in report.stages] == [True, True, False]
        tts = doctor.examine(bundled / "qwen3_tts.yaml").stages[0]
        # Each version has a reason of its own: no opt-in in 0.24, V2 by default in 0.30.
        assert tts.packed or "opt in" in tts.why[0] or "V2" in tts.why[0] or "prefix caching" in tts.why[0]

    def test_a_file_that_the_engine_cannot_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        broken = tmp_path / "broken.yaml"
        broken.write_text("pipeline: a\nstages: ]\nedges: []\n")
        assert doctor.main(["--deploy", str(broken)]) == 2
        assert f"the engine cannot read {broken} (line 2: " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("stages: [{stage_id: x}]", "stages[0].stage_id is not a number: 'x'"),
            ("platforms: 7", "platforms is not a mapping: 7"),
            ("pipeline: [a]", "pipeline is not a text: ['a']"),
            ("- a", "not the form of a deploy YAML"),
            ("some words", "has no stages"),
            ("", "has no stages"),
        ],
    )
    def test_a_file_of_another_form(
        self, tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        odd = tmp_path / "odd.yaml"
        odd.write_text(text)
        assert doctor.main(["--deploy", str(odd)]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("omni-runner doctor: ")
        assert words in line

    def test_a_pipeline_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert doctor.main(["--deploy", str(EXAMPLES / "qwen3_tts.yaml"), "--pipeline", "none"]) == 2
        assert "no pipeline none; it has" in capsys.readouterr().err

    def test_a_missing_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

        monkeypatch.delattr(GPUARModelRunner, "_build_omni_model_runner_output_from_snapshot")
        monkeypatch.setattr(doctor, "packed_worker_cls", lambda: SimpleNamespace(_omni_runner_refusal="it is gone"))
        report = doctor.examine()
        assert "it is gone" in report.problems
        assert [problem for _, problem in report.names if problem]
