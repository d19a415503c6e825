"""The command line: commands, exit status, and what is said when a part is missing."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

import pytest

from omni_runner import cli

TRACES = Path(cli.__file__).parent / "demo" / "data"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("omni-runner 0.")


def test_without_a_command_it_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["dance"])
    assert caught.value.code == 2
    assert "dance" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: omni-runner {name} " in capsys.readouterr().out


def test_arguments_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def tune(argv: list[str]) -> int:
        seen.extend(argv)
        return 7

    monkeypatch.setitem(sys.modules, "omni_runner.tuning", types.SimpleNamespace(main=tune))
    assert cli.main(["tune", "--trace", "file", "--version", "--", "-x"]) == 7
    assert seen == ["--trace", "file", "--version", "--", "-x"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("safetensors", "safetensors is not installed (pip install safetensors)"),
        ("vllm_omni", "vllm_omni is not installed (pip install vllm-omni)"),
        ("vllm_omni.worker.gone", "No module named 'vllm_omni.worker.gone'"),  # of a package that is there
        ("yaml", "No module named 'yaml'"),  # of a package with another name
    ],
)
def test_a_missing_part_is_one_line(
    name: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: object) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setitem(sys.modules, "omni_runner.demo.__main__", types.SimpleNamespace(main=missing))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == f"omni-runner demo: {line}\n"


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "omni_runner.tuning", types.SimpleNamespace(main=interrupted))
    assert cli.main(["tune"]) == 130


def test_record_prints_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "--dir", "/a b", "--steps", "4", "--scrub"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "export OMNI_RUNNER_TRACE='/a b'" in lines
    assert "export OMNI_RUNNER_TRACE_STEPS=4" in lines
    assert "export OMNI_RUNNER_TRACE_SCRUB=1" in lines


def test_record_runs_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[object] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: ran.extend(call))
    cli.main(["record", "--steps", "4", "--", "vllm-omni", "serve", "--steps", "9"])
    program, command, environ = ran
    assert program == "vllm-omni"
    assert command == ["vllm-omni", "serve", "--steps", "9"]
    assert isinstance(environ, dict)
    assert environ["OMNI_RUNNER"] == "1"
    assert environ["OMNI_RUNNER_TRACE_STEPS"] == "4"
    assert Path(environ["OMNI_RUNNER_TRACE"]) == Path.cwd() / "traces"


@pytest.mark.parametrize("command", [[], ["--", "true"]], ids=["exports", "command"])
def test_record_to_a_folder_that_only_another_host_may_write_to(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    folder = tmp_path / "new"
    assert cli.main(["record", "--dir", str(folder), *command]) == (2 if command else 0)
    captured = capsys.readouterr()
    assert (f"export OMNI_RUNNER_TRACE={folder}" in captured.out) == (not command)
    assert (f"cannot write to {folder}: Permission denied in {tmp_path}" in captured.err) == bool(command)


def test_record_of_a_command_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "--dir", str(tmp_path), "--", "no-such-program"]) == 2
    assert "cannot run no-such-program" in capsys.readouterr().err


def test_record_says_at_once_that_it_can_t_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ("x" * 300)
    assert cli.main(["record", "--dir", str(folder), "--", "true"]) == 2
    assert f"cannot write to {folder}: File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["--", "true"]], ids=["exports", "command"])
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_record_refuses_a_file_as_its_folder(
    tmp_path: Path, place: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["record", "--dir", str(tmp_path / place), *command]) == 2
    captured = capsys.readouterr()
    assert f"cannot write to {tmp_path / place}: {tmp_path / 'file'} is a file, not a folder" in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "--steps", "0"], "--steps: given '0', expected a whole number from 1 to 1000000000"),
        (["record", "--steps", "abc"], "--steps: given 'abc', expected a whole number from 1 to"),
        (["record", "--steps", "9" * 11], f"--steps: given '{'9' * 11}', expected a whole number from 1 to"),
        (["record", "--dir", ""], "--dir: given '', expected a folder"),
        (["replay", "t", "--passes", "-3"], "--passes: given '-3', expected a whole number from 0 to 10000"),
        (["replay", "t", "--passes", "x"], "--passes: given 'x', expected a whole number from 0 to 10000"),
        (["replay", "t", "--passes", "9" * 23], f"--passes: given '{'9' * 23}', expected a whole number from 0 to"),
        (["replay", "t", "--passes", "9" * 5000], f"given '{'9' * 40}...', expected a whole number from 0 to 10000"),
        (["replay", "t", "--device", "cpu:1"], "--device: given 'cpu:1', expected cpu, cuda or cuda:N"),
    ],
)
def test_an_option_that_means_nothing(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"omni-runner {arguments[0]}: error: --")
    assert message in line


class TestReplay:
    @pytest.fixture(autouse=True)
    def _needs_safetensors(self) -> None:
        pytest.importorskip("safetensors")

    def test_a_shipped_trace(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["replay", str(TRACES / "talker"), "--device", "cpu", "--passes", "1"]) == 0
        out = capsys.readouterr().out
        assert "torch on cpu" in out
        assert "identical" in out
        assert "talker: p50 of a step: pack call" in out

    def test_a_missing_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["replay", str(tmp_path / "none"), "--device", "cpu"]) == 2
        assert "omni-runner replay: " in capsys.readouterr().err

    @pytest.mark.parametrize("device", ["", "bogus", "cuda:-1", "meta", "cuda:99"])
    def test_a_device_that_cannot_be(self, device: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["replay", str(TRACES / "talker"), "--device", device]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"omni-runner replay: cannot pack on {device}: ")

    def test_no_timed_passes(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["replay", str(TRACES / "talker"), "--device", "cpu", "--passes", "0"]) == 0
        expected = "talker: p50 of a step: pack call -, bytes on the host -, payloads ready -"
        assert capsys.readouterr().out.splitlines()[-1] == expected

    def test_a_malformed_step_is_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        document = json.loads((TRACES / "talker.json").read_text())
        document["steps"][1]["num_scheduled_tokens"][0] = 2**63
        (tmp_path / "t.json").write_text(json.dumps(document))
        shutil.copy(TRACES / "talker.safetensors", tmp_path / "t.safetensors")
        assert cli.main(["replay", str(tmp_path / "t"), "--device", "cpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"omni-runner replay: {tmp_path / 't.json'}: step 1: ")

    @pytest.mark.parametrize("path", [".", "/"])
    def test_a_folder_is_no_trace(self, path: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["replay", path, "--device", "cpu"]) == 2
        assert capsys.readouterr().err.startswith(f"omni-runner replay: {path} is a folder; ")

    def test_the_traces_of_a_folder_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["replay", str(TRACES), "--device", "cpu"]) == 2
        expected = f"omni-runner replay: {TRACES} is a folder; name a trace in it: talker, thinker, tts, tts_v2\n"
        assert capsys.readouterr().err == expected
