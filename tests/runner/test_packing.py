"""Packing one step and building its payloads, without an engine: its rules are told here in the shortest form."""

from __future__ import annotations

import gc
import logging
import pickle
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spanpack
from omni_runner import lowering, packing
from omni_runner.builder import ChannelBuilder, ChannelRules
from omni_runner.packing import PackedStep, StepPacker
from omni_runner.reference import SPARSE_PROTOCOL_KEYS, as_tensor, flatten_payload
from omni_runner.step import NotCovered, StepContext, make_step
from omni_runner.untrack import DICTS_COME_BACK
from spanpack import flatten
from tests.support.steps import step_of

WIDTH = 4
ONE_LIST = ChannelRules(partitions=False)
PARTITIONED = ChannelRules(partitions=True)
Pair = namedtuple("Pair", "left right")


def wire_tensors(payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in payload.items():
        tensor = value if isinstance(value, torch.Tensor) else as_tensor(value)
        if tensor is None:
            logging.getLogger("engine").warning("dropping %s", key)
        else:
            found[key] = tensor
    return found


def partition(payload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    client = {key: value for key, value in payload.items() if key in ("audio", "meta.segment_end")}
    return {key: value for key, value in payload.items() if key != "audio"}, client


UPSTREAM: Any = SimpleNamespace(
    flatten_payload=flatten_payload,
    partition_flat_payload=partition,
    ensure_tensor_values=wire_tensors,
    sparse_protocol_keys=SPARSE_PROTOCOL_KEYS,
)


@pytest.fixture
def packer() -> StepPacker:
    return StepPacker(spanpack.Packer("cpu"), UPSTREAM)


def numbered(rows: int, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(rows * width).reshape(rows, width).to(dtype)


def build(
    packer: StepPacker,
    step: StepContext,
    payload: Any,
    hidden: torch.Tensor | None = None,
    rules: ChannelRules = ONE_LIST,
) -> tuple[Any, Any]:
    packed = packer.pack(step, hidden_states=hidden, multimodal_outputs=payload)
    channels = ChannelBuilder(UPSTREAM, rules).build(packed)
    packed.release()
    return channels


def test_hidden_rows_and_tokens_that_look_alike_are_told_apart(packer: StepPacker) -> None:
    step, payload, rows = step_of([1, 1]), {"x": numbered(2)}, numbered(2)
    with_hidden = packer.pack(step, hidden_states=rows, multimodal_outputs=payload)
    with_tokens = packer.pack(step, hidden_states=None, multimodal_outputs=payload, tokens=rows)
    for packed, keys, tokens in ((with_hidden, ["hidden", "x"], False), (with_tokens, ["x"], True)):
        assert packed.lowering is not None
        assert [recipe.key for recipe in packed.lowering.recipes] == keys
        assert (packed.lowering.tokens is not None) == tokens
        channel, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
        assert [list(payload) for payload in channel or ()] == [keys, keys]


def has_tokens(packer: StepPacker, payload: dict[str, Any], rows: int = 2) -> bool:
    step, tokens = step_of([1] * rows), torch.zeros(rows, 1)
    packed = packer.pack(step, hidden_states=None, multimodal_outputs=payload, tokens=tokens)
    assert packed.lowering is not None
    found = packed.lowering.tokens is not None
    if packed.snapshot is not None:
        assert len(packed.snapshot.plan.use.routes) == len(flatten(payload)[0]) + found  # no leaf that is not used
    return found


def test_an_odd_step_without_tokens_keeps_them_out_of_no_other(packer: StepPacker) -> None:
    payload, many = {"x": numbered(2)}, {f"x{i}": numbered(2) for i in range(8)}
    found = [has_tokens(packer, each) for each in (payload, {}, {"t": "text"}, payload, many, many, payload)]
    assert found == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("taken_between", [0, 1])
def test_after_many_refusals_tokens_are_left_out_for_a_while(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch, taken_between: int
) -> None:
    monkeypatch.setattr(packing, "_REST_STEPS", 5)
    payload, many = {"x": numbered(2)}, {f"x{i}": numbered(2) for i in range(8)}
    for number in range(packing._REFUSALS * (1 + taken_between) - taken_between):
        assert not has_tokens(packer, many)
        if taken_between and number < packing._REFUSALS * 2 - 2:
            assert has_tokens(packer, payload)
    assert [has_tokens(packer, payload) for _ in range(7)] == [False] * 5 + [True] * 2


def test_a_refusal_now_and_then_costs_nobody_its_tokens(packer: StepPacker) -> None:
    payload, many = {"x": numbered(2)}, {f"x{i}": numbered(2) for i in range(8)}
    for _ in range(4 * packing._REFUSALS):
        assert not has_tokens(packer, many)
        assert has_tokens(packer, payload)
        assert has_tokens(packer, payload)


def test_awaited_tokens_that_are_refused_keep_no_others_out(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "WITH_AWAITED_TOKENS_BYTES", 0)
    payload, step, tokens = {"x": numbered(2)}, step_of([1, 1]), torch.zeros(2, 1)
    for awaited in [True] * packing._REFUSALS + [False]:
        packed = packer.pack(
            step, hidden_states=None, multimodal_outputs=payload, tokens=tokens, tokens_awaited=awaited
        )
        assert packed.has_tokens is not awaited


def test_prefills_that_are_too_large_for_tokens_are_lowered_once(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "WITH_TOKENS_BYTES", 9 * WIDTH * 2)
    lowered = []
    lower = packer._lowerer.lower
    monkeypatch.setattr(packer._lowerer, "lower", lambda *given, **more: lowered.append(more) or lower(*given, **more))
    tokens = torch.zeros(2, 1)
    for rows, attempts in (([1, 8], 1), ([1, 9], 1), ([1, 1], 1)):
        lowered.clear()
        hidden = numbered(sum(rows))
        packed = packer.pack(step_of(rows), hidden_states=hidden, multimodal_outputs=None, tokens=tokens)
        assert len(lowered) == attempts
        assert packed.has_tokens == (sum(rows) <= 9)


def column(channel: Any, key: str) -> list[Any]:
    return [None if payload is None else payload[key].tolist() for payload in channel]


def test_rows_go_to_their_requests(packer: StepPacker) -> None:
    hidden = numbered(6)
    inter, client = build(packer, step_of([3, 0, 1, 2]), {"codes": {"audio": numbered(6, 2, torch.int64)}}, hidden)
    assert inter is client
    assert [list(payload) for payload in inter] == [["hidden", "codes.audio"]] * 4
    spans = [(0, 3), (3, 3), (3, 4), (4, 6)]
    for payload, (start, end) in zip(inter, spans, strict=True):
        assert torch.equal(payload["hidden"], hidden[start:end])
        assert payload["codes.audio"].shape == (end - start, 2)


def test_rows_of_others_and_padding_are_not_packed(packer: StepPacker) -> None:
    hidden = torch.full((8, WIDTH), float("nan"), dtype=torch.bfloat16)
    hidden[3:5] = 7
    packed = packer.pack(step_of([3, 2, 1], consumers=[1]), hidden_states=hidden, multimodal_outputs=None)
    assert packed.lowering is not None and packed.lowering.plan is not None
    assert packed.lowering.plan.payload_bytes == 2 * WIDTH * 2
    inter, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
    assert inter[0] is inter[2] is None
    assert inter[1]["hidden"].tolist() == [[7.0] * WIDTH] * 2


@pytest.mark.parametrize(
    ("rows", "per_token"),
    [(4, True), (6, True), (5, False), (2, False)],
    ids=["scheduled", "hidden", "neither", "requests"],
)
def test_a_leaf_is_per_token_by_either_count(packer: StepPacker, rows: int, per_token: bool) -> None:
    leaf = numbered(rows)
    inter, _ = build(packer, step_of([1, 3]), {"x": leaf}, hidden=numbered(6))
    expected = [leaf[0:1], leaf[1:4]] if per_token else [leaf, leaf]
    assert all(torch.equal(payload["x"], want) for payload, want in zip(inter, expected, strict=True))


def test_without_hidden_rows_only_scheduled_tokens_decide(packer: StepPacker) -> None:
    inter, _ = build(packer, step_of([1, 1], scheduled=3), {"x": numbered(2)})
    assert column(inter, "x") == [numbered(2).tolist()] * 2


def test_spans_end_where_the_rows_end(packer: StepPacker) -> None:
    inter, _ = build(packer, step_of([2, 3], scheduled=3), {"x": numbered(3, 1)}, hidden=numbered(5, 1))
    assert column(inter, "x") == [[[0], [1]], [[2]]]
    assert column(inter, "hidden") == [[[0], [1]], [[2]]]  # everyone consumes: the engine cuts at the scheduled tokens
    inter, _ = build(packer, step_of([2, 3], consumers=[1], scheduled=3), {}, hidden=numbered(5, 1))
    assert column(inter, "hidden") == [None, [[2], [3], [4]]]  # and here it does not


def test_lists_give_each_request_its_element_or_the_first(packer: StepPacker) -> None:
    full = [torch.full((i, 2), i) for i in range(3)]
    payload = {
        "full": full,
        "short": full[1:],
        "one": [torch.tensor(24000)],
        "kinds": [torch.ones(1), torch.ones(2, 2), 5],
    }
    inter, _ = build(packer, step_of([1, 1, 1]), payload)
    assert column(inter, "full") == [tensor.tolist() for tensor in full]
    assert column(inter, "short") == [full[i].tolist() for i in (1, 2, 1)]
    assert column(inter, "one") == [24000] * 3
    assert column(inter, "kinds") == [[1.0], [[1.0, 1.0]] * 2, 5]


def test_values_become_tensors_or_are_dropped_with_the_engines_warning(
    packer: StepPacker, caplog: pytest.LogCaptureFixture
) -> None:
    payload = {
        "number": 3,
        "flags": [True, False],
        "mixed": [1, 2.5],
        "ragged": [[1, 2], [3]],
        "pair": (1.5, 2.5),
        "text": "no",
        "some": ["no", 4],
        "nothing": None,
    }
    inter, _ = build(packer, step_of([1, 1]), payload)
    assert [list(entry) for entry in inter] == [
        ["number", "flags", "mixed", "ragged", "pair"],
        ["number", "flags", "mixed", "ragged", "pair", "some"],
    ]
    assert column(inter, "ragged") == [[1, 2], [3]]
    dtypes = {key: [entry[key].dtype for entry in inter] for key in ("number", "flags", "mixed", "pair")}
    assert dtypes["number"] == [torch.int64] * 2
    assert dtypes["flags"] == [torch.bool] * 2
    assert dtypes["mixed"] == [torch.int64, torch.float32]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "dropping some",
        "dropping text",
        "dropping text",
    ]


def test_a_payload_of_dropped_values_is_empty_and_one_without_keys_is_none(packer: StepPacker) -> None:
    assert build(packer, step_of([1, 1]), {"text": "no"})[0] == [{}, {}]
    assert build(packer, step_of([1, 1]), {"nothing": None}) == (None, None)
    assert build(packer, step_of([1, 1]), {}) == (None, None)


def test_values_of_a_step_are_its_own_though_its_plan_is_not(packer: StepPacker) -> None:
    step = step_of([1, 1])
    payloads = [{"x": numbered(2), "count": i, "kind": [i, "text"][i % 2]} for i in range(4)]
    packed = [packer.pack(step, hidden_states=None, multimodal_outputs=payload) for payload in payloads]
    assert len({id(one.lowering) for one in packed}) == 1
    channels = [ChannelBuilder(UPSTREAM, ONE_LIST).build(one)[0] for one in packed]
    assert [column(channel, "count") for channel in channels] == [[i, i] for i in range(4)]
    assert ["kind" in channel[0] for channel in channels] == [True, False, True, False]


def test_later_changes_by_the_caller_do_not_show(packer: StepPacker) -> None:
    starts, leaf, items = np.array([0, 1, 2]), numbered(2), [1, 2]
    payload = {"x": leaf, "items": items}
    step = make_step(
        request_ids=["a", "b"],
        num_scheduled_tokens=[1, 1],
        query_start_loc=starts,
        scheduled_tokens=2,
        consumer_ids=["a", "b"],
    )
    packed = packer.pack(step, hidden_states=None, multimodal_outputs=payload)
    starts[:] = 0
    leaf.zero_()
    items.clear()
    payload.clear()
    inter, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
    assert column(inter, "x") == [[row] for row in numbered(2).tolist()]
    assert column(inter, "items") == [1, 2]


def test_every_payload_may_be_changed_in_place(packer: StepPacker) -> None:
    """Packed in inference mode, as in the engine, and built outside of it."""
    one = torch.zeros(1, 1, WIDTH)
    payload = {"one": [one], "same": torch.zeros(5), "each": [torch.zeros(2)] * 2, "count": 0, "pair": [0, 0]}
    with torch.inference_mode():
        packed = packer.pack(step_of([1, 1]), hidden_states=torch.zeros(2, WIDTH), multimodal_outputs=payload)
    inter, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
    for tensor in inter[0].values():
        tensor.add_(1)
    assert not any(bool(tensor.any()) for tensor in inter[1].values())
    assert not one.any()


def test_channels_are_partitioned_by_the_engines_rule(packer: StepPacker) -> None:
    payload = {"x": numbered(2), "audio": [torch.ones(3)], "meta": {"segment_end": True}}
    inter, client = build(packer, step_of([1, 1]), payload, rules=PARTITIONED)
    assert [list(entry) for entry in inter] == [["x", "meta.segment_end"]] * 2
    assert [list(entry) for entry in client] == [["audio", "meta.segment_end"]] * 2
    assert inter[0]["meta.segment_end"] is not client[0]["meta.segment_end"]  # the engine wraps values per channel
    assert build(packer, step_of([1, 1]), {"x": numbered(2)}, rules=PARTITIONED)[1] is None


def test_client_keys_take_precedence(packer: StepPacker) -> None:
    rules = ChannelRules(partitions=False, client_keys=("x",), is_text=True)
    inter, client = build(packer, step_of([1, 1]), {"x": numbered(2), "y": numbered(2)}, rules=rules)
    assert [list(entry) for entry in inter] == [["x", "y"]] * 2
    assert [list(entry) for entry in client] == [["x"]] * 2
    assert inter[0]["x"] is client[0]["x"]


def test_older_engines_make_two_lists_of_the_same(packer: StepPacker) -> None:
    rules = ChannelRules(partitions=False, shares_channel=False)
    inter, client = build(packer, step_of([1, 1]), {"x": numbered(2), "n": 1}, rules=rules)
    assert inter is not client
    assert inter[0]["x"] is client[0]["x"]
    assert inter[0]["n"] is not client[0]["n"]


def test_text_stages_fill_no_channel() -> None:
    spans = spanpack.Packer("cpu")
    packer = StepPacker(spans, UPSTREAM, fills_channels=False)
    assert build(packer, step_of([1]), {"x": numbered(1)}, rules=ChannelRules(False, is_text=True)) == (None, None)
    assert spans.stats().packs == 0


def test_a_step_without_consumers_packs_nothing() -> None:
    spans = spanpack.Packer("cpu")
    packer = StepPacker(spans, UPSTREAM)
    assert build(packer, step_of([1, 1], consumers=[]), {"x": numbered(2)}, numbered(2)) == (None, None)
    assert spans.stats().packs == 0


def test_sparse_lists_follow_the_declared_requests(packer: StepPacker) -> None:
    payload = {"audio": [torch.ones(5), torch.ones(7)], "n": [1, 2], "x": numbered(3), "meta": {"req_id": ["r2", "r0"]}}
    inter, _ = build(packer, step_of([1, 1, 1], sparse=[2, 0]), payload, hidden=numbered(3))
    assert inter[1] is None
    assert [list(entry) for entry in (inter[0], inter[2])] == [["audio", "n", "x"]] * 2
    assert [inter[i]["audio"].shape[0] for i in (0, 2)] == [7, 5]
    assert [inter[i]["n"].item() for i in (0, 2)] == [2, 1]
    assert [inter[i]["x"].tolist() for i in (0, 2)] == [numbered(3)[i : i + 1].tolist() for i in (0, 2)]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"x": torch.tensor(1)}, "0-dimensional"),
        ({"x": []}, "empty list"),
        ({"x": {"y": torch.ones(2)}}, "a dict"),
        ({"x": [{"y": torch.ones(2)}]}, "list of dict"),
        ({"x": (torch.ones(2),)}, "a tuple"),
        ({"x": [[torch.ones(2)]]}, "list of list"),
        ({"x": Pair(1, torch.ones(2))}, "container of type Pair"),
        ({"x": torch.ones(2, 2).to_sparse()}, "layout torch.sparse_coo"),
        ({"hidden": torch.ones(2)}, "a key 'hidden' of its own"),
        (torch.ones(2), "the payload is a Tensor"),
    ],
)
def test_uncovered_payloads_are_refused_with_a_reason(packer: StepPacker, payload: Any, reason: str) -> None:
    for _ in range(2):  # planned, then remembered
        with pytest.raises(NotCovered, match=reason):
            packer.pack(step_of([1, 1]), hidden_states=numbered(2), multimodal_outputs=payload)


