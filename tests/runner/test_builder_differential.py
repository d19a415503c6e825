"""The whole builder output of the packed runner against the installed engine's, on random steps."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm_omni", reason="needs the engine")

from bench._builder.engine import Stage, make_runner, take_snapshot
from bench._builder.payloads import WORKLOADS, Workload
from omni_runner.compat import resolve
from omni_runner.difference import difference
from omni_runner.runner import make_runner_cls
from tests.runner.payload_strategies import Case, random_case
from tests.support.torch_calls import CountCalls

EXAMPLES = int(os.environ.get("OMNI_RUNNER_DIFFERENTIAL_EXAMPLES", "5000"))
STEPS_PER_EXAMPLE = 2  # the second finds what the first has cached

CHANNELS = ("inter_stage_outputs", "multimodal_outputs")
HOST_FIELDS = ("req_ids", "req_id_to_index", "sampled_token_ids", "pooler_output", "prompt_logprobs_dict")


def run_step(runner: Any, case: Case, time: int) -> Any:
    """One step; the caller's objects change as soon as they may."""
    hidden, payload = case.hidden(time), case.payload(time)
    snapshot, arguments = take_snapshot(runner, case.step_at(time), hidden, payload)
    scribble([hidden, payload])
    snapshot.async_payload.wait()
    return runner._build_omni_model_runner_output_from_snapshot(**arguments)


def scribble(tree: Any) -> None:
    """Overwrite and empty everything that the caller owns again once the snapshot is taken."""
    if isinstance(tree, Tensor):
        tree.detach().zero_()
    elif isinstance(tree, dict):
        for child in tree.values():
            scribble(child)
        tree.clear()
    elif isinstance(tree, list | tuple):
        for child in tree:
            scribble(child)
        if isinstance(tree, list):
            tree.clear()


class LogCounter(logging.Handler):
    """Counts what the engine logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.levels: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.seen[record.levelname, record.getMessage()] += 1
        self.levels[record.levelname] += 1

    def take(self) -> Counter[tuple[str, str]]:
        """Return what was logged since the last call, and let the engine forget what it logs once only."""
        seen, self.seen = self.seen, Counter()
        forget_logged_errors()
        return seen


@pytest.fixture(scope="module")
def log() -> Iterator[LogCounter]:
    """In place of the handlers of the engine's loggers."""
    counter = LogCounter()
    logger = logging.getLogger("vllm_omni")
    kept = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [counter], False
    logger.setLevel(logging.WARNING)
    yield counter
    logger.handlers, logger.propagate = kept[:2]
    logger.setLevel(kept[2])


def forget_logged_errors() -> None:
    try:
        from vllm_omni.worker import sparse_audio
    except ImportError:  # before 0.28 the engine logs none of this
        return
    sparse_audio._logged_offenders.clear()
    sparse_audio._fail_closed_last_log_at = None
    sparse_audio._fail_closed_suppressed = 0


def outcome(runner: Any, case: Case, time: int) -> Any:
    """The step's output, or what it raises."""
    try:
        return run_step(runner, case, time)
    except Exception as error:  # noqa: BLE001  whatever it is, both have to raise it
        return type(error), str(error)


def assert_same(expected: Any, found: Any) -> None:
    """Same channels: None-ness, keys in order, dtypes, shapes, bytes, and which objects are one and the same."""
    if isinstance(expected, tuple) or isinstance(found, tuple):
        assert found == expected
        return
    for name in HOST_FIELDS:
        assert getattr(found, name) == getattr(expected, name), name
    for name in CHANNELS:
        left, right = getattr(expected, name), getattr(found, name)
        assert type(left) is type(right), name
        for wanted, got in zip(left or (), right or (), strict=True):
            assert type(wanted) is type(got), name
            assert list(wanted or ()) == list(got or ()), name
            for key in wanted or ():
                # The engine hands out tensors of one element with any stride, of which bytes can't be viewed.
                plain = wanted[key].clone(memory_format=torch.contiguous_format)
                assert not difference(plain, got[key]), (name, key)
    assert identities(found) == identities(expected)


