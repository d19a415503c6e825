"""The compatibility module: what it finds, what it reports, on engines of our making and on the installed one."""

from __future__ import annotations

import sys
import types

import pytest

from omni_runner import compat
from omni_runner.errors import UpstreamMismatch, UpstreamMissing

RUNNER = """
import functools

def inference_mode(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

class GPUARModelRunner(Helpers):
    @inference_mode
    def sample_tokens(self, grammar_output):
        self._maybe_run_eager_omni_postprocess_before_async_output()
        self._snapshot_omni_output_tensors_for_async_output()
        def output_builder():
            return self._build_omni_model_runner_output_from_snapshot()
        return OmniAsyncGPUModelRunnerOutput, AsyncGPUModelRunnerOutput

    def load_model(self): ...
    def shutdown(self): ...
    @staticmethod
    def _model_omni_flag(model, name, default=False): ...
    def _should_accumulate_full_payload_output(self): ...
"""

OUTPUT = """
class AsyncGPUModelRunnerOutput: ...

class OmniAsyncGPUModelRunnerOutput(AsyncGPUModelRunnerOutput):
    def __init__(self, *, model_runner_output_builder, cuda_device=None, **kwargs): ...

    def get_output(self):
        getattr(self, "_background_thread", None).join()
        raise getattr(self, "_background_exception", None)

    def _build_output_in_background(self):
        self._background_exception = self._cuda_device

    def _build_model_runner_output_once(self):
        self._model_runner_output = self._model_runner_output_builder()
"""

HELPERS = """
def record_function_or_nullcontext(name): ...
def _snapshot_tensor_payload_to_cpu_async(value): ...
def flatten_payload(payload): return "flat"
def _ensure_tensor_values(payload): return "tensors"
def resolve_sparse_mm_routing(*, engine_output_type, req_ids_output_copy, downstream_req_ids, multimodal_outputs):
    return downstream_req_ids, {}, False
def stage_sends_async_output(model_config): return model_config == "sends"

class Helpers:
    def _maybe_run_eager_omni_postprocess_before_async_output(
        self, *, hidden_states, multimodal_outputs, num_scheduled_tokens_np, scheduler_output, req_ids_output_copy,
        query_start_loc_cpu): ...

    def _snapshot_omni_output_tensors_for_async_output(
        self, *, use_async_omni_output, hidden_states, staged_hidden_states_cpu, multimodal_outputs):
        record_function_or_nullcontext("")

    def _build_omni_model_runner_output_from_snapshot(
        self, *, hidden_states, staged_hidden_states_cpu, multimodal_outputs, req_ids_output_copy,
        postprocess_already_applied=False):
        flatten_payload({}); partition_payload_list([])

    def _build_multimodal_outputs(self, payloads): _ensure_tensor_values({})
    def _build_omni_async_snapshot_payload(self, *, hidden_states, multimodal_outputs): ...
    def _resolve_pooler_payload_req_ids(self, req_ids_output_copy): ...
    def _model_omni_pooler_payload_include_hidden(self): ...
    def _should_use_async_omni_output(self): ...
    def _client_multimodal_output_keys(self): return ("sr",)
"""

PARTITION = """
def partition_flat_payload(payload): return {}, {}
def partition_payload_list(payloads): return partition_flat_payload({})
"""

WORKER = """
class GPUARWorker:
    def init_device(self): ...
    def compile_or_warm_up_model(self): ...
"""


