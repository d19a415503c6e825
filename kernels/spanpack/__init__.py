"""spanpack: pack many tensors of many requests with one launch and one copy, and return zero-copy views.

`Packer.pack` gathers the rows that each request of a batch owns, from all tensors of a payload, into one contiguous
buffer on the device, transfers it to pinned host memory with one copy on a side stream, and returns views. See
`Packer`, `Batch` and `Placement`; `make_plan` and `Packer.run` are the lower layer, which does not know trees.
"""

from ._version import __version__
from .batch import Batch
from .columns import ColumnSpec
from .errors import (
    BatchError,
    ClosedError,
    DeviceError,
    InputError,
    LeafError,
    PlacementError,
    SpanpackError,
    UnavailableError,
)
from .fetch import Fetcher
from .flight import Fetched
from .gather import gather_torch, gather_triton
from .packed_tree import PackedTree
from .packer import Packer
from .placement import Placement, RowMap
from .plan import Plan
from .plan_cache import PlanCache, Sighting
from .planner import make_plan
from .snapshot import Snapshot
from .stats import Stats
from .tree import flatten, unflatten

__all__ = [
    "Batch",
    "BatchError",
    "ClosedError",
    "ColumnSpec",
    "DeviceError",
    "Fetched",
    "Fetcher",
    "InputError",
    "LeafError",
    "PackedTree",
    "Packer",
    "Placement",
    "PlacementError",
    "Plan",
    "PlanCache",
    "RowMap",
    "Sighting",
    "Snapshot",
    "SpanpackError",
    "Stats",
    "UnavailableError",
    "__version__",
    "flatten",
    "gather_torch",
    "gather_triton",
    "make_plan",
    "unflatten",
]
