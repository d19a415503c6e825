"""One long-lived thread that builds the outputs of a runner, in the order of its steps.

Starting a thread costs more than packing a step, so the thread is kept. This module needs neither torch nor
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
from threading import Thread  # by name, so that a later replacement of threading.Thread has no effect
from typing import Generic, TypeVar

from omni_runner.errors import BuilderThreadClosed

__all__ = ["BuilderThread", "Job"]

T = TypeVar("T")

DEFAULT_MAX_PENDING = 16  # the engine keeps two steps in flight; more means it stopped collecting outputs
_FULL_POLL_S = 0.0005
EXIT_TIMEOUT_S = 1.0  # how long an exiting process waits for work in flight, over all builder threads


class Job(Generic[T]):
    """A piece of work handed to a `BuilderThread`: wait for it with `join`, get its outcome with `result`."""

    __slots__ = ("_cancelled", "_failure", "_pid", "_running", "_settled", "_value", "_work")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._failure: BaseException | None = None
        self._cancelled = False
        self._settled = False
        self._running = threading.Lock()  # held until the job is settled; an Event costs ten times as much to create
        self._running.acquire()
        self._pid = os.getpid()

    @property
    def settled(self) -> bool:
        """Whether the work has returned, raised or been cancelled."""
        return self._settled

    @property
    def cancelled(self) -> bool:
        """Whether the thread was closed before it started this job, so that the work never ran."""
        return self._cancelled

    def join(self, timeout: float | None = None) -> None:
        """Wait until the job is settled, as `threading.Thread.join` waits for a thread.

        Does not raise what the work raised. In a forked child, where the thread does not exist, it returns at once.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits without a limit.
        """
        if self._pid == os.getpid() and self._running.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            self._running.release()  # for the next caller that waits

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
        except BaseException as failure:  # noqa: BLE001  raised to the caller of `result`; the thread goes on
            self._failure = failure
        self._settle()

    def _cancel(self) -> None:
        self._cancelled = True
        self._settle()

    def _settle(self) -> None:
        self._work = None  # frees the tensors of the step that it refers to
        self._settled = True
        self._running.release()


class _JobQueue:
    """Bounded FIFO queue from the submitting threads to the builder thread."""

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # a put takes a tenth of the time that a Condition takes
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
                self._jobs.put(None)  # after every queued job

    def cancel_pending(self) -> None:
        with suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job._cancel()
        self._jobs.put(None)  # the thread may still be running a job, and will call `take` once more


def _run_jobs(queue: _JobQueue) -> None:
    while (job := queue.take()) is not None:
        job._run()
        del job  # an idle thread must not keep the last step's payload alive


class BuilderThread:
    """A daemon thread that runs jobs one after the other, in the order they were submitted.

    The thread starts with the first job. It ends on `close()`, when this object is garbage collected, or when the
    process exits, which waits at most one second.

    Parameters
    ----------
    name : str
        Name of the thread, as debuggers and profilers show it.
    max_pending : int
        Largest number of waiting jobs; `submit` blocks while it is reached.
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
        """Accept no more work, let queued work finish, and end the thread.

        Jobs that have not started after `timeout` seconds are cancelled; a job that is running then continues on the
        daemon thread, which keeps no process alive. Calling `close` again is harmless.

        Parameters
        ----------
        timeout : float
            Seconds to wait for queued and running work.

        Returns
        -------
        bool
            Whether the thread has ended (or was never started).
        """
        if self._pid != os.getpid():
            return True
        self._queue.close()
        with self._starting:
            thread = self._thread
        # Garbage collection can run a runner's shutdown on the builder thread itself, which cannot join itself.
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
