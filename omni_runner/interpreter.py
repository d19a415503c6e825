"""Settings of the Python interpreter while a packed stage runs in this process.

Two of Python's defaults cost an engine that has a busy sender thread beside it whole steps:

* A full garbage collection walks through everything that waits for the sender, 50 to 150 ms at a time. What the stage
  makes is kept out of it (see `untrack`); what the engine itself queues for each payload (0.30: a copy of the request
  and of its token lists) can't be. Full collections come a hundredth as often, then. Those of the middle generation,
  4 ms at a time, come two and a half times as often and find as much less to do. The youngest stay as they are.
* A thread that wants the interpreter lock while another runs Python code waits 5 ms before it asks for it, and every
  call of torch gives the lock away.

Both are settings of the whole process, so they are changed only where nobody has chosen values, and put back when the
last stage is closed.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from weakref import WeakSet

logger = logging.getLogger("vllm.omni_runner")

# Thresholds of the middle and the oldest generation: Python's (up to 3.13; later ones are without), and ours.
COLLECTION_THRESHOLDS = (10, 10), (4, 2500)
# Python's, and ours. A Thinker of 64 requests beside its sender (0.30, H200) made 4,300 tokens/s with 5 ms, 4,680 with
# 1 ms, 4,750 with 0.2 ms, and 3,860 with 0.05 ms, where threads do little but take turns.
SWITCH_INTERVAL_S = 0.005, 0.0005

_lock = threading.Lock()
_stages: WeakSet[object] = WeakSet()


def tune(stage: object) -> None:
    """Change the settings for `stage`; harmless when repeated."""
    with _lock:
        if stage not in _stages:
            _stages.add(stage)
            logger.info(
                "omni_runner: Python collects all garbage less often and switches threads sooner; "
                "OMNI_RUNNER_TUNE_PYTHON=0 leaves it as it is"
            )
        _set(*COLLECTION_THRESHOLDS, *SWITCH_INTERVAL_S)


def restore(stage: object) -> None:
    """Put them back, unless another stage is left that wants them. Harmless when repeated, or without `tune`."""
    with _lock:
        if stage in _stages:
            _stages.discard(stage)
            if not _stages:
                _set(*COLLECTION_THRESHOLDS[::-1], *SWITCH_INTERVAL_S[::-1])


def _set(
    thresholds_before: tuple[int, int], thresholds: tuple[int, int], interval_before: float, interval: float
) -> None:
    """Change what is as it was left."""
    youngest, *older = gc.get_threshold()
    if tuple(older) == thresholds_before:
        gc.set_threshold(youngest, *thresholds)
    if sys.getswitchinterval() == interval_before:
        sys.setswitchinterval(interval)
