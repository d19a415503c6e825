"""Settings of the Python interpreter while a packed stage runs in this process.

If a busy sender thread runs in the engine's process, two of Python's defaults cost the engine whole steps:

* A full garbage collection traverses all objects that wait for the sender, 50 to 150 ms at a time. The stage's
  payloads are excluded from it (see `untrack`); what the engine itself queues for each payload (0.30: a copy of the
  request and of its token lists) cannot be. Full collections are therefore made a hundred times rarer. Those of the
  middle generation, 4 ms each, are made 2.5 times as frequent, with that much less to do each. The threshold of the
  youngest generation is unchanged.
* A thread that needs the interpreter lock (GIL) while another runs Python code waits 5 ms before it requests the lock,
  and every torch call releases it.

Both settings are process-wide, so each is changed only if it has Python's default, and restored when the last stage is
closed.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger("vllm.omni_runner")

PYTHONS_THRESHOLDS = ((700, 10, 10), (2000, 10, 10))  # up to 3.12, and 3.13; later versions have no oldest generation
OLDER_THRESHOLDS = 4, 2500  # our thresholds of the middle and the oldest generation
PYTHONS_SWITCH_INTERVAL_S = 0.005
# Our interval. A Thinker with 64 requests and its sender thread (0.30, H200) made 4,300 tokens/s with 5 ms, 4,680 with
# 1 ms, 4,750 with 0.2 ms, and 3,860 with 0.05 ms, where threads mostly switch; 0.5 ms is far from that.
SWITCH_INTERVAL_S = 0.0005

_lock = threading.RLock()  # reentrant: garbage collection can finalize a stage on a thread that holds it
_stages: dict[int, weakref.finalize[..., object]] = {}  # id of a stage -> finalizer that ends its tuning
_put_back: list[Callable[[], None]] = []  # functions that undo the changes when the last stage ends


def tune(stage: object) -> None:
    """Change the settings until `restore(stage)` or the end of `stage`; harmless when repeated."""
    key, changed = id(stage), False
    with _lock:
        if key not in _stages:
            _stages[key] = weakref.finalize(stage, _leave, key)
            _stages[key].atexit = False
            if len(_stages) == 1:
                changed = _change()
    if changed:
        logger.info(
            "omni_runner: Python collects all garbage less often and switches threads sooner; "
            "OMNI_RUNNER_TUNE_PYTHON=0 leaves it as it is"
        )


def restore(stage: object) -> None:
    """Restore the settings unless another stage still uses them; harmless when repeated, or without `tune`."""
    _leave(id(stage))


def _leave(key: int) -> None:
    with _lock:
        if key in _stages:
            _stages.pop(key).detach()
            while _put_back and not _stages:
                _put_back.pop()()


def _change() -> bool:
    """Change settings that have Python's defaults; return whether any was changed."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    if thresholds in PYTHONS_THRESHOLDS:
        ours = (thresholds[0], *OLDER_THRESHOLDS)
        gc.set_threshold(*ours)
        _put_back.append(lambda: gc.set_threshold(*thresholds) if gc.get_threshold() == ours else None)
    if interval == PYTHONS_SWITCH_INTERVAL_S:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        _put_back.append(
            lambda: sys.setswitchinterval(interval) if sys.getswitchinterval() == SWITCH_INTERVAL_S else None
        )
    return bool(_put_back)


def _after_fork() -> None:
    """Replace the lock: if it was held at the fork, the child has no thread that could release it."""
    global _lock  # noqa: PLW0603  replaced
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
