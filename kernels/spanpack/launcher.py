"""The launcher: compiled kernels with all but a few of their arguments filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ._size_classes import LaunchConfig
from .driver_launch import DriverKernel, load_kernel
from .gather import NO_ADDRESSES, RunArguments, load_kernels, padded
from .segments import PassedRun

# What a `Launcher` binds: takes the address of the slab, the handle of the stream and the leaves' addresses.
Launch = Callable[[int, int, tuple[int, ...]], None]

_CHANGING = 1 + len(NO_ADDRESSES)  # the slab, then what is read


class _Loaded(NamedTuple):
    """A compiled kernel.

    Attributes
    ----------
    run, head
        Triton's launcher, and the arguments that it wants before the kernel's.
    driver
        The same kernel for a call of the driver; None where it has to be Triton's launcher.
    """

    run: Callable[..., None]
    head: tuple[Any, ...]
    driver: DriverKernel | None


class Launcher:
    """Launches compiled kernel objects directly, by the driver where that is possible.

    Parameters
    ----------
    device
        CUDA or ROCm device that is current when anything is bound.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loaded: dict[tuple[str, LaunchConfig], _Loaded] = {}

    def bind(self, config: LaunchConfig, num_tiles: int, tiles: int, table: int | None) -> Launch:
        """A launch of `gather_tiles` with all filled in but what changes; compiles on the first use of a configuration.

        Parameters
        ----------
        config
            Tile size and warps.
        num_tiles
            Programs to launch.
        tiles
            Device address of the tiles, aligned to 16.
        table
            The same of the leaves' addresses. None where each launch passes them: up to `MOST_PASSED` leaves, which
            then may be elsewhere in every step without anything being copied to the device first.

        Returns
        -------
        callable
            ``launch(slab, stream, addresses)``: address of the slab, aligned to 16, raw handle of the stream, and first
            byte of each leaf, which counts only without a table.
        """
        passed = table is None
        loaded = self._load("passing addresses" if passed else "with a table", config)
        sources = padded if passed else _no_addresses
        return _bind(loaded, num_tiles, sources, (tiles, table or 0), (passed, config.tile_bytes))

    def bind_runs(self, config: LaunchConfig, runs: Sequence[PassedRun]) -> Launch:
        """The same of `gather_runs`, which needs nothing on the device."""
        loaded = self._load("passing runs", config)
        passed = RunArguments(runs, config.tile_bytes)
        return _bind(loaded, passed.num_tiles, passed.sources, passed.constants, (config.tile_bytes,))

    def _load(self, variant: str, config: LaunchConfig) -> _Loaded:
        """A kernel that was compiled before, or is now."""
        found = self._loaded.get((variant, config))
        if found is None:
            found = self._loaded[variant, config] = self._compile(variant, config)
        return found

    def _compile(self, variant: str, config: LaunchConfig) -> _Loaded:
        kernels, slab = load_kernels(), torch.uint8
        arguments: tuple[Any, ...]
        constants: dict[str, bool]
        if variant == "passing runs":
            kernel, arguments, constants = kernels.gather_runs, (slab, *NO_ADDRESSES * 4), {}
        else:
            kernel, arguments = kernels.gather_tiles, (slab, *NO_ADDRESSES, torch.int64, torch.int64)
            constants = {"PASSED": variant == "passing addresses"}
        with torch.cuda.device(self._device):
            compiled = kernel.warmup(
                *arguments, **constants, TILE_BYTES=config.tile_bytes, num_warps=config.num_warps, grid=(1,)
            )
            run = compiled.run  # loads the module, so ask for it before the function
            head = compiled.function, compiled.packed_metadata, None, None, None
            return _Loaded(run, head, load_kernel(compiled, len(arguments)))


def _bind(
    loaded: _Loaded,
    num_tiles: int,
    sources: Callable[[tuple[int, ...]], tuple[int, ...]],
    fixed: tuple[int, ...],
    constants: tuple[Any, ...],
) -> Launch:
    """A launch of ``kernel(slab, *sources, *fixed, *constants)``."""
    run, head, driver = loaded

    def launch_by_triton(slab: int, stream: int, addresses: tuple[int, ...]) -> None:
        run(num_tiles, 1, 1, stream, *head, slab, *sources(addresses), *fixed, *constants)

    if driver is None:
        return launch_by_triton
    launch_by_driver = driver.bind(num_tiles, _CHANGING, fixed)

    def launch(slab: int, stream: int, addresses: tuple[int, ...]) -> None:
        if launch_by_driver(stream, slab, *sources(addresses)):
            launch_by_triton(slab, stream, addresses)  # gives a thread the context that it lacked, or says what failed

    return launch


def _no_addresses(_: tuple[int, ...]) -> tuple[int, ...]:
    return NO_ADDRESSES