@pytest.mark.parametrize("items", [[torch.ones(1)], [1], [[1], [2]][:1]], ids=["tensors", "numbers", "lists"])
def test_sparse_lists_that_are_too_short_are_refused(packer: StepPacker, items: list[Any]) -> None:
    with pytest.raises(NotCovered, match="out of step"):
        packer.pack(step_of([1, 1], sparse=[0, 1]), hidden_states=None, multimodal_outputs={"x": items})


def test_whole_trees_come_back_as_they_were(packer: StepPacker) -> None:
    shared = torch.arange(3)
    tree = {
        "hidden_states": numbered(3),
        "staged": None,
        "outputs": {"a": [shared, torch.tensor(2.5), torch.empty(0, 4)], "b": ("text", shared), "c": [1, 2], "d": {}},
    }
    packed = packer.pack_whole(tree)
    copy = packed.payload()
    packed.release()
    assert torch.equal(copy["hidden_states"], tree["hidden_states"])
    assert [(tensor.shape, tensor.dtype) for tensor in copy["outputs"]["a"]] == [
        (tensor.shape, tensor.dtype) for tensor in tree["outputs"]["a"]
    ]
    assert copy["outputs"]["a"][1].item() == 2.5
    assert copy["outputs"]["b"][0] == "text" and torch.equal(copy["outputs"]["b"][1], shared)
    assert copy["outputs"]["c"] == [1, 2] and copy["outputs"]["c"] is not tree["outputs"]["c"]
    assert copy["outputs"]["d"] == {} and copy["staged"] is None
    assert packer.pack_whole({"only": ["values"]}).payload() == {"only": ["values"]}