class FakeEngine:
    """The modules of an engine, from source; `replace` changes the source before they are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources = {
            "partition": PARTITION,
            "output": OUTPUT,
            "helpers": HELPERS,
            "runner": RUNNER,
            "worker": WORKER,
        }
        self.monkeypatch = monkeypatch

    def replace(self, module: str, old: str, new: str) -> FakeEngine:
        assert old in self.sources[module]
        self.sources[module] = self.sources[module].replace(old, new)
        return self

    def classes(self, *, one_module: bool = False) -> tuple[type, type]:
        """Make the modules, each with the names of those before it, or one that holds everything."""
        names: dict[str, object] = {}
        for name, source in self.sources.items():
            module = types.ModuleType("fake_engine" if one_module else f"fake_engine_{name}")
            self.monkeypatch.setitem(sys.modules, module.__name__, module)
            vars(module).update({k: v for k, v in names.items() if not k.startswith("__")})
            exec(source, vars(module))
            names.update(vars(module))
        return names["GPUARModelRunner"], names["GPUARWorker"]  # type: ignore[return-value]

    def resolve(self) -> compat.Upstream:
        return compat.resolve_classes(*self.classes(), version="0.99.1")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return FakeEngine(monkeypatch)


def test_the_table_is_consistent():
    assert len({(name.name, name.holder) for name in compat.NAMES}) == len(compat.NAMES)
    for name in compat.NAMES:
        assert set(name.seen_in) <= set(compat.KNOWN_VERSIONS)
        assert name.seen_in == tuple(sorted(name.seen_in))
        assert name.required == (name.seen_in == compat.KNOWN_VERSIONS), f"{name}: what is not everywhere is optional"


@pytest.mark.parametrize("one_module", [True, False], ids=["one module", "helpers moved"])
def test_helpers_are_found_wherever_they_live(engine, one_module):
    runner_cls, worker_cls = engine.classes(one_module=one_module)
    upstream = compat.resolve_classes(runner_cls, worker_cls, "0.99.1")
    assert upstream.flatten_payload({}) == "flat"
    assert upstream.ensure_tensor_values({}) == "tensors"
    assert upstream.partition_flat_payload({}) == ({}, {})
    assert upstream.async_output_cls.__name__ == "OmniAsyncGPUModelRunnerOutput"
    assert upstream.runner_module.__name__ == ("fake_engine" if one_module else "fake_engine_runner")
    assert vars(upstream.runner_module)["OmniAsyncGPUModelRunnerOutput"] is upstream.async_output_cls
    assert upstream.sparse_protocol_keys == {"meta.req_id", "meta.sparse_audio"}
    assert not compat.is_known_version(upstream.version)


def test_what_differs_between_versions_is_adapted(engine):
    newer = engine.resolve()
    sender = types.SimpleNamespace(
        _async_chunk=True, model_config="sends", _client_multimodal_output_keys=lambda: ("sr",)
    )
    bridge = types.SimpleNamespace(_async_chunk=True, model_config="bridges")
    whole = types.SimpleNamespace(_async_chunk=False, model_config="sends")
    assert [newer.partitions_channels(runner) for runner in (sender, bridge, whole)] == [True, False, False]
    assert newer.client_output_keys(sender) == ("sr",)
    assert newer.shares_channel
    assert newer.resolve_sparse_routing(sender, "audio", ["a"], ["a"], {}) == (["a"], {}, False)

    older = (
        engine.replace("helpers", 'def stage_sends_async_output(model_config): return model_config == "sends"', "")
        .replace("helpers", "_client_multimodal_output_keys", "_unrelated")
        .replace("helpers", "def resolve_sparse_mm_routing", "def unrelated")
        .replace(
            "runner",
            "    def load_model",
            "    @staticmethod\n"
            "    def _resolve_sparse_mm_routing(**arguments):\n"
            "        return [], {'b': 0}, True\n"
            "    def load_model",
        )
        .resolve()
    )
    assert [older.partitions_channels(runner) for runner in (sender, bridge, whole)] == [True, True, False]
    assert older.client_output_keys(sender) == ()
    assert not older.shares_channel
    assert older.resolve_sparse_routing(sender, "audio", ["a"], ["a"], {}) == ([], {"b": 0}, True)


@pytest.mark.parametrize(
    ("module", "old", "new", "problem"),
    [
        ("helpers", "def flatten_payload", "def flatten", "flatten_payload, used by .* is missing"),
        ("helpers", "_build_omni_async_snapshot_payload", "_gone", "_build_omni_async_snapshot_payload .* is missing"),
        ("helpers", "def _ensure_tensor_values", "def gone", "_ensure_tensor_values, used by .* is missing"),
        ("helpers", "def resolve_sparse_mm_routing", "def gone", "resolve_sparse_mm_routing, used by .* 0.28 and 0.30"),
        ("helpers", "query_start_loc_cpu", "query_start", "no longer takes query_start_loc_cpu"),
        ("helpers", "postprocess_already_applied", "applied", "no longer takes postprocess_already_applied"),
        ("partition", "partition_flat_payload", "split_payload", "has no partition_flat_payload"),
        ("output", '"_background_thread"', '"_worker"', "get_output .* no longer uses _background_thread"),
        ("output", "_build_output_in_background", "_build", "_build_output_in_background .* is missing"),
        (
            "output",
            "class OmniAsync",
            "class NewAsync",
            "OmniAsyncGPUModelRunnerOutput, used by sample_tokens is missing",
        ),
        ("output", "cuda_device=None", "device=None", "__init__ .* no longer takes cuda_device"),
        (
            "runner",
            "_maybe_run_eager_omni_postprocess_before_async_output",
            "_other",
            "sample_tokens .* no longer uses",
        ),
        ("runner", "def sample_tokens", "def sample", "sample_tokens of the runner class is missing"),
        ("worker", "init_device", "start", "init_device of the worker class is missing"),
    ],
)
def test_what_is_missing_or_changed_is_named(engine, module, old, new, problem):
    engine.replace(module, old, new)
    with pytest.raises(UpstreamMismatch, match=problem) as caught:
        engine.resolve()
    message = str(caught.value)
    assert "0.99.1" in message
    assert all(version in message for version in compat.KNOWN_VERSIONS)
    assert caught.value.problems


@pytest.mark.parametrize("value", [property(lambda runner: None), 3, len], ids=["property", "number", "builtin"])
@pytest.mark.parametrize("name", ["sample_tokens", "_build_omni_model_runner_output_from_snapshot"])
def test_what_is_no_function_any_more_is_named(engine, name, value):
    runner_cls, worker_cls = engine.classes()
    setattr(runner_cls, name, value)
    with pytest.raises(UpstreamMismatch, match=f"{name} of the runner class is no longer a function"):
        compat.resolve_classes(runner_cls, worker_cls, "0.99.1")


@pytest.mark.parametrize(("version", "known"), [("0.30.0", True), ("0.30", True), ("0.300.1", False), ("0.3", False)])
def test_known_versions(version, known):
    assert compat.is_known_version(version) is known


def test_every_problem_is_reported_at_once(engine):
    engine.replace("helpers", "def flatten_payload", "def a").replace("worker", "init_device", "b")
    with pytest.raises(UpstreamMismatch) as caught:
        engine.resolve()
    assert len(caught.value.problems) == 2


def test_a_runner_without_the_attributes_we_read_is_refused():
    runner = types.SimpleNamespace(**dict.fromkeys(compat.ATTRIBUTES))
    compat.check_runner(runner)
    del runner.omni_prefix_cache
    with pytest.raises(UpstreamMismatch, match="omni_prefix_cache"):
        compat.check_runner(runner)


def test_without_an_engine_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    with pytest.raises(UpstreamMissing, match="Install") as caught:
        compat.resolve.__wrapped__()  # not from the cache
    assert isinstance(caught.value, ImportError)


def test_the_installed_engine_is_known():
    pytest.importorskip("vllm_omni", reason="needs vllm-omni")
    upstream = compat.resolve()
    assert compat.resolve() is upstream
    assert compat.is_known_version(upstream.version)
    assert all(finding.problem is None for finding in compat.inspect_names(upstream.runner_cls, upstream.worker_cls))
