"""Snapshots: the handle of a pack in flight, and the zero-copy views into its landed bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import ClosedError
from .plan import Column, Plan

if TYPE_CHECKING:
    from .flight import Flight
    from .gather import OpaqueCopy
    from .late import LateCopy
    from .overflow import Overflow
    from .pool import HostSlab

# Torch's stubs declare only those overloads of these two that write to given tensors.
_split_copy: Callable[..., Sequence[Tensor]] = torch.split_with_sizes_copy  # type: ignore[assignment]
_unbind_copy: Callable[..., Sequence[Tensor]] = torch.unbind_copy  # type: ignore[assignment]

_NOTHING: Mapping[int, Tensor] = MappingProxyType({})


class Rest:
    """What is not in the slab when a snapshot is made; fetched by the first thread that waits for it.

    Attributes
    ----------
    late
        The device part of a pack without a pinned slab.
    opaque
        Copies of the leaves that are moved as objects, by leaf index.
    lock
        Held while the rest is fetched or released.
    """

    __slots__ = ("late", "lock", "opaque")

    def __init__(self, late: LateCopy | None, opaque: dict[int, OpaqueCopy]) -> None:
        self.late = late
        self.opaque = opaque
        self.lock = threading.Lock()


class Snapshot:
    """The bytes of one pack, on their way to the host or already there.

    Made by `Packer.run`. Safe to wait for and to read from several threads. Dropping it is safe at any time: slabs in
    use by a copy are not reused before the copy is done.
    """

    __slots__ = (
        "_copies_pieces",
        "_crowded",
        "_flight",
        "_landed",
        "_lease",
        "_opaque",
        "_overflow",
        "_plan",
        "_released",
        "_rest",
        "_slab",
    )

    def __init__(
        self,
        plan: Plan,
        lease: memoryview | None,
        flight: Flight | None = None,
        slab: HostSlab | None = None,
        rest: Rest | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        # One is made per step, on the decode thread: no lock and no dict unless there is something left to fetch.
        self._plan = plan
        self._lease = lease  # [slab_bytes]; every view keeps it alive, and with it the slab
        self._flight = flight
        self._slab = slab
        self._rest = rest
        self._overflow = overflow  # takes the bytes of a crowded slab; None once that is decided
        self._opaque: Mapping[int, Tensor] = _NOTHING  # leaves that were moved as objects, once they are on the host
        self._landed = flight is None and rest is None
        self._crowded = self._copies_pieces = self._released = False

    @property
    def plan(self) -> Plan:
        """The plan that was run."""
        return self._plan

    @property
    def copies_out(self) -> bool:
        """Whether bytes are copied out of the slab because too many slabs are held; False until `wait` has returned."""
        return self._crowded

    def done(self) -> bool:
        """Whether the device is done; `wait` then returns at once, or after one copy if a slower path was taken."""
        if self._landed:
            return True
        rest = self._rest
        flown = self._flight is None or self._flight.is_done()
        return flown and (rest is None or all(copy.is_done() for copy in rest.opaque.values()))

    def wait(self) -> None:
        """Sleep until the bytes are on the host. Further calls return at once."""
        if self._landed:
            return
        if self._flight is not None:
            self._flight.wait()
        rest = self._rest
        if rest is not None:
            self._fetch(rest)
        slab = self._slab
        if slab is not None:
            self._crowded = slab.crowded()
        self._landed = True

    def _fetch(self, rest: Rest) -> None:
        with rest.lock:
            if self._rest is None:
                return  # another thread has fetched it, or released the snapshot
            if rest.late is not None:
                self._lease = rest.late.fetch()
            self._opaque = {leaf: copy.fetch() for leaf, copy in rest.opaque.items()}
            self._rest = None

    def column(self, index: int) -> Tensor:
        """One column as a tensor on the host; waits for the bytes.

        Parameters
        ----------
        index
            Which one, as in ``plan.columns``.

        Returns
        -------
        Tensor
            ``[sum of rows, *row_shape]`` in the dtype of its leaves, ``[num_pieces]`` for 0-dimensional leaves. A
            view into the slab with a storage of its own that holds this column only.

        Raises
        ------
        ClosedError
            The snapshot was released before.
        """
        self.wait()
        self._check_held()
        column = self._plan.columns[index]
        return self._view(column) if column.opaque is None else self._opaque[column.opaque]

    def split(self, index: int) -> tuple[Tensor, ...]:
        """One tensor per piece of a column, in order; waits for the bytes.

        Zero-copy: the pieces share the column's storage, which keeps the slab from being reused. While too many slabs
        are held this way, the whole slab is copied to pageable memory first; past the budget of that memory, each piece
        is copied to its own memory instead, all of them by one call.

        Parameters
        ----------
        index
            Which column, as in ``plan.columns``.

        Returns
        -------
        tuple of Tensor
            ``[rows of the piece, *row_shape]`` each, 0-dimensional for 0-dimensional leaves.

        Raises
        ------
        ClosedError
            The snapshot was released before.
        """
        column = self._plan.columns[index]
        whole = self.column(index)
        if column.opaque is not None:
            return (whole, *(whole.clone() for _ in column.rows[1:]))
        if column.scalar:
            return tuple(_unbind_copy(whole) if self._copies_pieces else whole.unbind())
        # "Unsafe" skips autograd's view tracking, which takes a quarter of the time and which host bytes don't need.
        return tuple((_split_copy if self._copies_pieces else torch.unsafe_split_with_sizes)(whole, column.rows))

    def pieces(self, index: int) -> list[Tensor]:
        """Like `split`, but each piece has a storage of its own that ends where the piece ends.

        Costs about twice as much as `split`. Pickling, `torch.save` and `share_memory_` of such a piece process its own
        bytes only; of a piece from `split` they process the whole column.

        Parameters
        ----------
        index
            Which column, as in ``plan.columns``.

        Returns
        -------
        list of Tensor
            As from `split`.

        Raises
        ------
        ClosedError
            The snapshot was released before.
        """
        self.wait()
        self._check_held()
        column = self._plan.columns[index]
        if column.opaque is not None or not column.nbytes:
            return list(self.split(index))
        lease = self._bytes()
        if self._copies_pieces:
            return list(self.split(index))
        dtype, row_shape = column.dtype, column.shape[1:]
        row_items = column.nbytes // column.dtype.itemsize // column.shape[0]
        found = []
        offset = column.offset_bytes
        for rows in column.rows:
            shape = () if column.scalar else (rows, *row_shape)
            if rows:
                flat = torch.frombuffer(lease, dtype=dtype, count=rows * row_items, offset=offset)
                found.append(flat.view(shape))
            else:
                found.append(torch.empty(shape, dtype=dtype, device="cpu"))
            offset += rows * row_items * dtype.itemsize
        return found

    def release(self) -> None:
        """Give up the snapshot's own hold on its slab; existing views stay valid and keep it alive."""
        rest = self._rest
        with nullcontext() if rest is None else rest.lock:
            self._released = True
            self._lease = self._rest = self._slab = self._overflow = None
            self._opaque = _NOTHING
            self._landed = True

    def _view(self, column: Column) -> Tensor:
        if not column.nbytes:
            return torch.empty(column.shape, dtype=column.dtype, device="cpu")
        count = column.nbytes // column.dtype.itemsize
        flat = torch.frombuffer(self._bytes(), dtype=column.dtype, count=count, offset=column.offset_bytes)
        return flat.view(column.shape)

    def _bytes(self) -> memoryview:
        """The bytes; the first call moves them out of a crowded slab."""
        lease, overflow = self._lease, self._overflow
        if lease is None:
            raise _released()
        if overflow is None or not self._crowded:
            return lease
        moved = overflow.take_over(lease)
        self._overflow = None  # decided; if two threads get here, each has a valid copy
        if moved is None:
            self._copies_pieces = True
            return lease
        self._lease = moved
        if self._released:  # by another thread, meanwhile
            self._lease = None
        return moved

    def _check_held(self) -> None:
        if self._released:
            raise _released()


def _released() -> ClosedError:
    return ClosedError("this snapshot was released; read its columns before calling release()")
