"""The tuner's search: what it picks and what it rejects. A fake stands for the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spanpack._size_classes import SIZE_CLASSES, LaunchConfig
from spanpack._tune_report import table
from spanpack._tune_results import Transport
from spanpack._tune_search import TuneError
from tests.support.fake_measurer import SIZES, FakeMeasurer, faster, search


def test_where_nothing_is_faster_the_defaults_stay() -> None:
    findings = search(FakeMeasurer())
    assert findings.complete
    assert list(findings.classes) == [group.name for group in SIZE_CLASSES]
    assert all(result.config == result.group.default for result in findings.classes.values())
    assert all(result.gain == 0 for result in findings.classes.values())
    assert "Tuning gains nothing" in table(findings)


def test_the_fastest_wins_in_its_class_only() -> None:
    best = LaunchConfig(16384, 8)
    findings = search(FakeMeasurer(us=faster(best, 8.0, "thinker_decode_64")))
    assert {name for name, result in findings.classes.items() if result.config == best} == {"small"}
    assert findings.classes["small"].gain == pytest.approx(0.2)
    assert "up to 20.0%, in 1 of 6" in table(findings)


def test_less_than_three_percent_is_noise() -> None:
    findings = search(FakeMeasurer(us=faster(LaunchConfig(16384, 8), 9.8)))
    assert all(result.config == result.group.default for result in findings.classes.values())


def test_of_equally_fast_ones_the_longest_tile_wins() -> None:
    fast = {LaunchConfig(1024, 1): 8.0, LaunchConfig(8192, 4): 8.05, LaunchConfig(16384, 8): 8.4}
    findings = search(FakeMeasurer(us=lambda _, config, busy: fast.get(config, 10.0)))
    assert findings.classes["small"].config == LaunchConfig(8192, 4)


def test_the_busy_gpu_counts_as_much_as_the_idle_one() -> None:
    quiet = LaunchConfig(16384, 8)
    findings = search(FakeMeasurer(us=lambda _, config, busy: (20.0 if busy else 8.0) if config == quiet else 10.0))
    assert findings.classes["small"].config == findings.classes["small"].group.default


def test_luck_in_the_first_round_does_not_decide() -> None:
    lucky = LaunchConfig(16384, 8)
    measurer = FakeMeasurer()
    measurer.us = lambda name, config, _: (
        5.0 if config == lucky and measurer.measured.count((name, config)) <= 2 else 10.0
    )
    assert search(measurer).classes["small"].config != lucky


def test_who_is_not_faster_every_time_is_not_faster() -> None:
    shaky = LaunchConfig(16384, 8)
    measurer = FakeMeasurer()

    def us(name: str, config: LaunchConfig, busy: bool) -> float:
        if config != shaky:
            return 10.0
        return 10.5 if measurer.measured.count((name, config)) in (7, 8) else 5.0  # the third round of five

    measurer.us = us
    assert search(measurer).classes["small"].config != shaky


@pytest.mark.parametrize("name", ["awkward", "thinker_decode_64"])
def test_wrong_bytes_are_rejected_however_fast(name: str) -> None:
    bad = LaunchConfig(16384, 8)
    findings = search(FakeMeasurer(us=faster(bad, 1.0), wrong={(name, bad)}))
    assert findings.rejected == {bad: "wrong bytes"}
    assert bad not in {result.config for result in findings.classes.values()}  # nor where it had won before
    assert "16384/8 rejected: wrong bytes" in table(findings)


def test_what_does_not_compile_is_rejected() -> None:
    bad = LaunchConfig(16384, 8)
    measurer = FakeMeasurer(us=faster(bad, 1.0), broken={bad})
    assert search(measurer).rejected == {bad: "RuntimeError: too many registers"}
    assert bad not in {config for _, config in measurer.measured}


def test_a_default_that_does_not_work_ends_the_tuning() -> None:
    default = SIZE_CLASSES[-1].default
    with pytest.raises(TuneError, match=f"{default} does not work here: wrong bytes"):
        search(FakeMeasurer(wrong={("awkward", default)}))


def test_a_default_that_fails_on_one_workload_loses_its_class_only() -> None:
    group = next(group for group in SIZE_CLASSES if group.name == "large")
    findings = search(FakeMeasurer(wrong={("thinker_prefill_8k", group.default)}))
    assert "large" not in findings.classes
    assert findings.skipped == {"large": "the default: wrong bytes"}
    assert len(findings.classes) == 5


def test_what_does_not_fit_in_the_memory_is_skipped() -> None:
    findings = search(FakeMeasurer(too_large={"thinker_prefill_8k", SIZES[0].name}))
    assert set(findings.classes) == {group.name for group in SIZE_CLASSES} - {"large"}
    assert findings.skipped["thinker_prefill_8k"] == "not enough memory"
    assert findings.complete


def sooner_up_to(limit: int) -> Callable[[int, Transport, bool], float]:
    return lambda nbytes, transport, busy: 30.0 if transport.direct and nbytes <= limit else 50.0


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1 << 12, 1 << 12), (1 << 16, 1 << 16), (1 << 30, 1 << 20)])
def test_direct_stores_up_to_where_they_land_sooner(limit: int, expected: int) -> None:
    findings = search(FakeMeasurer(landed_us=sooner_up_to(limit)))
    assert findings.threshold("direct_store") == expected
    assert findings.threshold("mapped_addresses") == 0


def test_mapped_addresses_have_a_threshold_of_their_own() -> None:
    findings = search(
        FakeMeasurer(landed_us=lambda nbytes, transport, busy: 30.0 if transport.addresses == "mapped" else 50.0)
    )
    assert (findings.threshold("direct_store"), findings.threshold("mapped_addresses")) == (0, 1 << 20)


def test_the_producing_stream_may_not_lose_more_than_the_host_saves() -> None:
    saved_us = 4.0
    for extra_us, expected in ((saved_us - 0.1, 1 << 20), (saved_us + 0.1, 0)):
        measurer = FakeMeasurer(
            landed_us=sooner_up_to(1 << 30), stream_us=lambda t, extra=extra_us: 2.0 + extra * t.direct
        )
        assert search(measurer).threshold("direct_store") == expected


def test_direct_stores_that_land_later_on_a_busy_gpu_are_out() -> None:
    findings = search(
        FakeMeasurer(landed_us=lambda _, transport, busy: (60.0 if busy else 30.0) if transport.direct else 50.0)
    )
    assert findings.threshold("direct_store") == 0


def test_a_transport_with_wrong_bytes_is_out() -> None:
    direct = Transport(direct=True)
    findings = search(FakeMeasurer(landed_us=sooner_up_to(1 << 30), wrong_transports={direct}))
    assert findings.threshold("direct_store") == 0
    assert findings.unusable == {"direct_store": "wrong bytes"}
    assert findings.complete


def test_ctrl_c_keeps_the_thresholds_so_far() -> None:
    def landed_us(nbytes: int, transport: Transport, busy: bool) -> float:
        if nbytes == SIZES[1].device_bytes:
            raise KeyboardInterrupt
        return sooner_up_to(1 << 30)(nbytes, transport, busy)

    findings = search(FakeMeasurer(landed_us=landed_us))
    assert findings.threshold("direct_store") == SIZES[0].device_bytes
    assert len(findings.classes) == len(SIZE_CLASSES)
    assert not findings.complete
