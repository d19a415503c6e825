"""The next stage's side of the connector: a process that takes chunks out of shared memory as they come."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.002


@contextmanager
def consume_chunks() -> Iterator[None]:
    """Run a process that takes the chunks of this process until the `with` block ends."""
    process = subprocess.Popen([sys.executable, __file__, str(os.getpid())], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.communicate()  # closes its standard input, which ends it


def chunk_files(pid: int) -> Iterator[Path]:
    """Files of the chunks, and their lock files, of a process whose request ids `Bench.run` made."""
    return SHARED_MEMORY.glob(f"*p{pid}-*")


def _main(pid: int) -> None:
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        for path in chunk_files(pid):
            try:
                if path.suffix != ".lock":
                    path.read_bytes()
                path.unlink()
            except FileNotFoundError:
                pass
        try:
            if os.read(sys.stdin.fileno(), 1) == b"":
                return
        except BlockingIOError:
            time.sleep(POLL_S)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
