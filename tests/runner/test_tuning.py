"""`omni-runner tune --trace`: a trace becomes what packing its steps comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spanpack import gather_torch

pytest.importorskip("safetensors")

from omni_runner.demo.traces import shipped_traces
from omni_runner.errors import TraceError
from omni_runner.trace import load_trace
from omni_runner.tuning import read_workloads

CPU = torch.device("cpu")


@pytest.mark.parametrize("path", shipped_traces(), ids=lambda path: path.name)
def test_every_step_of_a_trace_is_packed_as_it_was(path: Path) -> None:
    workloads = read_workloads(str(path), CPU)
    counts = [int(workload.name.rpartition(" ")[2].removesuffix("x")) for workload in workloads]
    assert counts == sorted(counts, reverse=True)
    assert 0 < sum(counts) <= len(load_trace(path).steps)
    for workload in workloads:
        slab = torch.empty(workload.device_bytes, dtype=torch.uint8)
        gather_torch(workload.plan, workload.make_leaves(CPU), slab)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        read_workloads(str(tmp_path / "absent"), CPU)
