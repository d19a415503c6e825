"""What is rarely met: packs past the pinned budget, bounded on the device; gaps; a direct store that fails."""

from __future__ import annotations

import pytest
import torch

from spanpack import Batch, ColumnSpec, LeafError, Packer, cuda, make_plan
from spanpack.late import MOST_WAITING
from spanpack.self_test import self_test
from tests.support.compare import assert_same
from tests.support.gpu import DIRECT_STORE, MakePacker, hold_up

BATCH = Batch(["a", "b"], [3, 1])


def test_more_than_the_bound_are_all_kept(make_packer: MakePacker) -> None:
    packer = make_packer(pinned_budget_bytes=0)
    leaf = torch.empty(4, 100_000, dtype=torch.int32, device="cuda")
    snapshots = []
    hold_up(30)
    for step in range(3 * MOST_WAITING):
        leaf.fill_(step)
        snapshots.append(packer.pack({"x": leaf}, BATCH))
        assert packer.stats().device_bytes <= MOST_WAITING * leaf.nbytes
    for step, packed in enumerate(snapshots):
        assert (packed.views()["a"]["x"] == step).all()
    stats = packer.stats()
    assert stats.fallbacks == {"pinned memory": 3 * MOST_WAITING, "late packs": 2 * MOST_WAITING}
    assert stats.device_bytes == 0


@pytest.mark.sanitizer
def test_gaps_between_columns_reach_the_host_as_zeros(packer: Packer) -> None:
    leaves = [torch.full((count,), 7, dtype=torch.uint8, device="cuda") for count in (3, 5)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    snapshot = packer.run(plan, leaves)
    snapshot.wait()
    expected = torch.tensor([7] * 3 + [0] * 13 + [7] * 5 + [0] * 11, dtype=torch.uint8)
    assert_same(torch.frombuffer(snapshot._bytes(), dtype=torch.uint8), expected)


def test_a_leaf_that_was_freed_is_an_error_and_no_wild_read(packer: Packer) -> None:
    leaf = torch.arange(4, device="cuda")
    packer.pack({"x": leaf}, BATCH).wait()
    launches = packer.stats().launches
    freed = leaf.clone()
    freed.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(LeafError, match="leaf 0 is a Tensor whose storage was freed"):
            packer.pack({"x": freed}, BATCH)
    assert packer.stats().launches == launches
    assert packer.pack({"x": leaf}, BATCH).views()["b"]["x"].tolist() == [3]


def test_a_direct_store_that_does_not_work_is_turned_off(
    make_packer: MakePacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_directly(engine: cuda.CudaEngine, config: object, *, direct: bool = False) -> None:
        if direct:
            raise RuntimeError("simulated")
        self_test(engine, config, direct=direct)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda, "self_test", fail_directly)
    packer = make_packer(configs=DIRECT_STORE)
    leaf = torch.arange(4, device="cuda")
    assert packer.pack({"x": leaf}, BATCH).views()["b"]["x"].tolist() == [3]
    stats = packer.stats()
    assert (stats.fallbacks, stats.copies, stats.direct_stores) == ({"direct store failed": 1}, 1, 0)
