"""``omni-runner doctor``: what it says, and its exit status."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_runner import doctor
from omni_runner.deploy import StageVerdict
from omni_runner.doctor import examine_switch
from omni_runner.doctor_report import Report, Switch, as_json, as_text
from spanpack.config import SHIPPED_FILES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "deploy"
ON = Switch(True, "it is on")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our variables, none of vLLM's."""
    for name in list(os.environ):
        if name.startswith(("OMNI_RUNNER", "VLLM_PLUGINS", "SPANPACK_TUNED")):
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
        assert Report(switch=Switch(False, "it is off")).verdict.startswith("not active: it is off; worker_cls in a ")

    def test_with_a_deployment_its_stages_decide(self) -> None:
        assert Report(deploy="a.yaml", stages=[stage(True)]).verdict == "active in stage 0 (thinker)"
        assert not Report(switch=ON, deploy="a.yaml", stages=[stage(False)]).active

    def test_what_may_be_no_ar_stage_is_active_on_a_condition(self) -> None:
        unknown = [StageVerdict(number, "?", "?", True, ("by its worker_cls",)) for number in (0, 1)]
        report = Report(deploy="a.yaml", stages=unknown[:1])
        assert report.active
        assert report.verdict == "would be active in stage 0 if it is an AR stage, which cannot be told here"
        assert "in stage 0, 1 if these are AR stages" in Report(deploy="a.yaml", stages=unknown).verdict
        both = Report(deploy="a.yaml", stages=[stage(True), unknown[1]]).verdict
        assert both.startswith("active in stage 0 (thinker); would be active in stage 1 if it is an AR stage")

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


def test_close_names_of_pipelines() -> None:
    names = [f"other_{number}" for number in range(9)] + ["qwen3_tts", "qwen3_omni_moe"]
    text = doctor._no_pipeline("qwen3_tst", names)
    assert text.startswith("no pipeline qwen3_tst in the source of vllm-omni; closest are qwen3_tts, qwen3_omni_moe, ")
    assert text.endswith("(6 others)")
    assert "(6 others)" in doctor._no_pipeline("foo", names)


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


@pytest.mark.usefixtures("no_engine", "installed")
class TestFilesThatVariablesName:
    def warnings(self, capsys: pytest.CaptureFixture[str]) -> list[str]:
        doctor.main(["--json"])
        return json.loads(capsys.readouterr().out)["warnings"]

    @pytest.mark.parametrize(
        ("content", "problem"), [(None, "No such file"), ("{", "Expecting property name"), ("{}", "format is None")]
    )
    def test_a_tuned_file_that_the_packer_leaves_aside(
        self,
        tmp_path: Path,
        content: str | None,
        problem: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        file = tmp_path / "tuned.json"
        if content is not None:
            file.write_text(content)
        monkeypatch.setenv("SPANPACK_TUNED", str(file))
        (warning,) = self.warnings(capsys)
        assert warning.startswith(f"SPANPACK_TUNED='{file}' has no effect ({problem}")
        doctor.main([])
        assert f"  SPANPACK_TUNED  {file}\n" in capsys.readouterr().out

    def test_a_tuned_file_of_nobody_s_home(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPANPACK_TUNED", "~nobody-of-that-name/tuned.json")
        assert "has no effect (" in self.warnings(capsys)[0]

    def test_a_tuned_file(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("SPANPACK_TUNED", str(next(SHIPPED_FILES.glob("*.json"))))
        assert self.warnings(capsys) == []

    @pytest.mark.parametrize(("place", "is_fine"), [("new", True), (".", True), ("file", False), ("file/below", False)])
    def test_the_folder_for_traces(
        self,
        tmp_path: Path,
        place: str,
        is_fine: bool,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("OMNI_RUNNER_TRACE", str(tmp_path / place))
        warnings = self.warnings(capsys)
        assert (warnings == []) is is_fine
        assert is_fine or f"{tmp_path / 'file'} is a file, not a folder" in warnings[0]

    def test_a_folder_for_traces_that_can_not_be_written_to(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(dir: Path) -> None:
            raise PermissionError(13, "Permission denied", dir)

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        monkeypatch.setenv("OMNI_RUNNER_TRACE", str(tmp_path / "new"))
        (warning,) = self.warnings(capsys)
        why = f"no trace can be written here, Permission denied in {tmp_path}"
        assert warning == f"OMNI_RUNNER_TRACE='{tmp_path / 'new'}': {why}"

    @pytest.mark.parametrize("listed", [True, False])
    def test_the_plugin_that_tells_vllm_of_the_models(
        self, listed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        points = [
            SimpleNamespace(name="omni_runner", value=doctor.ENTRY_POINT),
            SimpleNamespace(name="models", value="vllm_omni.engine.arg_utils:register"),
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
        monkeypatch.setenv("VLLM_PLUGINS", "omni_runner,models" if listed else "omni_runner")
        found = ["VLLM_PLUGINS does not list models, by which vLLM learns" in line for line in self.warnings(capsys)]
        assert found == ([] if listed else [True])


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
        detail = "OMNI_RUNNER is not set to 1; worker_cls lines of the deployment switch it on"
        assert report["switch"]["detail"] == detail
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
        assert f"the engine cannot read {broken} (line 2 of broken.yaml: " in capsys.readouterr().err

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
        assert "no pipeline none in the source of vllm-omni; closest are " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("{stage_id: 7, worker_cls: omni_runner.PackedGPUARWorker}", "stage 7: pipeline qwen3_tts has only"),
            ("{stage_id: 0, worker_cls: omni_runner.PackedGPUArWorker}", "stage 0: omni_runner has no worker"),
            ("{stage_id: 0, worker_cls: 5}", "stage 0: its worker_cls is 5, expected a dotted name"),
        ],
    )
    def test_stages_that_are_mistakes(
        self, tmp_path: Path, text: str, problem: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(f"pipeline: qwen3_tts\nmodel_runner: v1\nstages: [{text}]")
        assert doctor.main(["--deploy", str(file)]) == 1
        assert problem in capsys.readouterr().out.splitlines()[-1]

    def test_a_pipeline_that_is_not_known(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(
            "pipeline: qwen3_ts\nenable_prefix_caching: false\n"
            "stages: [{stage_id: 0, worker_cls: omni_runner.PackedGPUARWorker}, {stage_id: 1}]"
        )
        assert doctor.main(["--deploy", str(file)]) == 0
        out = capsys.readouterr().out
        assert "warning: no pipeline qwen3_ts in the source of vllm-omni; closest are qwen3_tts, " in out
        assert out.splitlines()[-1] == "would be active in stage 0 if it is an AR stage, which cannot be told here"

    def test_a_base_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("base_config: b.yaml")
        assert doctor.main(["--deploy", str(file)]) == 2
        assert f"{file}: its base_config {tmp_path / 'b.yaml'} is not there" in capsys.readouterr().err

    def test_a_missing_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

        monkeypatch.delattr(GPUARModelRunner, "_build_omni_model_runner_output_from_snapshot")
        monkeypatch.setattr(doctor, "packed_worker_cls", lambda: SimpleNamespace(_omni_runner_refusal="it is gone"))
        report = doctor.examine()
        assert "it is gone" in report.problems
        assert [problem for _, problem in report.names if problem]
