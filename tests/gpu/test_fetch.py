"""Single tensors to the host on the GPU."""

from __future__ import annotations

import pytest
import torch

from spanpack import Batch, ColumnSpec, Fetcher, make_plan
from spanpack import fetch as fetch_module
from spanpack._runtime import TorchRuntime, load_runtime
from tests.support.compare import assert_same
from tests.support.gpu import MakePacker, copy_stream, hold_up


@pytest.fixture(params=[load_runtime, TorchRuntime], ids=["native", "torch"])
def fetcher(request: pytest.FixtureRequest, cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Fetcher:
    monkeypatch.setattr(fetch_module, "load_runtime", request.param)
    return Fetcher(cuda_device)


@pytest.mark.sanitizer
def test_tokens_of_a_slow_producer_arrive_as_the_engine_would_copy_them(fetcher: Fetcher) -> None:
    kept = []
    for step in range(6):
        hold_up(2)
        tokens = torch.randint(1 << 20, (64, 1), device="cuda", dtype=torch.int32) + step
        fetched = fetcher.fetch(tokens)
        assert fetched is not None
        kept.append((tokens, fetched))
    for tokens, fetched in kept:
        fetched.landed.synchronize()
        assert_same(fetched.tensor, tokens.cpu())
    fetcher.close()


def test_tokens_do_not_wait_behind_a_payload(fetcher: Fetcher, make_packer: MakePacker) -> None:
    packer = make_packer()
    hidden, tokens = torch.ones(64, 16, device="cuda"), torch.arange(64, device="cuda")
    torch.cuda.synchronize()
    hold_up(100, copy_stream(packer))
    payload = packer.pack({"hidden": hidden}, Batch(["a", "b"], [32, 32]))
    fetched = fetcher.fetch(tokens)
    assert fetched is not None
    fetched.landed.synchronize()
    assert not payload.done()
    assert_same(fetched.tensor, tokens.cpu())
    fetcher.close()


def test_nothing_is_allocated_once_the_slabs_are_there(fetcher: Fetcher) -> None:
    tokens = torch.arange(64, device="cuda")
    last = None
    for step in range(50):
        fetched = fetcher.fetch(tokens)
        assert fetched is not None
        fetched.landed.synchronize()
        if step == 5:
            before = torch.cuda.host_memory_stats()["num_host_alloc"]
        last = fetched  # as an engine keeps the last step's
    assert last is not None
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert fetcher.pinned_bytes <= 3 << 16
    fetcher.close()


def test_tokens_in_the_pack_of_a_slow_producer(make_packer: MakePacker) -> None:
    packer = make_packer()
    kept = []
    for step in range(6):
        hold_up(2)
        tokens = torch.randint(1 << 20, (64, 1), device="cuda", dtype=torch.int32) + step
        hidden = torch.randn(64, 512, device="cuda")
        leaves = [hidden, tokens]
        plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
        kept.append((tokens.clone(), packer.run(plan, leaves)))
        tokens.zero_()
    for tokens, snapshot in kept:
        found = snapshot.column(1)
        snapshot.release()
        assert_same(found, tokens.cpu())
