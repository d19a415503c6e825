"""The launcher: compiled kernels with all but a few of their arguments bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ._size_classes import LaunchConfig
from .driver_launch import DriverKernel, load_kernel
from .gather import NO_ADDRESSES, RunArguments, load_kernels, padded
from .segments import PassedRun
from .stats import Fallbacks

# A launch that a `Launcher` has bound: takes the slab's address, the stream's handle and the leaves' addresses.
Launch = Callable[[int, int, tuple[int, ...]], None]

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_CHANGING = 1 + len(NO_ADDRESSES)  # the slab's address, then the source addresses


class _Loaded(NamedTuple):
    """A compiled kernel.

    Attributes
    ----------
    compiled
        Triton's object, kept because Triton 3.8 unloads the kernel with it.
    run, head
        Triton's launcher, and the arguments that it takes before the kernel's.
    driver
        The same kernel for launches by the driver; None if only Triton's launcher can launch it.
    """

    compiled: Any
    run: Callable[..., None]
    head: tuple[Any, ...]
    driver: DriverKernel | None


class Launcher:
    """Launches compiled kernels directly, by the driver if possible.

    Parameters
    ----------
    device
        CUDA or ROCm device, made current while a kernel is compiled.
    fallbacks
        Where launches are counted that the driver refuses and Triton makes; by default they are not counted.
    """

    def __init__(self, device: torch.device, fallbacks: Fallbacks | None = None) -> None:
        self._device = device
        self._fallbacks = fallbacks
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
        return self._bind(loaded, num_tiles, sources, (tiles, table or 0), (passed, config.tile_bytes))

    def bind_runs(self, config: LaunchConfig, runs: Sequence[PassedRun]) -> Launch:
        """Like `bind`, for `gather_runs`, which needs no descriptors on the device."""
        loaded = self._load("passing runs", config)
        passed = RunArguments(runs, config.tile_bytes)
        return self._bind(loaded, passed.num_tiles, passed.sources, passed.constants, (config.tile_bytes,))

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
            return _Loaded(compiled, run, head, load_kernel(compiled, len(arguments)))

    def _bind(
        self,
        loaded: _Loaded,
        num_tiles: int,
        sources: Callable[[tuple[int, ...]], tuple[int, ...]],
        fixed: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> Launch:
        """A launch of ``kernel(slab, *sources, *fixed, *constants)``."""

        def launch_by_triton(slab: int, stream: int, addresses: tuple[int, ...]) -> None:
            loaded.run(num_tiles, 1, 1, stream, *loaded.head, slab, *sources(addresses), *fixed, *constants)

        if loaded.driver is None:
            return launch_by_triton
        launch_by_driver = loaded.driver.bind(num_tiles, _CHANGING, fixed)

        def launch(slab: int, stream: int, addresses: tuple[int, ...]) -> None:
            code = launch_by_driver(stream, slab, *sources(addresses))
            if code:
                launch_by_triton(slab, stream, addresses)  # raises what is wrong
                self._note_refusal(code)

        return launch

    def _note_refusal(self, code: int) -> None:
        """Count a launch that the driver refused, unless the thread had no CUDA context before Triton made it one."""
        if code != _INVALID_CONTEXT and self._fallbacks is not None:
            self._fallbacks.note("driver launch", f"the driver refused a launch with error {code}, Triton made it")


def _no_addresses(_: tuple[int, ...]) -> tuple[int, ...]:
    return NO_ADDRESSES
