"""The entry point: inert unless asked, never raises, and switches AR stages and nothing else."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from typing import Any

import pytest

import omni_runner
from omni_runner import platforms, plugin


def run_python(code: str, **environ: str) -> list[str]:
    """The lines that `code` prints in a new interpreter; of our variables it sees only `environ`."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("OMNI_RUNNER")}
    env = {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


REGISTER = "import sys; before = set(sys.modules); import omni_runner; omni_runner.register()"
NEW_MODULES = f"{REGISTER}; print(*sorted(set(sys.modules) - before), sep='\\n')"


@pytest.mark.parametrize("environ", [{}, {"OMNI_RUNNER": ""}, {"OMNI_RUNNER": "0"}])
def test_inert_without_the_variable(environ: dict[str, str]) -> None:
    """Loaded in every process of every installation: its import set is itself."""
    assert [name for name in run_python(NEW_MODULES, **environ) if name != "__future__"] == ["omni_runner"]


@pytest.mark.parametrize("text", ["off", "perhaps"])
def test_off_and_unreadable_values_import_no_engine(text: str) -> None:
    loaded = {name.split(".")[0] for name in run_python(NEW_MODULES, OMNI_RUNNER=text)}
    assert not loaded & {"torch", "numpy", "triton", "vllm", "vllm_omni"}


class StockPlatform:
    """A platform of vllm-omni, as far as we look at it."""

    name = "cuda"

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("is_cuda", "is_rocm", "is_npu", "is_xpu", "is_musa", "is_out_of_tree"):
            return lambda: attribute == f"is_{self.name}"
        raise AttributeError(attribute)

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "engine.StockWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "engine.GenerationWorker"


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> StockPlatform:
    """A CUDA platform of its own class, in an environment that asks for the drop-in."""
    current = type("Platform", (StockPlatform,), {})()
    monkeypatch.setenv("OMNI_RUNNER", "1")
    monkeypatch.setitem(sys.modules, "vllm_omni", types.ModuleType("vllm_omni"))
    monkeypatch.setattr(plugin, "current_platform", lambda: current)
    monkeypatch.setattr(platforms, "_replaced", {})
    return current


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_switches_ar_stages_and_nothing_else(platform: StockPlatform, name: str) -> None:
    platform.name = name
    omni_runner.register()
    assert platform.get_omni_ar_worker_cls() == "omni_runner.PackedGPUARWorker"
    assert platform.get_omni_generation_worker_cls() == "engine.GenerationWorker"
    assert StockPlatform.get_omni_ar_worker_cls() == "engine.StockWorker"


def test_the_stock_worker_is_still_known(platform: StockPlatform) -> None:
    assert platforms.stock_ar_worker(platform) == "engine.StockWorker"
    omni_runner.register()
    omni_runner.register()  # vLLM may load it more than once
    assert platforms.stock_ar_worker(platform) == "engine.StockWorker"


@pytest.mark.parametrize("name", ["npu", "xpu", "musa", "out_of_tree", "unspecified"])
def test_other_platforms_are_left_alone(platform: StockPlatform, name: str) -> None:
    platform.name = name
    omni_runner.register()
    assert platform.get_omni_ar_worker_cls() == "engine.StockWorker"


def test_an_unreadable_switch_leaves_it_off(
    platform: StockPlatform, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMNI_RUNNER", "perhaps")
    with caplog.at_level(logging.WARNING):
        omni_runner.register()
    assert platform.get_omni_ar_worker_cls() == "engine.StockWorker"
    (message,) = caplog.messages
    assert "omni_runner stays off: OMNI_RUNNER='perhaps'" in message


@pytest.mark.parametrize(
    "environ",
    [{"OMNI_RUNNER_TRACE_STEPS": "many"}, {"OMNI_RUNNER": "perhaps", "OMNI_RUNNER_STRICT": "1"}],
    ids=["another variable", "strict"],
)
def test_other_unreadable_settings_are_left_to_the_worker_which_may_have_to_be_strict(
    platform: StockPlatform, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    omni_runner.register()
    assert platform.get_omni_ar_worker_cls() == "omni_runner.PackedGPUARWorker"


@pytest.mark.parametrize(
    ("spec", "words"), [(None, "vllm-omni is not installed"), (object(), "this process does not use vllm-omni")]
)
def test_without_vllm_omni_it_says_so(
    spec: object,
    words: str,
    platform: StockPlatform,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delitem(sys.modules, "vllm_omni")
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: spec)
    with caplog.at_level(logging.INFO):
        omni_runner.register()
    assert words in caplog.text
    assert platform.get_omni_ar_worker_cls() == "engine.StockWorker"


def test_never_raises(
    platform: StockPlatform, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def half_imported() -> None:
        raise ImportError("cannot import name 'current_omni_platform' from partially initialized module")

    monkeypatch.setattr(plugin, "current_platform", half_imported)
    with caplog.at_level(logging.WARNING):
        omni_runner.register()
    (message,) = caplog.messages
    assert "omni_runner stays off" in message
    assert "partially initialized" in caplog.text


def test_the_unspecified_platform_has_the_usual_stock_worker() -> None:
    class Unspecified:
        def get_omni_ar_worker_cls(self) -> str:
            raise NotImplementedError

    assert platforms.stock_ar_worker(Unspecified()) == platforms.STOCK_AR_WORKER


REAL_ENGINE = """
import sys
import vllm_omni.platforms
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

class Cuda(OmniPlatform):  # the real one needs CUDA libraries
    _omni_enum = OmniPlatformEnum.CUDA
    device_name = "cuda"

    @classmethod
    def get_omni_ar_worker_cls(cls):
        return "vllm_omni.worker.gpu_ar_worker.GPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls):
        return "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker"

vllm_omni.platforms._current_omni_platform = Cuda()
import omni_runner
omni_runner.register()
print("vllm_omni.worker.gpu_ar_worker" in sys.modules)
from vllm_omni.engine.arg_utils import OmniEngineArgs
for worker_type in ("ar", "generation"):
    print(OmniEngineArgs(model="unused", worker_type=worker_type).worker_cls)
chosen = "vllm_omni.worker.gpu_ar_worker.GPUARWorker"
print(OmniEngineArgs(model="unused", worker_type="ar", worker_cls=chosen).worker_cls)
"""


def test_the_real_engine_takes_it() -> None:
    pytest.importorskip("vllm_omni")
    *_, worker_imported, ar, generation, chosen = run_python(REAL_ENGINE, OMNI_RUNNER="1", VLLM_LOGGING_LEVEL="ERROR")
    # register() itself leaves worker and runner to the processes that need them.
    assert worker_imported == "False"
    assert ar == "omni_runner.PackedGPUARWorker"
    assert generation == "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker"
    assert chosen == "vllm_omni.worker.gpu_ar_worker.GPUARWorker"
