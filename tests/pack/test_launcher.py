"""What a launch passes: every argument where the kernel takes it, by Triton's launcher and by the driver's call."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spanpack import driver_launch
from spanpack.config import LaunchConfig
from spanpack.driver_launch import DriverKernel, load_kernel
from spanpack.launcher import Launcher, _Loaded
from spanpack.segments import PassedRun
from spanpack.stats import Fallbacks

kernels = pytest.importorskip("spanpack._kernels")

PADDING = (1 << 40) + 1
SLAB, STREAM, FUNCTION = 4096, 77, 1 << 45
CONFIG = LaunchConfig(64, 1)
ADDRESSES = tuple((1 << 47) + place for place in range(8))  # as wide as addresses get
HIDDEN = 2


def as_c_function(work: Callable[..., int], *types: Any) -> Any:
    """What a library would have of this function: it is called by C's rules, and checks no argument."""
    callback = ctypes.PYFUNCTYPE(ctypes.c_int, *types)(work)
    function = ctypes.PYFUNCTYPE(ctypes.c_int)(ctypes.cast(callback, ctypes.c_void_p).value or 0)
    function.keeps = callback  # type: ignore[attr-defined]
    return function


class Recorder(Launcher):
    """Has no kernels; keeps what they would have been launched with, by the names of their parameters."""

    def __init__(self, way: str, code: int = 0) -> None:
        self.fallbacks = Fallbacks()
        super().__init__(torch.device("cpu"), self.fallbacks)
        self.way, self.code = way, code
        self.launched: list[tuple[str, dict[str, Any]]] = []

    def _compile(self, variant: str, config: LaunchConfig) -> _Loaded:
        kernel = kernels.gather_runs if variant == "passing runs" else kernels.gather_tiles
        constants: tuple[Any, ...] = (config.tile_bytes,)
        if variant != "passing runs":
            constants = variant == "passing addresses", *constants
        names = kernel.arg_names[: -len(constants)]

        def run(*given: Any) -> None:
            *grid, stream, function, metadata, _, _, _ = given[:9]
            assert (stream, function, metadata) == (STREAM, FUNCTION, "metadata")
            assert given[9 + len(names) :] == constants
            self.launched.append(("triton", {"grid": grid, **dict(zip(names, given[9:], strict=False))}))

        def launch(config_at: int, function: int, no_pointers: None, extra_at: int) -> int:
            assert (function, no_pointers) == (FUNCTION, None)  # None: a null pointer
            *grid, x, y, z, shared, stream, attributes, count = struct.unpack(
                "@7IPPI", ctypes.string_at(config_at, struct.calcsize("@7IPPI"))
            )
            assert (x, y, z, shared, stream, attributes, count) == (32, 1, 1, 0, STREAM, 0, 0)
            buffer, block, buffer_size, size_at, end = (ctypes.c_uint64 * 5).from_address(extra_at)
            assert (buffer, buffer_size, end) == (1, 2, 0)
            size = ctypes.c_size_t.from_address(size_at).value
            assert size == 8 * (len(names) + HIDDEN)
            *given, first, second = struct.unpack(f"={size // 8}Q", ctypes.string_at(block, size))
            assert first == second == 0
            self.launched.append(("driver", {"grid": grid, **dict(zip(names, given, strict=True))}))
            return self.code

        driver = None
        if self.way == "driver":
            called = as_c_function(launch, *[ctypes.c_void_p] * 4)
            driver = DriverKernel(called, FUNCTION, 32, len(names) + HIDDEN)
        return _Loaded("compiled", run, (FUNCTION, "metadata", None, None, None), driver)


@pytest.mark.parametrize("way", ["triton", "driver"])
def test_every_argument_of_a_launch_goes_where_the_kernel_takes_it(way: str) -> None:
    launcher = Recorder(way)
    runs = [PassedRun(0, 0, 0, 100, 1), PassedRun(2, 8, 112, 64, 3)]
    launch = launcher.bind_runs(CONFIG, runs)
    for first in (1000, 1 << 47):  # what a launch leaves behind is not in the next
        launch(SLAB, STREAM, (first, 2000, 3000))
        used, given = launcher.launched.pop()
        assert (used, given["grid"], given["slab"]) == (way, [5, 1, 1], SLAB)
        assert [given[f"a{i}"] for i in range(8)] == [first, 3008, *[PADDING] * 6]
        assert [given[f"n{i}"] for i in range(2)] == [100, 64]
        assert [given[f"d{i}"] for i in range(2)] == [0, 112]
        assert [given[f"e{i}"] for i in range(8)] == [2, 5, 5, 5, 5, 5, 5, 5]
    launcher.bind(CONFIG, 9, 512, None)(SLAB, STREAM, ADDRESSES)
    used, given = launcher.launched.pop()
    assert (used, given["grid"], given["tiles"], given["slab"]) == (way, [9, 1, 1], 512, SLAB)
    assert tuple(given[f"a{i}"] for i in range(8)) == ADDRESSES
    launcher.bind(CONFIG, 9, 512, 256)(SLAB, STREAM, (*ADDRESSES, 9000))
    used, given = launcher.launched.pop()
    assert (used, given["tiles"], given["addresses"], given["slab"]) == (way, 512, 256, SLAB)