def identities(output: Any) -> Any:
    """Whether the channels are one list, and which tensors the two channels of a request share."""
    inter, client = (getattr(output, name) for name in CHANNELS)
    if inter is client:
        return inter is not None
    return [
        {key for key in a if key in b and a[key] is b[key]}
        for a, b in zip(inter or (), client or (), strict=False)
        if a and b
    ]


def assert_owned(output: Any) -> None:
    """Each tensor can be written in place, and no other shows it."""
    if isinstance(output, tuple):
        return
    distinct = {
        id(tensor): tensor
        for name in CHANNELS
        for payload in getattr(output, name) or ()
        for tensor in (payload or {}).values()
    }
    written = [(tensor, i % 2) for i, tensor in enumerate(distinct.values())]
    for tensor, _ in written:
        tensor.zero_()
    for tensor, bit in written:
        tensor.copy_(torch.full_like(tensor, bit, dtype=torch.bool))
    for tensor, bit in written:
        assert bool((tensor.to(torch.complex64) == bit).all())


@pytest.fixture(scope="module")
def runners() -> Iterator[Any]:
    """Makes a stock and a packed runner of a stage; the same two for the same stage."""
    upstream = resolve()
    made: dict[Stage, tuple[Any, Any]] = {}

    def pair(stage: Stage) -> tuple[Any, Any]:
        if stage not in made:
            made[stage] = make_runner(upstream.runner_cls, stage), make_runner(make_runner_cls(upstream), stage)
        return made[stage]

    pair.made = made  # type: ignore[attr-defined]
    yield pair
    for _, packed in made.values():
        packed._omni_runner_path.close()


def compare(runners: Any, log: LogCounter, case: Case) -> None:
    stock, packed = runners(case.stage)
    for runner in (stock, packed):
        runner._downstream_payload_cache.clear()  # the requests of the last case are gone
    log.take()
    for time in range(STEPS_PER_EXAMPLE):
        expected, expected_log = outcome(stock, case, time), log.take()
        found, found_log = outcome(packed, case, time), log.take()
        assert_same(expected, found)
        # A step that fails has warned by then about some of its keys: the engine request by request, we key by key.
        assert found_log == expected_log or isinstance(expected, tuple)
        assert_owned(found)


def test_output_is_that_of_the_engine(runners: Any, log: LogCounter) -> None:
    for seed in range(EXAMPLES):
        case = random_case(Random(seed))
        try:
            compare(runners, log, case)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {case}")
            raise


def test_output_is_that_of_the_engine_shrunk(runners: Any, log: LogCounter) -> None:
    """The same with few examples of Hypothesis's choice: what it finds comes in its smallest form."""
    hypothesis = pytest.importorskip("hypothesis")
    randoms = hypothesis.strategies.randoms(use_true_random=False)

    @hypothesis.settings(max_examples=EXAMPLES // 20, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(randoms)
    def find(rng: Random) -> None:
        case = random_case(rng)
        hypothesis.note(case)
        compare(runners, log, case)

    find()


def test_comparison_covers_something(runners: Any, log: LogCounter) -> None:
    """Most random steps were packed in columns, none was left to the engine, and the engine had warnings to give."""
    stats = [packed.omni_runner_stats() for _, packed in runners.made.values()]
    if not stats:
        pytest.skip("runs after the differential test")
    packed_whole = sum((Counter(stat.whole) for stat in stats), Counter())
    columns, steps = sum(stat.columns for stat in stats), sum(stat.steps for stat in stats)
    left_to_engine = sum((Counter(stat.stock) for stat in stats), Counter())
    assert not left_to_engine
    assert columns > steps / 2, packed_whole.most_common(20)
    assert log.levels["WARNING"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_whole_builder_makes_two_torch_calls_per_key_at_most(runners: Any, workload: Workload) -> None:
    _, packed = runners(workload.stage)
    calls = []
    for requests in (2, 64):
        snapshot, arguments = take_snapshot(packed, workload.step(requests), *workload.make(requests))
        snapshot.async_payload.wait()
        with CountCalls() as counter:
            output = packed._build_omni_model_runner_output_from_snapshot(**arguments)
        assert counter.calls <= 2 * len(output.inter_stage_outputs[0])
        calls.append(counter.calls)
    assert calls[0] == calls[1]
