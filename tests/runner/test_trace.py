"""Traces: written and read back bit for bit, bad files named, contents scrubbed on request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="traces are written with safetensors")

import torch
from safetensors.torch import load_file

from omni_runner.demo.traces import shipped_traces
from omni_runner.errors import TraceError
from omni_runner.settings import VARIABLES
from omni_runner.trace import Trace, TraceStep, load_trace
from omni_runner.trace_record import StepRecorder, TraceWriter, save_trace


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right) if tensor.numel()]
    return not flat or torch.equal(*flat)


def assert_same_tree(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert same_bytes(left, right)
        assert left.stride() == right.stride()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same_tree(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same_tree(a, b)
    else:
        assert left == right


def odd_payload() -> dict[str, Any]:
    """A tree with every kind of node and layout that a trace must bring back."""
    block = torch.arange(3 * 2 * 8, dtype=torch.float32).reshape(2, 3, 8)
    return {
        "hidden_states": {"layers": {0: torch.randn(5, 8).bfloat16(), 24: torch.randn(8, 5).T}},
        "embed": {"bos": [block[:, 0]], "eos": (block[:, 2],), "expanded": torch.randn(1, 4).expand(6, 4)},
        "codes": {"audio": [torch.arange(6).reshape(2, 3), torch.zeros(0, 3, dtype=torch.int64)]},
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "scalar": torch.tensor(7, dtype=torch.int8),
        "flags": torch.tensor([True, False]),
        "plain": {"rate": 24000, "name": "voice", "ratio": 0.5, "none": None, "yes": True},
    }


def step_of(payload: Any, **changes: Any) -> TraceStep:
    step = TraceStep(
        request_ids=("a", "b"),
        num_scheduled_tokens=(3, 2),
        query_start_loc=(0, 3, 5, 5),
        needs_payload=("b",),
        include_hidden=True,
        hidden_states=torch.randn(5, 4),
        staged_hidden_states_cpu=None,
        multimodal_outputs=payload,
    )
    return replace(step, **changes)


def write(path: Path, *steps: TraceStep, scrub: bool = False) -> Path:
    save_trace(path, Trace({"stage": "thinker", "model": "/models/secret/voices"}, steps), scrub)
    return path


def test_round_trip(tmp_path: Path) -> None:
    step = step_of(odd_payload(), elements=(0,), time_s=2.0)
    loaded = load_trace(write(tmp_path / "t", step))
    assert loaded.stage == "thinker"
    assert loaded.about["scrubbed"] is False
    assert replace(loaded.steps[0], multimodal_outputs=None, hidden_states=None) == replace(
        step, multimodal_outputs=None, hidden_states=None, time_s=0.0
    )
    assert_same_tree(loaded.steps[0].multimodal_outputs, step.multimodal_outputs)
    assert_same_tree(loaded.steps[0].hidden_states, step.hidden_states)


def test_views_of_one_block_come_back_as_such(tmp_path: Path) -> None:
    embed = load_trace(write(tmp_path / "t", step_of(odd_payload()))).steps[0].multimodal_outputs["embed"]
    first, last = embed["bos"][0], embed["eos"][0]
    assert first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    assert (last.data_ptr() - first.data_ptr()) == 2 * 8 * 4


def test_equal_contents_are_stored_once(tmp_path: Path) -> None:
    payload = {"x": torch.ones(100), "y": torch.ones(100), "z": torch.zeros(100)}
    write(tmp_path / "t", step_of(payload, hidden_states=None), step_of(payload, hidden_states=None))
    assert len(load_file(tmp_path / "t.safetensors")) == 2


def test_a_far_view_does_not_allocate_its_block(tmp_path: Path) -> None:
    path = write(tmp_path / "t", step_of({"x": torch.randn(8, 5).T}))
    text = path.with_suffix(".json").read_text()
    document = json.loads(text)
    document["steps"][0]["multimodal_outputs"]["dict"][0][1]["stride"] = [1, 1 << 40]
    path.with_suffix(".json").write_text(json.dumps(document))
    assert load_trace(path).steps[0].multimodal_outputs["x"].is_contiguous()


@pytest.mark.parametrize("suffix", ["", ".json", ".safetensors"])
def test_either_file_names_the_trace(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "stage-1.2", step_of({}))
    assert len(load_trace(tmp_path / f"stage-1.2{suffix}").steps) == 1


def broken(path: Path, edit: Any) -> Path:
    """The trace at `path` with its JSON document changed by `edit`."""
    file = path.with_suffix(".json")
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))
    return path


def spans(*counts: int, **changes: Any) -> Any:
    """An edit that gives the requests of the first step these counts."""
    starts = [sum(counts[:place]) for place in range(len(counts) + 1)]
    return lambda d: d["steps"][0].update(num_scheduled_tokens=counts, query_start_loc=starts, **changes)


def nested(depth: int) -> dict[str, Any]:
    """A tree node of lists in lists, in a dict."""
    node: dict[str, Any] = {"value": 1}
    for _ in range(depth):
        node = {"list": [node]}
    return {"dict": [["x", node]]}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(format=2), "format 2"),
        (lambda d: d.pop("format"), "no field 'format'"),
        (lambda d: d.pop("steps"), "no list 'steps'"),
        (lambda d: d["steps"][0].pop("request_ids"), "step 0: field 'request_ids' is missing"),
        (lambda d: d["steps"][0].update(query_start_loc=[0, 3]), "2 request ids need"),
        (lambda d: d["steps"][0].update(needs_payload=["c"]), "'c', which is not in the batch"),
        (lambda d: d["steps"][0].update(elements=[0, 1]), "2 elements for 1 requests"),
        (lambda d: d["steps"].insert(0, 5), "step 0: the step: given 5, expected an object"),
        (lambda d: d["steps"][0].update(hidden_states={"tensor": "t9"}), "'t9' is not in"),
        (
            lambda d: d["steps"][0].update(hidden_states={"blob": 1}),
            "hidden_states: given {'blob': 1}, expected an object",
        ),
        (
            lambda d: d["steps"][0].update(num_scheduled_tokens=3),
            "step 0: num_scheduled_tokens: given 3, expected a list of whole numbers",
        ),
        (
            lambda d: d["steps"][0].update(num_scheduled_tokens=[3, "2"]),
            "step 0: num_scheduled_tokens[1]: given '2', expected a whole number",
        ),
        (lambda d: d["steps"][0]["hidden_states"].update(stride=[-4, 1]), "has stride"),
        (lambda d: d.update(steps=[]), "has no steps"),
        (lambda d: d["steps"][0].update(query_start_loc=[0, 5, 3]), "step 0: query_start_loc is not the running sum"),
        (lambda d: d["steps"][0].update(query_start_loc=[-1, 2, 4]), "step 0: query_start_loc is not the running sum"),
        (
            lambda d: d["steps"][0].update(query_start_loc=[0, 3, float("inf")]),
            "step 0: query_start_loc[2]: given inf, expected a whole number",
        ),
        (lambda d: d["steps"][0].update(num_scheduled_tokens=[6, -1]), "step 0: num_scheduled_tokens has the negative"),
        (spans(3, 3), "step 0: num_scheduled_tokens add up to 6, past the 5 rows"),
        (spans(3, 2**63), "past the 5 rows"),
        (spans(3, 2**63, include_hidden=False), "past the 2147483648 rows"),
        (lambda d: d["steps"][0].update(request_ids=["a", "a"]), "step 0: request_ids names 'a' twice"),
        (lambda d: d["steps"][0].update(request_ids="ab"), "step 0: request_ids: given 'ab', expected a list of texts"),
        (lambda d: d["steps"][0].update(needs_payload=["b", "b"]), "step 0: needs_payload names 'b' twice"),
        (lambda d: d["steps"][0].update(needs_payload=[1]), "step 0: needs_payload[0]: given 1, expected a text"),
        (lambda d: d["steps"][0].update(elements=[True]), "step 0: elements[0]: given True, expected a whole number"),
        (lambda d: d["steps"][0].update(elements=[-1]), "step 0: elements [-1] are not all places"),
        (lambda d: d["steps"][0].update(hidden_states={"value": 3}), "step 0: hidden_states is not a tensor with rows"),
        (lambda d: d["steps"][0].update(multimodal_outputs={"list": []}), "step 0: multimodal_outputs is a list"),
        (lambda d: d["steps"][0].update(multimodal_outputs=nested(40)), "step 0: a tree is nested more than 32 deep"),
        (
            lambda d: d["steps"][0].update(multimodal_outputs={"dict": [["x", {"value": 2**64}]]}),
            "no more than 64 bits",
        ),
        (
            lambda d: d["steps"][0].update(multimodal_outputs={"dict": [["x", {"value": [1]}]]}),
            "x: given [1], expected a plain",
        ),
        (lambda d: d["steps"][0].update(multimodal_outputs=3), "multimodal_outputs: given 3, expected an object with"),
        (
            lambda d: d["steps"][0].update(multimodal_outputs={"dict": 3}),
            "multimodal_outputs.dict: given 3, expected a",
        ),
        (lambda d: d["steps"][0].update(multimodal_outputs={"dict": [["x"]]}), "dict[0]: given ['x'], expected a pair"),
        (
            lambda d: d["steps"][0].update(multimodal_outputs={"dict": [[[], {}]]}),
            "dict[0]: given [[], {}], expected a",
        ),
        (lambda d: d["steps"][0]["hidden_states"].update(tensor=3), "hidden_states.tensor: given 3, expected a name"),
        (lambda d: d["steps"][0]["hidden_states"].update(stride="41"), "hidden_states.stride: given '41', expected a"),
        (lambda d: d["steps"][0]["hidden_states"].update(storage=[]), "hidden_states.storage: given [], expected a"),
        (lambda d: d["steps"][0]["hidden_states"].pop("storage"), "or none, storage is missing"),
        (lambda d: d["steps"][0].update(include_hidden="xx"), "include_hidden: given 'xx', expected true or false"),
        (lambda d: d["steps"][0].update(use_async_omni_output=1), "use_async_omni_output: given 1, expected true or"),
        (lambda d: d["steps"][0].update(time_s="now"), "time_s: given 'now', expected a number of seconds"),
        (lambda d: d["steps"][0].update(time_s=float("nan")), "time_s: given nan, expected a number of seconds"),
    ],
)
def test_bad_documents(tmp_path: Path, edit: Any, message: str) -> None:
    path = broken(write(tmp_path / "t", step_of({})), edit)
    with pytest.raises(TraceError, match=r"t\.json") as error:
        load_trace(path)
    assert message in str(error.value)


def test_a_step_of_the_required_fields_only(tmp_path: Path) -> None:
    """Those that docs/traces.md gives no default."""
    document = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in document.splitlines() if line.startswith("| `") and line.count("|") == 4]
    optional = {names.strip(" `") for names, _, default in rows if default.strip()} - set(VARIABLES)
    path = broken(
        write(tmp_path / "t", step_of({}, elements=(0,), time_s=2.0)),
        lambda d: [d["steps"][0].pop(name, None) for name in optional],
    )
    (step,) = load_trace(path).steps
    assert optional == {"time_s", "elements", "use_async_omni_output"}
    assert (step.time_s, step.elements, step.use_async_omni_output) == (0.0, None, True)
    for name in json.loads((tmp_path / "t.json").read_text())["steps"][0]:
        with pytest.raises(TraceError, match=f"field '{name}' is missing"):
            load_trace(broken(write(tmp_path / "u", step_of({})), lambda d, name=name: d["steps"][0].pop(name)))


def test_a_tensor_of_a_name_only(tmp_path: Path) -> None:
    def strip(document: Any) -> None:
        document["steps"][0]["hidden_states"] = {"tensor": document["steps"][0]["hidden_states"]["tensor"]}

    step = step_of({})
    loaded = load_trace(broken(write(tmp_path / "t", step), strip)).steps[0]
    assert_same_tree(loaded.hidden_states, step.hidden_states)


def test_nesting_past_the_stack(tmp_path: Path) -> None:
    path = write(tmp_path / "t", step_of({}))
    path.with_suffix(".json").write_text('{"format": 1, "steps": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(TraceError, match=r"t\.json is not JSON"):
        load_trace(path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.json"):
        load_trace(tmp_path / "nowhere")
    write(tmp_path / "t", step_of({}))
    (tmp_path / "t.safetensors").unlink()
    with pytest.raises(TraceError, match=r"t\.safetensors is missing"):
        load_trace(tmp_path / "t")


def test_a_folder_names_the_traces_in_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"is a folder; there is no trace in it"):
        load_trace(tmp_path)
    for name in ("b-1.2", "a"):
        write(tmp_path / name, step_of({}))
    (tmp_path / "notes.json").touch()
    with pytest.raises(TraceError) as error:
        load_trace(tmp_path)
    assert str(error.value) == f"{tmp_path} is a folder; name a trace in it: a, b-1.2"
    for place in range(12):
        write(tmp_path / f"a{place:02}", step_of({}))
    with pytest.raises(TraceError, match=r"a, a00, .*, a08 and 4 more$"):
        load_trace(tmp_path)


def test_a_folder_beside_a_trace_of_its_name(tmp_path: Path) -> None:
    write(tmp_path / "t", step_of({}))
    (tmp_path / "t").mkdir()
    assert len(load_trace(tmp_path / "t").steps) == 1


def test_another_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(TraceError, match=r"README\.md is no trace; expected its \.json or"):
        load_trace(tmp_path / "README.md")


@pytest.mark.parametrize("keep", [0, 5, 40, -7])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "t", step_of(odd_payload()))
    for suffix, message in ((".safetensors", "damaged or truncated"), (".json", "not JSON")):
        file = path.with_suffix(suffix)
        whole = file.read_bytes()
        file.write_bytes(whole[:keep])
        with pytest.raises(TraceError, match=message):
            load_trace(path)
        file.write_bytes(whole)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="cannot write trace"):
        write(tmp_path / "file" / "t", step_of({}))


def test_scrubbed_traces_keep_form_and_lose_content(tmp_path: Path) -> None:
    secret = {
        "hidden": torch.full((500,), 3.25),
        "ids": torch.arange(1000, 1500).repeat(2),
        "bits": torch.ones(64, dtype=torch.bool),
        "half": torch.full((9,), 7.0, dtype=torch.bfloat16),
        "strided": torch.full((6, 4), 7.0).T,
        "req_id": ["b", "a secret"],
        "count": 123456789,
    }
    given = step_of(secret, hidden_states=None)
    step = load_trace(write(tmp_path / "t", given, scrub=True)).steps[0]
    text = (tmp_path / "t.json").read_text()
    found = step.multimodal_outputs
    assert step.request_ids == ("r0", "r1")
    assert step.needs_payload == ("r1",)
    assert found["req_id"] == ["r1", "xxxxxxxx"]
    assert "secret" not in text
    assert load_trace(tmp_path / "t").about["model"] == "voices"
    assert "123456789" not in text
    for key in ("hidden", "ids", "half", "strided"):
        assert found[key].shape == secret[key].shape
        assert found[key].dtype == secret[key].dtype
        assert found[key].stride() == secret[key].stride()
        assert not torch.equal(found[key], secret[key])
    assert int(found["ids"].min()) >= 1000
    assert int(found["ids"].max()) < 1500
    assert not found["bits"].all()


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int64, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.float64],
)
def test_every_dtype_can_be_scrubbed(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write(
        tmp_path / "t",
        step_of({"x": torch.zeros(4, 2, dtype=dtype), "e": torch.zeros(0, dtype=dtype)}),
        scrub=True,
    )
    found = load_trace(path).steps[0].multimodal_outputs
    assert found["x"].dtype == dtype
    assert found["e"].shape == (0,)


@pytest.mark.parametrize("scrub", [False, True])
def test_what_a_trace_can_not_hold_is_left_out_and_the_rest_is_kept(tmp_path: Path, scrub: bool) -> None:
    largest = torch.full((2,), 2**63 - 1)
    given = {"wide": torch.ones(2, dtype=torch.complex128), "huge": 2**1024, "least": -(2**63), "largest": largest}
    found = load_trace(write(tmp_path / "t", step_of(given), scrub=scrub)).steps[0].multimodal_outputs
    assert (found["wide"], found["huge"]) == (None, None)
    assert found["least"] == -(2**63) or (scrub and -(2**63) <= found["least"] <= 0)
    assert torch.equal(found["largest"], largest)


def recorded_step(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "request_ids": ("a", "b"),
        "starts": [0, 3],
        "rows": [3, 1],
        "consumers": (1,),
        "elements": (1,),
        "is_sparse": False,
    }
    return SimpleNamespace(**(fields | changes))


def test_recorder_writes_after_the_last_step(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "new", 2, {"stage": "talker"})
    hidden = torch.randn(4, 8)
    assert recorder.record(recorded_step(), hidden, None, {"codes": torch.arange(4)}) is None
    hidden_then = hidden.clone()
    hidden.zero_()  # the engine reuses its buffers
    file = recorder.record(recorded_step(elements=(0,), is_sparse=True), hidden, None, {}, include_hidden=False)
    assert file is not None
    assert not recorder.active
    assert recorder.record(recorded_step(), hidden, None, {}) is None
    trace = load_trace(file)
    assert [step.include_hidden for step in trace.steps] == [True, False]
    assert [step.elements for step in trace.steps] == [None, (0,)]
    assert trace.steps[0].query_start_loc == (0, 3, 4)
    assert trace.steps[0].needs_payload == ("b",)
    assert same_bytes(trace.steps[0].hidden_states, hidden_then)  # type: ignore[arg-type]


def test_recorder_writes_what_it_has_when_closed(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path, 100, {"stage": "talker"})
    recorder.record(recorded_step(), None, None, {"codes": torch.arange(4)})
    file = recorder.close()
    assert file is not None
    assert len(load_trace(file).steps) == 1
    assert recorder.close() is None
    assert StepRecorder(tmp_path / "unused", 5, {}).close() is None
    assert not (tmp_path / "unused").exists()


def test_recorder_is_bounded(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path, 100, {}, max_bytes=1000)
    assert recorder.record(recorded_step(), torch.zeros(1000), None, {}) is not None


def test_what_a_trace_cannot_hold_is_named(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add(step_of({"sparse": torch.eye(3).to_sparse(), "object": object()}))
    writer.save(tmp_path / "t", {})
    assert "sparse" in (tmp_path / "t.json").read_text()
    assert load_trace(tmp_path / "t").steps[0].multimodal_outputs == {"sparse": None, "object": None}


@pytest.mark.parametrize("path", shipped_traces(), ids=lambda path: path.name)
def test_shipped_traces_round_trip(tmp_path: Path, path: Path) -> None:
    trace = load_trace(path)
    save_trace(tmp_path / "copy", trace)
    copy = load_trace(tmp_path / "copy")
    assert len(copy.steps) == len(trace.steps)
    for a, b in zip(copy.steps, trace.steps, strict=True):
        assert_same_tree(a.multimodal_outputs, b.multimodal_outputs)
        assert a.query_start_loc == b.query_start_loc
