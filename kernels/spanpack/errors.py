"""Every exception that spanpack raises.

::

    SpanpackError
    ├── InputError (also a ValueError)     bad input at a call; nothing was packed
    │   ├── BatchError                     request ids, spans or consumers that contradict each other
    │   ├── PlacementError                 a leaf that fits no placement rule, or a rule that does not fit its leaf
    │   ├── LeafError                      a tensor that the plan was not made for, or that can't be packed
    │   └── DeviceError                    a tensor on a device that this packer does not serve
    ├── ClosedError                        the packer, fetcher or snapshot was closed or released before
    └── UnavailableError                   a backend that was asked for by name can't run here
"""


class SpanpackError(Exception):
    """Root of all errors of this package."""


class InputError(SpanpackError, ValueError):
    """Bad input at a call: the message says what was given, what was expected and what to do."""


class BatchError(InputError):
    """Request ids, spans or consumers that contradict each other."""


class PlacementError(InputError):
    """A leaf that fits no placement rule, or a rule that does not fit its leaf."""


class LeafError(InputError):
    """A tensor that the plan was not made for, or that can't be packed."""


class DeviceError(InputError):
    """A tensor on a device that this packer does not serve."""


class ClosedError(SpanpackError, RuntimeError):
    """The packer, fetcher or snapshot was closed or released before."""


class UnavailableError(SpanpackError, RuntimeError):
    """A backend that was asked for by name can't run here."""
