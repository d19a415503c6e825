"""The packer on the CPU: devices and backends, counters, closing, threads, and what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import spanpack
from spanpack import (
    Batch,
    ClosedError,
    ColumnSpec,
    DeviceError,
    InputError,
    Packer,
    Placement,
    Stats,
    UnavailableError,
    make_plan,
)
from spanpack.gather import interpreted
from tests.support.compare import assert_same, assert_same_tree
from tests.support.leaves import DTYPES, LeafRecipe, layouts_of, scribble

BATCH = Batch(["a", "b"], [3, 1])
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture
def packer() -> Packer:
    return Packer("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_layout_of_every_dtype_in_one_payload(packer: Packer, dtype: torch.dtype) -> None:
    recipes = {
        f"{layout} {i}": LeafRecipe(dtype, (4, *shape), layout, seed=i)
        for layout in layouts_of(dtype)
        for i, shape in enumerate([(), (5,), (2, 3)])
    }
    payload = {name: recipe.make() for name, recipe in recipes.items()}
    packed = packer.pack(payload, BATCH)
    for leaf in payload.values():
        scribble(leaf)
    whole = {name: recipe.make().detach().resolve_conj().resolve_neg() for name, recipe in recipes.items()}
    views = packed.views()
    assert_same_tree(views["a"], {name: leaf[:3] for name, leaf in whole.items()})
    assert_same_tree(views["b"], {name: leaf[3:] for name, leaf in whole.items()})
    assert not any(leaf.requires_grad or leaf.is_inference() for leaf in views["a"].values())


@pytest.mark.parametrize("shape", [(0,), (0, 7), (0, 2, 3), (4, 0), (4, 0, 2)], ids=str)
def test_leaves_without_elements_keep_rank_shape_and_dtype(packer: Packer, shape: tuple[int, ...]) -> None:
    leaf = torch.empty(shape, dtype=torch.bfloat16)
    packed = packer.pack({"x": leaf, "l": [leaf, leaf]}, BATCH, {"x": Placement.INVARIANT})
    for tree in packed.views().values():
        assert_same(tree["x"], leaf)
        assert_same(tree["l"], leaf)
    assert packed.snapshot.plan.slab_bytes == 0


def test_scalars_anywhere(packer: Packer) -> None:
    payload = {
        "s": torch.tensor(7),
        "each": [torch.tensor(1.5), torch.tensor(2.5)],
        "in": {"a list": [torch.tensor(True)]},
    }
    views = packer.pack(payload, BATCH, {"s": Placement.SHARED, "in.a list": Placement.INVARIANT}).views()
    assert_same_tree(views["b"], {"s": payload["s"], "each": torch.tensor(2.5), "in": payload["in"]})


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_sparse_and_quantized_leaves_come_along_and_are_counted(packer: Packer) -> None:
    sparse = torch.eye(3).to_sparse()
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    payload = {"rows": torch.arange(4), "mask": sparse, "each": [sparse, sparse], "q": quantized}
    packed = packer.pack(payload, BATCH, {"mask": Placement.INVARIANT, "q": Placement.SHARED})
    expected = torch.eye(3).to_sparse()
    sparse._values().zero_()
    views = packed.views()
    for name, rows in (("a", [0, 1, 2]), ("b", [3])):
        assert views[name]["rows"].tolist() == rows
        assert_same(views[name]["mask"], expected)
        assert_same(views[name]["each"], expected)
        assert_same(views[name]["q"], quantized)
    assert views["a"]["mask"] is not views["b"]["mask"]
    assert packer.stats().fallbacks == {"opaque": 1}


def test_payloads_can_be_changed_right_after_the_call(packer: Packer) -> None:
    leaf, ids, tags = torch.arange(4), [1, 2], {"k": ["v"]}
    payload: dict[str, Any] = {"x": leaf, "nested": {"y": [leaf, leaf]}, "ids": ids, "tags": tags}
    packed = packer.pack(payload, BATCH)
    leaf.zero_()
    payload["nested"].clear()
    payload["nested"] = None
    ids.append(3)
    tags["k"].append("w")
    tree = packed.views()["a"]
    assert_same_tree(
        tree, {"x": torch.arange(3), "nested": {"y": torch.arange(4)}, "ids": [1, 2], "tags": {"k": ["v"]}}
    )


def test_consumers_own_their_containers_and_values(packer: Packer) -> None:
    views = packer.pack({"x": torch.arange(4), "ids": [1, 2], "d": {"k": 1}}, BATCH).views()
    views["a"]["ids"].append(3)
    views["a"]["d"]["k"] = 2
    assert_same_tree(views["b"], {"x": torch.tensor([3]), "ids": [1, 2], "d": {"k": 1}})


def test_values_of_each_step_are_its_own_although_the_plan_is_reused(packer: Packer) -> None:
    packs = [packer.pack({"x": torch.arange(4), "step": step}, BATCH) for step in range(3)]
    assert [packed.views()["a"]["step"] for packed in packs] == [0, 1, 2]
    assert packs[0].snapshot.plan is packs[2].snapshot.plan


def test_counters(packer: Packer) -> None:
    assert packer.stats() == Stats()
    for _ in range(3):
        packer.pack({"x": torch.arange(4)}, BATCH)
    assert packer.stats() == Stats(packs=3, payload_bytes=96)


@pytest.mark.skipif(not interpreted(), reason="the kernel is compiled here")
def test_one_launch_per_pack_with_the_interpreted_kernel() -> None:
    packer = Packer("cpu", backend="triton")
    assert packer.backend == "triton"
    payload = {str(i): torch.arange(4 * i).view(4, i).to(dtype) for i, dtype in enumerate(DTYPES[:4], start=1)}
    for _ in range(2):
        packer.pack(payload, BATCH)
    packer.pack({"x": torch.empty(4, 0)}, BATCH)  # nothing to copy, nothing launched
    assert (packer.stats().packs, packer.stats().launches) == (3, 2)


def test_a_batch_of_nobody(packer: Packer) -> None:
    assert packer.pack({"x": torch.empty(0, 3)}, Batch([], [])).views() == {}


def test_closing_twice_is_harmless_and_packing_then_is_refused() -> None:
    leaf = torch.arange(4)
    plan = make_plan([leaf], [ColumnSpec.whole(0, leaf)])
    with Packer("cpu") as packer:
        packed = packer.pack({"x": leaf}, BATCH)
    packer.close()
    assert packed.views()["b"]["x"].tolist() == [3]
    with pytest.raises(ClosedError, match="this packer was closed; make a new one"):
        packer.pack({"x": leaf}, BATCH)
    for call in (lambda: packer.run(plan, [leaf]), lambda: packer.reserve(1), packer.warmup):
        with pytest.raises(ClosedError):
            call()


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(InputError, match="transport 'mapped'; choose 'auto' or 'copy'"):
        Packer("cpu", transport="mapped")  # type: ignore[arg-type]


def test_warming_up_and_reserving_need_no_gpu(packer: Packer) -> None:
    packer.warmup()
    packer.reserve(1 << 20)
    assert packer.stats() == Stats()


def test_several_threads_share_a_packer(packer: Packer) -> None:
    wrong: list[str] = []

    def work(thread: int) -> None:
        for step in range(100):
            rows = 1 + (thread + step) % 4
            leaf = torch.full((rows, 3), 100 * thread + step)
            tree = packer.pack({"x": leaf}, Batch(["r"], [rows])).views()["r"]
            if not torch.equal(tree["x"], leaf):
                wrong.append(f"thread {thread}, step {step}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert packer.stats().packs == 400


def test_a_leaf_on_another_device_is_named(packer: Packer) -> None:
    payload = {"here": torch.zeros(4), "there": {"k": torch.zeros(4, device="meta")}}
    with pytest.raises(DeviceError, match=r"'there\.k' is on meta, this packer serves cpu; a meta tensor has no"):
        packer.pack(payload, BATCH)


def test_a_plan_for_another_device_is_refused(packer: Packer) -> None:
    leaf = torch.zeros(4, device="meta")
    plan = make_plan([leaf], [ColumnSpec.whole(0, leaf)])
    with pytest.raises(DeviceError, match="leaves on 'meta', but this packer serves 'cpu'; a meta tensor has no bytes"):
        packer.run(plan, [leaf])


def test_an_error_leaves_the_packer_usable(packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("spanpack.packer.gather_torch", lambda *_: (_ for _ in ()).throw(RuntimeError("simulated")))
        with pytest.raises(RuntimeError, match="simulated"):
            packer.pack({"x": torch.arange(4)}, BATCH)
    assert packer.pack({"x": torch.arange(4)}, BATCH).views()["b"]["x"].tolist() == [3]


@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0], ids=str)
def test_a_gpu_that_is_not_there(device: Any) -> None:
    with pytest.raises(DeviceError, match="but torch sees no CUDA or ROCm device"):
        Packer(device)


@NO_CUDA
def test_the_default_device_is_the_cpu_where_there_is_no_gpu() -> None:
    assert Packer().device == torch.device("cpu")
    assert Packer().backend == "torch"


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_devices_that_are_not_served(device: str) -> None:
    with pytest.raises(DeviceError, match="packers serve CUDA, ROCm and CPU tensors"):
        Packer(device)


def test_backends_that_can_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="backend 'fast'; choose 'auto', 'triton' or 'torch'"):
        Packer("cpu", backend="fast")  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnavailableError, match="only with TRITON_INTERPRET=1"):
        Packer("cpu", backend="triton")


def test_the_version_is_that_of_the_package() -> None:
    assert spanpack.__version__.split(".")[0].isdigit()
