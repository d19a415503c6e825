"""`SPANPACK_FIRST_SEED`: the same number, the same examples; another number, others."""

from __future__ import annotations

import pytest

from tests.support import differential
from tests.support.random_cases import Case


def examples(monkeypatch: pytest.MonkeyPatch, first_seed: int | None) -> list[str]:
    found: list[str] = []

    def note(case: Case) -> None:
        found.append(repr(case))

    monkeypatch.setattr(differential, "FIRST_SEED", first_seed)
    monkeypatch.setattr(differential, "ASKED", 8)
    differential.try_cases(note, examples=8)
    return found


@pytest.mark.parametrize("drawn_by", ["hypothesis", "seeds"])
def test_examples_by_first_seed(drawn_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if drawn_by == "seeds":
        monkeypatch.setattr(differential, "hypothesis", None)
    elif differential.hypothesis is None:
        pytest.skip("hypothesis is not installed")
    first, again, other = (examples(monkeypatch, seed) for seed in (20000, 20000, 40000))
    assert len(first) == 8
    assert first == again
    assert first != other
    assert examples(monkeypatch, None) == examples(monkeypatch, None)


def test_neighbours_share_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "hypothesis", None)
    assert not set(examples(monkeypatch, 0)) & set(examples(monkeypatch, 8))


def test_a_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "hypothesis", None)
    monkeypatch.setattr(differential, "FIRST_SEED", 123)

    def fail(_: Case) -> None:
        raise AssertionError

    with pytest.raises(AssertionError) as caught:
        differential.try_cases(fail, examples=2)
    assert caught.value.__notes__ == ["found in random_case(Random(123))"]
