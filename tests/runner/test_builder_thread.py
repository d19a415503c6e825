"""BuilderThread: order, bounds, failures, shutdown."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from contextlib import suppress

import pytest

from omni_runner.builder_thread import BuilderThread
from omni_runner.errors import BuilderThreadClosed

SOON_S = 5.0  # far above what anything here takes; a wait that reaches it is a failure


@pytest.fixture
def thread():
    thread = BuilderThread("test-builder")
    yield thread
    assert thread.close(SOON_S)


def block(thread: BuilderThread) -> threading.Event:
    """Occupy the thread until the returned event is set."""
    running, go = threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        go.wait(SOON_S)

    thread.submit(work)
    assert running.wait(SOON_S)
    return go


def test_jobs_run_in_order_on_one_thread(thread):
    seen: list[tuple[int, int]] = []
    jobs = [thread.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(200)]
    for job in jobs:
        job.join(SOON_S)
    assert [i for i, _ in seen] == list(range(200))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_result_is_what_the_work_returned(thread):
    value = object()
    job = thread.submit(lambda: value)
    assert job.result(SOON_S) is value
    assert job.result(SOON_S) is value
    assert job.settled and not job.cancelled


@pytest.mark.parametrize("failure", [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_raising_job_keeps_its_exception_and_the_thread_lives(thread, failure):
    def helper_in_the_builder() -> None:
        raise failure

    job = thread.submit(helper_in_the_builder)
    job.join(SOON_S)  # join never raises
    for _ in range(2):
        with pytest.raises(type(failure)) as caught:
            job.result(SOON_S)
        assert caught.value is failure
        assert "helper_in_the_builder" in "".join(traceback.format_exception(caught.value))
    assert thread.submit(lambda: 7).result(SOON_S) == 7


def test_result_times_out(thread):
    go = block(thread)
    job = thread.submit(lambda: 1)
    with pytest.raises(TimeoutError):
        job.result(0.01)
    go.set()
    assert job.result(SOON_S) == 1


def test_submit_waits_while_the_queue_is_full():
    thread = BuilderThread(max_pending=2)
    go = block(thread)
    thread.submit(int)
    thread.submit(int)
    late: list[object] = []
    submitter = threading.Thread(target=lambda: late.append(thread.submit(lambda: "late")))
    submitter.start()
    submitter.join(0.1)
    assert submitter.is_alive() and not late
    go.set()
    submitter.join(SOON_S)
    assert late[0].result(SOON_S) == "late"
    assert thread.close(SOON_S)


def test_close_releases_a_submitter_that_waits():
    thread = BuilderThread(max_pending=1)
    go = block(thread)
    thread.submit(int)
    raised: list[BaseException] = []

    def submit() -> None:
        try:
            thread.submit(int)
        except BuilderThreadClosed as closed:
            raised.append(closed)

    submitter = threading.Thread(target=submit)
    submitter.start()
    time.sleep(0.05)
    assert not thread.close(0.0)
    submitter.join(SOON_S)
    assert len(raised) == 1
    go.set()


def test_close_lets_queued_work_finish(thread):
    done: list[int] = []
    for i in range(20):
        thread.submit(lambda i=i: done.append(i))
    assert thread.close(SOON_S)
    assert done == list(range(20))


def test_close_is_bounded_and_idempotent_with_work_in_flight():
    thread = BuilderThread()
    go = block(thread)
    queued = thread.submit(lambda: "never")
    start = time.monotonic()
    assert thread.close(0.1) is False
    assert thread.close(0.1) is False
    assert time.monotonic() - start < 1.0
    queued.join(SOON_S)
    assert queued.cancelled
    with pytest.raises(BuilderThreadClosed):
        queued.result()
    go.set()
    assert thread.close(SOON_S) is True


def test_submit_after_close_raises():
    for used in (False, True):
        thread = BuilderThread()
        if used:
            thread.submit(int).join(SOON_S)
        assert thread.close(SOON_S)
        with pytest.raises(BuilderThreadClosed, match="closed"):
            thread.submit(int)


def test_closing_from_the_thread_itself_does_not_hang(thread):
    assert thread.submit(lambda: thread.close(SOON_S)).result(SOON_S) is False


def test_the_thread_keeps_nothing_of_a_finished_job(thread):
    import weakref

    class Payload:
        pass

    payload = Payload()
    alive = weakref.ref(payload)
    job = thread.submit(lambda kept=payload: None)
    job.join(SOON_S)
    del payload
    gc.collect()
    assert alive() is None


def test_dropping_the_object_ends_the_thread():
    before = threading.active_count()
    thread = BuilderThread()
    thread.submit(int).join(SOON_S)
    assert threading.active_count() == before + 1
    del thread
    gc.collect()
    deadline = time.monotonic() + SOON_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


def test_a_replaced_thread_class_is_not_ours(thread, monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    assert thread.submit(lambda: 7).result(SOON_S) == 7


def test_ten_thousand_jobs_take_one_thread(thread):
    thread.submit(int).join(SOON_S)
    count = threading.active_count()
    for _ in range(10_000):
        thread.submit(int).join(SOON_S)
        assert threading.active_count() == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_and_never_hangs():
    thread = BuilderThread()
    go = block(thread)
    queued = thread.submit(int)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            queued.join()
            with suppress(BuilderThreadClosed):
                queued.result()
                os._exit(2)
            assert thread.close() is True
            try:
                thread.submit(int)
            except BuilderThreadClosed:
                code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + SOON_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == (child, 0)
    go.set()
    assert thread.close(SOON_S)


@pytest.mark.parametrize("work", ["time.sleep(60)", "threading.Event().wait()", "spin()"])
def test_a_process_exits_within_two_seconds_with_work_in_flight(work):
    program = textwrap.dedent(
        f"""
        import threading, time
        from omni_runner.builder_thread import BuilderThread

        def spin():
            while True:
                pass

        thread = BuilderThread()
        thread.submit(lambda: {work})
        thread.submit(lambda: None)
        print(time.monotonic())
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - float(done.stdout) < 2.0
