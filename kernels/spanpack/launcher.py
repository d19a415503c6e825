"""The launcher: compiled kernels with all but a few of their arguments bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ._size_classes import LaunchConfig
from .driver_launch import DriverKernel, load_kernel
from .gather import NO_ADDRESSES, RunArguments, load_kernels, padded
from .segments import PassedRun

# A launch that a `Launcher` has bound: takes the slab's address, the stream's handle and the leaves' addresses.
Launch = Callable[[int, int, tuple[int, ...]], None]

_CHANGING = 1 + len(NO_ADDRESSES)  # the slab's address, then the source addresses


class _Loaded(NamedTuple):
    """A compiled kernel.

    Attributes
    ----------
    run, head
        Triton's launcher, and the arguments that it takes before the kernel's.
    driver
        The same kernel for launches by the driver; None if only Triton's launcher can launch it.
    """

    run: Callable[..., None]
    head: tuple[Any, ...]
    driver: DriverKernel | None


class Launcher:
    """Launches compiled kernels directly, by the driver if possible.

    Parameters
    ----------
    device
        CUDA or ROCm device, made current while a kernel is compiled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loaded: dict[tuple[str, LaunchConfig], _Loaded] = {}

    def bind(self, config: LaunchConfig, num_tiles: int, tiles: int, table: int | None) -> Launch:
        """A launch of `gather_tiles` with constant arguments bound; compiles at the first use of a configuration.

        Parameters
        ----------
        config
            Tile size and warps.
        num_tiles
            Programs to launch.
        tiles
            Device address of the tiles, aligned to 16 bytes.
        table
            Device address of the leaves' addresses, aligned to 16 bytes. None if each launch passes the addresses, as
            for up to `MOST_PASSED` leaves: these may then change in every step without an upload.

        Returns
        -------
        callable
            ``launch(slab, stream, addresses)``: address of the slab, aligned to 16 bytes, raw handle of the stream, and
            addresses of the leaves, used only without a table.
        """
        passed = table is None
        loaded = self._load("passing addresses" if passed else "with a table", config)
        sources = padded if passed else _no_addresses
        return _bind(loaded, num_tiles, sources, (tiles, table or 0), (passed, config.tile_bytes))

    def bind_runs(self, config: LaunchConfig, runs: Sequence[PassedRun]) -> Launch:
        """Like `bind`, for `gather_runs`, which needs no descriptors on the device."""
        loaded = self._load("passing runs", config)
        passed = RunArguments(runs, config.tile_bytes)
        return _bind(loaded, passed.num_tiles, passed.sources, passed.constants, (config.tile_bytes,))

    def _load(self, variant: str, config: LaunchConfig) -> _Loaded:
        """The kernel of a variant and configuration, compiled at the first call."""
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
            run = compiled.run  # loads the module, so it must be read before the function
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
            launch_by_triton(slab, stream, addresses)  # sets the CUDA context if the thread has none, or raises

    return launch


def _no_addresses(_: tuple[int, ...]) -> tuple[int, ...]:
    return NO_ADDRESSES
