"""The packed runner against the engine's own over many steps, whose batch and consumers change in between."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="needs vllm-omni")

from omni_runner.runner import PackedGPUARModelRunner
from tests.runner.step_rig import STOCK, WIDTH, assert_same, install_stand_ins, make_runner, sample, set_batch

STEPS = 40


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_ins(monkeypatch)


class Requests:
    """Requests come, go, come back under the same id and change places; the markers of their consumers arrive late."""

    def __init__(self, runners: list[Any], random: Random) -> None:
        self.rows = {"r0": 1}  # in batch order
        self._made = 1
        self._runners = runners
        self._random = random
        self._changes = [self.come, self.go, self.change_places, self.marker_arrives, self.change_rows]
        for runner in runners:
            runner.model_intermediate_buffer = {}

    def change(self) -> None:
        """Something happens, or nothing: the next step repeats the last."""
        if self._random.random() < 0.6:
            self._random.choice(self._changes)(self._random.choice(list(self.rows)))

    def come(self, name: str) -> None:
        newcomer = f"r{self._made}"
        self._made += 1
        self.rows[newcomer] = self._random.choice([1, 1, 1, 3])
        if self._random.random() < 0.8:
            self.marker_arrives(newcomer)

    def go(self, name: str) -> None:
        del self.rows[name]
        for runner in self._runners:
            runner.model_intermediate_buffer.pop(name, None)
            runner._downstream_payload_cache.pop(name, None)
        if not self.rows or self._random.random() < 0.3:
            self.rows[name] = 1
            self.marker_arrives(name)

    def change_places(self, name: str) -> None:
        self.rows = dict(self._random.sample(list(self.rows.items()), len(self.rows)))

    def marker_arrives(self, name: str) -> None:
        final_stage = self._random.randrange(2)
        for runner in self._runners:
            runner.model_intermediate_buffer.setdefault(name, {"omni_final_stage_id": final_stage})

    def change_rows(self, name: str) -> None:
        """Sometimes those of one request, sometimes who has how many of the same total."""
        if self._random.random() < 0.5:
            self.rows[name] = self._random.choice([1, 1, 1, 3])
        else:
            rows = self._random.sample(list(self.rows.values()), len(self.rows))
            self.rows = dict(zip(self.rows, rows, strict=True))


def draw_payload(random: Random, names: list[str], tokens: int) -> dict[str, Any]:
    """Rows for everyone, or now and then sparse audio for some."""
    if random.random() < 0.9:
        return {"codes": {"audio": torch.arange(tokens * 2).reshape(tokens, 2)}, "table": [random.random()]}
    chosen = random.sample(names, random.randint(1, len(names)))
    audio = [torch.full((3,), float(i)) for i in range(len(chosen))]
    return {"audio": audio, "meta": {"req_id": chosen, "sparse_audio": ["1"]}}


@pytest.mark.parametrize("output_type", ["latent", "audio"])
@pytest.mark.parametrize("seed", range(15))
def test_every_step_is_the_engines(seed: int, output_type: str) -> None:
    random = Random(seed)
    runners = [make_runner(cls, output_type=output_type) for cls in (STOCK, PackedGPUARModelRunner)]
    requests = Requests(runners, random)
    for step in range(STEPS):
        requests.change()
        names, rows = list(requests.rows), list(requests.rows.values())
        multimodal, hidden = draw_payload(random, names, sum(rows)), torch.randn(sum(rows), WIDTH)
        outputs = []
        for runner in runners:
            set_batch(runner, names, rows)
            scheduled = SimpleNamespace(
                total_num_scheduled_tokens=sum(rows),
                num_scheduled_tokens=dict(zip(names, rows, strict=True)),
            )
            outputs.append(vars(sample(runner, hidden, multimodal, scheduler_output=scheduled).get_output()))
        assert_same(outputs[1], outputs[0], f"step {step}")
    assert runners[1].omni_runner_stats().stock == {}