def test_launches_that_were_bound_side_by_side_do_not_share_what_they_pass() -> None:
    launcher = Recorder("driver")
    small, large = (launcher.bind(CONFIG, tiles, 512 * tiles, None) for tiles in (3, 5))
    for launch, tiles in ((small, 3), (large, 5), (small, 3)):
        launch(SLAB, STREAM, ADDRESSES)
        _, given = launcher.launched.pop()
        assert (given["grid"][0], given["tiles"]) == (tiles, 512 * tiles)


@pytest.mark.parametrize(("code", "counted"), [(201, {}), (1, {"driver launch": 1})])
def test_what_the_driver_refuses_triton_launches(code: int, counted: dict[str, int]) -> None:
    """It makes a context for a thread that has none (201), and raises what else is wrong."""
    launcher = Recorder("driver", code)
    launcher.bind(CONFIG, 9, 512, None)(SLAB, STREAM, ADDRESSES)
    (first, of_driver), (second, of_triton) = launcher.launched
    assert (first, second) == ("driver", "triton")
    assert of_driver == of_triton
    assert launcher.fallbacks.counts() == counted


def test_a_bound_launch_keeps_the_kernel_loaded() -> None:
    """Triton 3.8 unloads it when its own object is collected."""

    class Compiled:
        pass

    compiled, launcher = Compiled(), Recorder("driver")
    made = launcher._compile("passing runs", CONFIG)
    launcher._loaded["passing runs", CONFIG] = made._replace(compiled=compiled)
    alive = weakref.ref(compiled)
    del compiled
    launch = launcher.bind_runs(CONFIG, [PassedRun(0, 0, 0, 100, 1)])
    launcher._loaded.clear()
    gc.collect()
    assert alive() is not None
    del launch
    gc.collect()
    assert alive() is None


def compiled(**metadata: Any) -> Any:
    about = {
        "target": SimpleNamespace(backend="cuda", warp_size=32),
        "num_warps": 4,
        "num_ctas": 1,
        "shared": 0,
        "global_scratch_size": 0,
        "launch_cooperative_grid": False,
    }
    return SimpleNamespace(function=FUNCTION, metadata=SimpleNamespace(**{**about, **metadata}))


def driver_that_says(sizes: list[int], last: int = 1) -> Callable[[], tuple[Any, Any]]:
    def ask(function: int, place: int, offset_at: int, size_at: int) -> int:
        assert function == FUNCTION
        if place == len(sizes):
            return last
        ctypes.c_size_t.from_address(offset_at).value = sum(sizes[:place])
        ctypes.c_size_t.from_address(size_at).value = sizes[place]
        return 0

    types = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
    return lambda: (lambda *_: 0, as_c_function(ask, *types))


def test_a_kernel_of_parameters_of_64_bits_is_launched_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_launch, "_driver", driver_that_says([8] * (11 + HIDDEN)))
    assert load_kernel(compiled(), 11) is not None


@pytest.mark.parametrize(
    ("sizes", "last"),
    [
        ([8] * 12, 1),  # one of its own went into the code, as one that is 1 does
        ([8] * 11, 1),  # no hidden ones
        ([8] * 14, 1),  # more than is known of
        ([8] * 5 + [4] + [8] * 7, 1),  # not all of 64 bits
        ([8] * 13, 201),  # the driver could not tell
    ],
)
def test_any_other_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, sizes: list[int], last: int) -> None:
    monkeypatch.setattr(driver_launch, "_driver", driver_that_says(sizes, last))
    assert load_kernel(compiled(), 11) is None


@pytest.mark.parametrize(
    "metadata",
    [
        {"target": SimpleNamespace(backend="hip", warp_size=64)},
        {"shared": 1024},
        {"num_ctas": 2},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
    ],
)
def test_so_is_one_that_needs_more_than_a_grid(monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any]) -> None:
    monkeypatch.setattr(driver_launch, "_driver", driver_that_says([8] * 13))
    assert load_kernel(compiled(**metadata), 11) is None


def test_so_are_all_where_there_is_no_such_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver_launch, "_driver", no_driver)
    assert load_kernel(compiled(), 11) is None
