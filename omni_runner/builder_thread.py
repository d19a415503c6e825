"""One long-lived thread that builds the outputs of a runner, in the order of its steps.

Starting a thread costs more than packing a step does, so the thread stays. Nothing here knows torch or
the engine: a job is a callable.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread  # by name, so that a class put in the place of threading.Thread later is not used
from typing import Generic, TypeVar

from omni_runner.errors import BuilderThreadClosed

__all__ = ["BuilderThread", "Job"]

T = TypeVar("T")

DEFAULT_MAX_PENDING = 16  # the engine keeps two steps in flight; more than that means it stopped collecting
_FULL_POLL_S = 0.0005
EXIT_TIMEOUT_S = 1.0  # how long a process that ends waits for work in flight, all builder threads together


class Job(Generic[T]):
    """A piece of work handed to a `BuilderThread`: wait for it with `join`, get its outcome with `result`."""

    __slots__ = ("_cancelled", "_failure", "_pid", "_running", "_settled", "_value", "_work")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._failure: BaseException | None = None
        self._cancelled = False
        self._settled = False
        self._running = threading.Lock()  # held until the job is settled; an Event costs ten times as much to make
        self._running.acquire()
        self._pid = os.getpid()

    @property
    def settled(self) -> bool:
        """Whether the work has returned, raised or been cancelled."""
        return self._settled

    @property
    def cancelled(self) -> bool:
        """Whether the thread was closed before it came to this job: the work never ran."""
        return self._cancelled

    def join(self, timeout: float | None = None) -> None:
        """Wait until the job is settled, as `threading.Thread.join` waits for a thread.

        Never raises what the work raised. In a forked child, where the thread does not exist, it returns at once.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits without a limit.
        """
        if self._pid == os.getpid() and self._running.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            self._running.release()  # for the next one who waits

    def result(self, timeout: float | None = None) -> T:
        """Wait for the job, then return what the work returned or raise what it raised.

        Raises
        ------
        BuilderThreadClosed
            The thread was closed before the work ran, or this is a forked child, which has no such thread.
        TimeoutError
            The job was not settled within `timeout` seconds.
        """
        self.join(timeout)
        if not self.settled:
            if self._pid != os.getpid():
                raise BuilderThreadClosed("the builder thread belongs to the process that this one was forked from")
            raise TimeoutError(f"the job is not settled after {timeout} s")
        if self._cancelled:
            raise BuilderThreadClosed("the builder thread was closed before it came to this job")
        if self._failure is not None:
            raise self._failure
        return self._value  # type: ignore[return-value]  # settled without failure: it is a T

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._value = self._work()
        except BaseException as failure:  # noqa: BLE001  belongs to whoever asks for the result; the thread lives on
            self._failure = failure
        self._settle()

    def _cancel(self) -> None:
        self._cancelled = True
        self._settle()

    def _settle(self) -> None:
        self._work = None  # with it go the tensors of the step that it holds
        self._settled = True
        self._running.release()


class _JobQueue:
    """Bounded FIFO between the threads that submit and the one that runs."""

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # a put takes a tenth of what a Condition takes
        self._lock = threading.Lock()
        self._closed = False

    def put(self, job: Job) -> None:
        while self._jobs.qsize() >= self._max_pending and not self._closed:
            time.sleep(_FULL_POLL_S)
        with self._lock:
            if self._closed:
                raise BuilderThreadClosed("work was submitted to a builder thread that has been closed")
            self._jobs.put(job)

    def take(self) -> Job | None:
        """Return the oldest job; None once the queue is closed and empty."""
        return self._jobs.get()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)  # behind every job

    def cancel_pending(self) -> None:
        with suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job._cancel()
        self._jobs.put(None)  # the thread may still be at a job, and asks once more


def _run_jobs(queue: _JobQueue) -> None:
    while (job := queue.take()) is not None:
        job._run()
        del job  # an idle thread must not keep the last step's payload alive


class BuilderThread:
    """A daemon thread that runs jobs one after the other, in the order they were submitted.

    The thread starts with the first job. It ends with `close()`, when this object is garbage collected, or with the
    process, which waits for it no longer than a second.

    Parameters
    ----------
    name : str
        Name of the thread, as debuggers and profilers show it.
    max_pending : int
        Jobs that may wait; `submit` blocks while so many do.
    """

    def __init__(self, name: str = "omni-runner-builder", max_pending: int = DEFAULT_MAX_PENDING) -> None:
        self._name = name
        self._queue = _JobQueue(max_pending)
        self._thread: Thread | None = None
        self._starting = threading.Lock()
        self._pid = os.getpid()
        # The thread refers to the queue, never to this object, so that dropping the object ends the thread.
        weakref.finalize(self, self._queue.close).atexit = False
        _LIVE.add(self)

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Queue `work` and return at once, unless `max_pending` jobs are waiting already.

        Raises
        ------
        BuilderThreadClosed
            After `close()`, and in a forked child, which has the object but not the thread.
        """
        if self._pid != os.getpid():
            raise BuilderThreadClosed("the builder thread belongs to the parent of this forked process; make a new one")
        if self._thread is None:
            self._start()
        job = Job(work)
        self._queue.put(job)
        return job

    def close(self, timeout: float = EXIT_TIMEOUT_S) -> bool:
        """Take no more work, let what is queued finish, and end the thread.

        What has not begun after `timeout` seconds is cancelled; work that is running then is left to itself, on a
        daemon thread that keeps no process alive. Calling it again is harmless.

        Parameters
        ----------
        timeout : float
            Seconds to wait for queued and running work.

        Returns
        -------
        bool
            Whether the thread has ended (or never began).
        """
        if self._pid != os.getpid():
            return True
        self._queue.close()
        with self._starting:
            thread = self._thread
        # Garbage collection can bring a runner's shutdown onto this very thread, which cannot wait for itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(timeout, 0.0))
        self._queue.cancel_pending()
        return thread is None or not thread.is_alive()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._queue.closed:
                thread = Thread(target=_run_jobs, args=(self._queue,), name=self._name, daemon=True)
                thread.start()
                self._thread = thread


_LIVE: weakref.WeakSet[BuilderThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that wakes up inside torch while the interpreter is being torn down can abort the process.
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for thread in list(_LIVE):
        thread.close(deadline - time.monotonic())