def test_whole_trees_with_other_containers_are_refused(packer: StepPacker) -> None:
    with pytest.raises(NotCovered, match="Pair"):
        packer.pack_whole({"x": Pair(1, torch.ones(2))})


def test_keys_whose_tensors_are_alike_share_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a size; what they hand out does not depend on it."""
    payload = payload_of_all_kinds(3)
    channels, columns = [], []
    for limit in (1 << 20, 3 * WIDTH * 2, 0):
        monkeypatch.setattr(lowering, "SHARED_COLUMN_BYTES", limit)
        fresh = StepPacker(spanpack.Packer("cpu"), UPSTREAM)
        packed = fresh.pack(step_of([1, 1, 1]), hidden_states=numbered(3), multimodal_outputs=payload)
        assert packed.snapshot is not None
        columns.append(len(packed.snapshot.plan.columns))
        channels.append(ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)[0])
    keys_with_tensors = 8
    assert columns == [6, keys_with_tensors, keys_with_tensors]
    for other in channels[1:]:
        for wanted, got in zip(channels[0], other, strict=True):
            assert list(wanted) == list(got)
            assert all(torch.equal(wanted[key], got[key]) for key in wanted)


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def payload_of_all_kinds(count: int) -> dict[str, Any]:
    return {
        "codes": {"audio": [torch.zeros(1, 16, dtype=torch.int64) for _ in range(count)]},
        "hidden_states": {"layers": {0: numbered(count), 24: numbered(count)}},
        "embed": {"tts_bos": [torch.zeros(1, 1, WIDTH)], "invariant": torch.zeros(3)},
        "meta": {"streaming": torch.ones(count, dtype=torch.int8), "zero_dim": [torch.tensor(i) for i in range(count)]},
        "number": 24000,
        "numbers": list(range(count)),
        "lists": [[1.0] * (1 + i % 3) for i in range(count)],
    }


@pytest.mark.parametrize("rules", [ONE_LIST, PARTITIONED], ids=["one list", "partitioned"])
def test_torch_calls_do_not_depend_on_the_number_of_requests(packer: StepPacker, rules: ChannelRules) -> None:
    calls = []
    for count in (2, 64):
        packed = packer.pack(
            step_of([1] * count), hidden_states=numbered(count), multimodal_outputs=payload_of_all_kinds(count)
        )
        builder = ChannelBuilder(UPSTREAM, rules)
        with CountCalls() as counter:
            inter, _ = builder.build(packed)
        assert counter.calls <= 2 * len(inter[0])
        calls.append(counter.calls)
    assert calls[0] == calls[1]


def test_a_packed_step_outlives_its_release(packer: StepPacker) -> None:
    packed: PackedStep = packer.pack(step_of([1, 1]), hidden_states=numbered(2), multimodal_outputs=None)
    inter, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
    packed.release()
    assert torch.equal(inter[1]["hidden"], numbered(2)[1:])


@pytest.mark.parametrize(
    ("piles_up", "rules", "tracked"),
    [
        (True, ONE_LIST, False),
        (False, ONE_LIST, True),
        (True, ChannelRules(partitions=False, untracks=False), True),
    ],
    ids=["piling up", "taken as they come", "switched off"],
)
def test_payloads_that_pile_up_are_none_of_the_garbage_collectors_business(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch, piles_up: bool, rules: ChannelRules, tracked: bool
) -> None:
    monkeypatch.setattr(spanpack.Snapshot, "copies_out", piles_up)
    payload = {"codes": [numbered(1), numbered(2)], "n": 3, "mixed": [numbered(1), 5]}
    packed = packer.pack(step_of([2, 1]), hidden_states=numbered(3), multimodal_outputs=payload)
    inter, _ = ChannelBuilder(UPSTREAM, rules).build(packed)
    assert inter is not None
    tensors = [tensor for one in inter if one is not None for tensor in one.values()]
    assert len(tensors) == 8
    assert {gc.is_tracked(tensor) for tensor in tensors} == {tracked}
    assert {gc.is_tracked(one) for one in inter} == {tracked or not DICTS_COME_BACK}


@pytest.mark.parametrize("hidden_rows", [6, 600])
def test_a_payload_that_crosses_processes_costs_its_own_bytes(packer: StepPacker, hidden_rows: int) -> None:
    width, rows = 512, hidden_rows // 6
    payload = {
        "layer": numbered(hidden_rows, width),
        "bos": [torch.zeros(1, 1, width)],
        "codes": [numbered(2) for _ in range(6)],
        "n": [1, 2, 3, 4, 5, 6],
    }
    step = step_of([rows] * 6)
    packed = packer.pack(step, hidden_states=numbered(hidden_rows, width), multimodal_outputs=payload)
    inter, _ = ChannelBuilder(UPSTREAM, ChannelRules(partitions=False, crosses_processes=True)).build(packed)
    usual, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
    assert inter is not None and usual is not None
    for one, same in zip(inter, usual, strict=True):
        assert one is not None and same is not None
        assert one.keys() == same.keys()
        assert all(torch.equal(one[key], same[key]) for key in one)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in one.values())
        assert len(pickle.dumps(one)) < sum(tensor.nbytes for tensor in one.values()) + 1024 * len(one)
    assert len(pickle.dumps(usual[0])) > len(pickle.dumps(inter[0]))


@pytest.mark.parametrize("crosses_processes", [True, False])
def test_the_engines_msgpack_of_a_payload_has_its_own_bytes_only(packer: StepPacker, crosses_processes: bool) -> None:
    serialization = pytest.importorskip(
        "vllm_omni.distributed.omni_connectors.utils.serialization", reason="needs vllm-omni"
    )
    packed = packer.pack(
        step_of([1] * 64), hidden_states=numbered(64, 512), multimodal_outputs={"x": numbered(64, 512)}
    )
    rules = ChannelRules(partitions=False, crosses_processes=crosses_processes)
    inter, _ = ChannelBuilder(UPSTREAM, rules).build(packed)
    assert inter is not None
    own_bytes = 2 * 512 * 2
    assert own_bytes < len(serialization.OmniSerializer.serialize(inter[5])) < own_bytes + 1024
