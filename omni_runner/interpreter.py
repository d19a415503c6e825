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
import os
import sys
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger("vllm.omni_runner")

PYTHONS_THRESHOLDS = ((700, 10, 10), (2000, 10, 10))  # up to 3.12, and 3.13; later ones have no oldest generation
OLDER_THRESHOLDS = 4, 2500  # ours, of the middle and the oldest generation
PYTHONS_SWITCH_INTERVAL_S = 0.005
# Ours. A Thinker of 64 requests beside its sender (0.30, H200) made 4,300 tokens/s with 5 ms, 4,680 with
# 1 ms, 4,750 with 0.2 ms, and 3,860 with 0.05 ms, where threads do little but take turns; this is far from it.
SWITCH_INTERVAL_S = 0.0005

_lock = threading.RLock()  # garbage collection can bring a stage's end onto a thread that is in here
_stages: dict[int, weakref.finalize[..., object]] = {}  # id of a stage -> what ends its tuning when it is collected
_put_back: list[Callable[[], None]] = []  # what was changed, for the last of them


def tune(stage: object) -> None:
    """Change the settings for `stage`, until `restore` or its end; harmless when repeated."""
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
    """Put them back, unless another stage is left that wants them. Harmless when repeated, or without `tune`."""
    _leave(id(stage))


def _leave(key: int) -> None:
    with _lock:
        if key in _stages:
            _stages.pop(key).detach()
            while _put_back and not _stages:
                _put_back.pop()()


def _change() -> bool:
    """Change what is at Python's defaults; whether anything was."""
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
    """A child has no thread that could let go of a lock that was held when it was made."""
    global _lock  # noqa: PLW0603  made anew
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
