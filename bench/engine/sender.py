"""The connector's sender: its thread converts each payload into the next stage's input and writes it as a chunk."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from multiprocessing import resource_tracker
from typing import Any

from bench.engine.consumer import chunk_files
from bench.engine.digests import Trail, request_index, signature
from bench.engine.probes import Probes


class Sender:
    """Switches the sender of a live scheduler and watches it.

    off
        As for a stage without a successor: the thread runs, but turns no payload into a chunk.
    on
        The thread runs the stage's own conversion and writes as many shared-memory chunks as it can; nothing reads them
        unless `consume_chunks` runs.
    stuck
        The first chunk is never finished, so every payload stays in the queue, as if a consumer lagged without limit.
    """

    def __init__(self, scheduler: Any, conversion: Any, probes: Probes) -> None:
        adapter = scheduler.chunk_transfer_adapter
        if adapter is None:
            raise RuntimeError("the scheduler has no chunk transfer adapter: the stage is not configured as a sender")
        self.chunks = 0  # delivered since the last `reset`
        self.trail: Trail | None = None  # collects the chunks while set
        self._adapter = adapter
        self._conversion = conversion
        self._put = adapter.connector.put
        self._send = probes.timed("send", adapter._send_single_request)
        self._released = threading.Event()
        self._released.set()
        self._dropping = False
        self._working_on: Any = None
        adapter.connector.put = self._watched_put
        adapter._send_single_request = self._watched_send

    @property
    def backlog(self) -> int:
        """Payloads waiting to be sent."""
        return len(self._adapter._pending_save_reqs)

    def switch(self, on: bool) -> None:
        self._adapter.custom_process_next_stage_input_func = self._conversion if on else None

    def hold(self) -> None:
        """Make the thread get stuck at the next payload."""
        self._released.clear()

    def held(self) -> list[Any]:
        """The tasks of a stuck sender, oldest first."""
        in_hand = self._working_on
        return ([] if in_hand is None else [in_hand]) + list(self._adapter._pending_save_reqs)

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything is sent; False if that takes too long."""
        deadline = time.monotonic() + timeout_s
        while self.backlog or self._working_on is not None:
            if not self._adapter.save_thread.is_alive():
                raise RuntimeError("the sender thread has ended")
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def reset(self) -> None:
        """Drop the backlog and remove the chunks, so that the next pass starts with an empty queue."""
        self._dropping = True  # the thread empties its queue itself: it does not expect other threads to
        self._released.set()
        self.settle(5.0)
        self._dropping = False
        self.chunks = 0
        connector = self._adapter.connector
        # 0.30 keeps polling the chunks it has written, even when idle; 0.26 only remembers them, and has no lock.
        with getattr(connector, "_pending_keys_lock", nullcontext()):
            connector._pending_keys.clear()
        for path in chunk_files(os.getpid()):
            path.unlink(missing_ok=True)
            if path.suffix != ".lock":
                resource_tracker.unregister(f"/{path.name}", "shared_memory")

    def _watched_send(self, task: Any) -> None:
        self._working_on = task
        try:
            self._released.wait()
            if not self._dropping:
                self._send(task)
        finally:
            self._working_on = None

    def _watched_put(self, *args: Any, **kwargs: Any) -> Any:
        if self.trail is not None:
            key, data = kwargs["put_key"], kwargs["data"]
            request_id = key.rsplit("_", 2)[0]  # <request>_<stage>_<chunk>
            # Token ids depend on the moment at which the thread handles the payload, so they are not compared.
            entry = tuple(line for line in signature(data, request_id) if not line.startswith("ids."))
            self.trail.chunks[request_index(request_id)].append(entry)
        result = self._put(*args, **kwargs)
        self.chunks += bool(result[0])
        return result
