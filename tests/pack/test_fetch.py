"""Single tensors to the host, on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spanpack import ClosedError, DeviceError, Fetcher, LeafError
from spanpack import fetch as fetch_module
from tests.support.compare import assert_same
from tests.support.fake_device import FakeDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(fetch_module, "load_runtime", lambda *_: device)
    return device


SOURCES = [torch.tensor([i]) for i in range(6)]  # alive until their copies are over, as `Fetcher.fetch` asks


def make(**options: Any) -> Fetcher:
    return Fetcher(torch.device("cpu"), **options)


def fetch(fetcher: Fetcher, source: torch.Tensor) -> Any:
    fetched = fetcher.fetch(source)
    assert fetched is not None
    return fetched


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor([[7], [8], [9]], dtype=torch.int32),
        torch.arange(100_000, dtype=torch.int64).reshape(10, -1),
        torch.tensor(float("nan"), dtype=torch.bfloat16),
    ],
    ids=["tokens", "large", "scalar"],
)
def test_it_comes_as_it_was_behind_the_producing_stream(device: FakeDevice, source: torch.Tensor) -> None:
    expected, live = source.clone(), torch.zeros_like(source)
    device.enqueue(lambda: live.copy_(source))  # the producer has not run when the copy is asked for
    fetched = fetch(make(), live)
    assert not fetched.landed.query()
    fetched.landed.synchronize()
    assert_same(fetched.tensor, expected)
    assert device.copies == 1
    assert device.host_waits == 1  # the one asked for here


def test_memory_is_used_again_once_the_tensor_has_died_and_not_before(device: FakeDevice) -> None:
    fetcher = make()
    first = fetch(fetcher, SOURCES[1])
    second = fetch(fetcher, SOURCES[2])
    device.run()
    addresses = {first.tensor.data_ptr(), second.tensor.data_ptr()}
    assert (first.tensor.item(), second.tensor.item()) == (1, 2)
    del first
    third = fetch(fetcher, SOURCES[3])
    assert third.tensor.data_ptr() in addresses - {second.tensor.data_ptr()}
    device.run()
    assert (second.tensor.item(), third.tensor.item()) == (2, 3)
    assert fetcher.pinned_bytes == 2 << 16


def test_memory_dropped_before_it_has_landed_is_not_written_by_two(device: FakeDevice) -> None:
    fetcher = make()
    fetch(fetcher, SOURCES[1])  # dropped at once
    late = fetch(fetcher, SOURCES[2])
    device.run()
    assert late.tensor.item() == 2
    assert fetcher.pinned_bytes == 2 << 16


def test_without_a_free_slab_it_says_so(device: FakeDevice) -> None:
    fetcher = make(slabs=2)
    kept = [fetch(fetcher, SOURCES[i]) for i in range(2)]
    assert fetcher.fetch(SOURCES[2]) is None
    device.run()
    assert [item.tensor.item() for item in kept] == [0, 1]


@pytest.mark.parametrize(
    "source",
    [torch.zeros(4, 4).t()[1:], torch.zeros(0), torch.zeros(3, device="meta")],
    ids=["strided", "empty", "elsewhere"],
)
def test_what_it_can_not_copy_is_refused(device: FakeDevice, source: torch.Tensor) -> None:
    with pytest.raises(LeafError, match="expected a contiguous tensor"):
        make().fetch(source)
    assert device.copies == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize.*", "ignore:.*nested tensors.*")
@pytest.mark.parametrize(
    ("make_source", "given"),
    [
        (lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(), r"complex64\[2\].*lazily conjugated or negated"),
        (lambda: torch._neg_view(torch.tensor([1.0, 2.0])), r"float32\[2\].*lazily conjugated or negated"),
        (lambda: torch.eye(3).to_sparse(), r"float32\[3, 3\] on cpu"),
        (lambda: torch.eye(3).to_sparse_csr(), r"float32\[3, 3\] on cpu"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), r"quint8\[3\]"),
        (lambda: torch._efficientzerotensor(3), r"float32\[3\]"),
        (lambda: [1], "a list"),
        (lambda: None, "a NoneType"),
    ],
    ids=["conjugated", "negated", "sparse", "sparse rows", "quantized", "zeros without memory", "list", "none"],
)
def test_what_is_more_or_less_than_its_memory_is_refused(device: FakeDevice, make_source: Any, given: str) -> None:
    fetcher = make()
    with pytest.raises(LeafError, match=f"given {given}.*neither sparse nor quantized, and with conjugation"):
        fetcher.fetch(make_source())
    assert device.copies == 0
    assert fetcher.pinned_bytes == 0


def test_a_freed_tensor_is_refused(device: FakeDevice) -> None:
    freed = torch.arange(6)[3:]
    freed.untyped_storage().resize_(0)
    with pytest.raises(LeafError, match=r"given int64\[3\].*, which is a Tensor whose storage was freed or shrunk"):
        make().fetch(freed)
    assert device.copies == 0


def test_the_copy_is_queued_with_the_device_of_the_fetcher_current(device: FakeDevice) -> None:
    """The simulated device takes no work while another one is current."""
    device.current = 1
    fetched = fetch(make(), SOURCES[3])
    assert device.current == 1
    fetched.landed.synchronize()
    assert fetched.tensor.item() == 3
    assert device.copies == 1


def test_a_failing_copy_leaves_it_usable(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = make(slabs=1)

    def fail(*_: Any) -> None:
        raise RuntimeError("simulated")

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy_to_host", fail)
        with pytest.raises(RuntimeError, match="simulated"):
            fetcher.fetch(SOURCES[1])
    device.run()
    fetched = fetch(fetcher, SOURCES[2])
    fetched.landed.synchronize()
    assert fetched.tensor.item() == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cpu", "device 'cpu' has no streams to copy on; give a CUDA or ROCm device"),
        (torch.device("cpu"), "device 'cpu' has no streams"),
        ("meta", "device 'meta'"),
        ("nonsense", "device 'nonsense' is none that torch knows"),
        ("cuda:99", "device 'cuda:99', but torch sees"),
        (torch.device("cuda", 99), "device 'cuda:99', but torch sees"),
    ],
    ids=str,
)
def test_a_device_that_it_can_not_serve_is_named(given: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        Fetcher(given)


def test_closing_waits_for_what_is_in_flight(device: FakeDevice) -> None:
    fetcher = make()
    fetched = fetch(fetcher, SOURCES[5])
    fetcher.close()
    fetcher.close()
    assert fetched.tensor.item() == 5
    assert device.host_waits == 1


def test_a_closed_one_pins_no_more_memory(device: FakeDevice) -> None:
    fetcher = make()
    fetcher.close()
    with pytest.raises(ClosedError, match="this fetcher was closed; make a new one"):
        fetcher.fetch(SOURCES[1])
    assert (fetcher.pinned_bytes, device.copies) == (0, 0)
