"""Device tables: descriptors in device memory, for plans that do not fit in the kernel's arguments."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from . import segments
from ._runtime import TorchRuntime
from ._size_classes import LaunchConfig
from .flight import Flight
from .plan import Plan
from .pool import HostPool
from .tiles import make_tiles


class DeviceTable:
    """Descriptors of one plan: ``[num_stored] int64`` addresses, then ``[num_tiles, 6] int64`` tiles.

    For a few leaves, each launch passes the addresses instead, and none is stored. The table is written on the
    producing stream, after the kernels that still read its previous content.

    Parameters
    ----------
    plan, config
        The plan and its launch configuration.
    runtime
        Runtime of the device.
    staging
        Pinned memory for descriptors on their way to the device.

    Attributes
    ----------
    buffer
        The descriptors on the device.
    num_tiles, tiles
        How many tiles there are, and their device address.
    addresses
        Device address of the stored leaf addresses; None if launches pass them.
    known
        Leaf addresses that are on the device now; ``()`` before the first upload. None if the table stores no addresses
        and its tiles are uploaded: its content never changes again.
    """

    __slots__ = (
        "_flight",
        "_pack",
        "_runtime",
        "_shelf",
        "_staging",
        "_stored",
        "_stream",
        "_upload",
        "addresses",
        "buffer",
        "known",
        "num_tiles",
        "tiles",
    )

    def __init__(self, plan: Plan, config: LaunchConfig, runtime: TorchRuntime, staging: HostPool) -> None:
        leaves = len(plan.use.routes)
        tiles = make_tiles(plan.segments, config.tile_bytes)
        self._stored = 0 if leaves <= segments.MOST_PASSED else leaves
        head = (self._stored + 1) // 2 * 2  # keeps the tiles aligned to 16 bytes
        self._upload: np.ndarray[Any, np.dtype[np.int64]] | None = np.concatenate(
            [np.zeros(head, np.int64), tiles.ravel()]
        )
        self.buffer = runtime.empty(self._upload.nbytes)
        address = self.buffer.data_ptr()
        self.num_tiles, self.tiles = len(tiles), address + 8 * head
        self.addresses = address if self._stored else None
        self.known: tuple[int, ...] | None = ()
        self._runtime = runtime
        self._staging = staging
        self._shelf = staging.shelf(8 * self._stored)
        self._pack = struct.Struct(f"{self._stored}q")
        self._stream = runtime.current_stream()  # last stream that used the table; at first the allocating one
        self._flight: Flight | None = None  # flight of the last pack that reads the table

    def update(self, addresses: tuple[int, ...], stream: int, flight: Flight) -> bool:
        """Upload what a launch on `stream` needs and the device lacks; returns whether anything was uploaded.

        After an error the content of the table is undefined: do not use it again.

        Parameters
        ----------
        addresses
            Addresses of all leaves.
        stream
            Raw handle of the stream.
        flight
            Flight of the pack that is about to be launched.
        """
        if self._stream != stream:
            self._change_stream(stream)
        self._flight = flight
        if self.known is None or self.known == addresses:
            return False
        nbytes = self._pack.size if self._upload is None else self._upload.nbytes  # after the first time only addresses
        slab = self._shelf.take() if self.known else None
        slab = slab or self._staging.acquire(nbytes)
        if slab is None:
            pageable = np.empty(nbytes, dtype=np.uint8)
            self._write(pageable.data, addresses)
            with torch.inference_mode():  # a buffer made in it can't be written outside of it
                self._runtime.upload_pageable(self.buffer[:nbytes], torch.from_numpy(pageable))
        else:
            slab.flight = flight  # so that it is not reused before this pack has landed
            slab.shelf.idle.append(slab)
            self._write(slab.view, addresses)
            self._runtime.upload(self.buffer.data_ptr(), slab.address, nbytes, stream)
        self.known = addresses if self._stored else None
        return True

    def _write(self, target: memoryview, addresses: tuple[int, ...]) -> None:
        """Write the descriptors that the device lacks to `target`."""
        if self._upload is not None:
            target[: self._upload.nbytes] = self._upload.view(np.uint8).data
            self._upload = None
        if self._stored:
            self._pack.pack_into(target, 0, *addresses)

    def _change_stream(self, stream: int) -> None:
        """Let `stream` use the table after the work of the previous stream."""
        if self._flight is not None:
            self._runtime.stream_wait(stream, self._flight.landed)
        else:  # never launched: its memory is ordered on the stream that it was allocated on
            made = self._runtime.make_event(blocking=False)
            self._runtime.record(made, self._stream)
            self._runtime.stream_wait(stream, made)
        self._runtime.hold(self.buffer)
        self._stream = stream
