"""Packing one step and building its payloads, without an engine: its rules are told here in the shortest form."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import spanpack
from omni_runner import lowering
from omni_runner.builder import ChannelBuilder, ChannelRules
from omni_runner.packing import StepPacker
from omni_runner.step import NotCovered, StepContext, make_step
from tests.runner.packing_rig import ONE_LIST, UPSTREAM, WIDTH, numbered
from tests.support.steps import step_of
from tests.support.torch_calls import CountCalls

PARTITIONED = ChannelRules(partitions=True)


Pair = namedtuple("Pair", "left right")


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
