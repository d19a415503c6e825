"""Random steps of a stage: batch, routing, flags and payload, for the differential tests.

Everything is drawn from a `random.Random`: Hypothesis's own, which can shrink, or a seeded one. A `Blueprint` says
where a payload has tensors and plain values; it is filled in anew for every step, so that one structure is seen with
several contents, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench._builder.engine import Stage, StepInput

Blueprint = Callable[[Random], Any]

DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.int8,
    torch.int32,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
)
LAYOUTS = ("plain", "plain", "plain", "strided", "transposed", "offset")
# What the engine wraps, and what it drops with a warning.
VALUES = (0, -7, 2**40, True, False, 0.0, -0.0, 1.5, 1e300, float("nan"), None, "text", "", b"bytes", 1j, 2**70)
ODD_VALUES = (np.float64(2.5), np.int32(3), np.arange(3), [np.float64(1.0), 2], {1, 2})
KEYS = (
    *("x", "latents", "audio", "model_outputs", "sr", "latent", "codes", "codes.audio"),
    *("codes/audio", "codes/ref", "embed/tts_bos", "embed/prefill", "hidden_states/output", "hidden_states/layers"),
    *("ids/all", "meta/finished", "meta/segment_end", "meta/llm_output_text_utf8", "meta/left_context_size"),
)
CLIENT_KEYS = ((), (), (), ("x", "codes.audio"), ("model_outputs",))


@dataclass(frozen=True)
class Case:
    """The structure of a step; `payload` and `hidden` fill it in."""

    stage: Stage
    step: StepInput
    hidden_rows: int
    blueprint: Blueprint | None
    seed: int

    def step_at(self, time: int) -> StepInput:
        """The step; routing markers that were missing have come by the second time."""
        if time == 0:
            return self.step
        rng = Random(f"{self.seed}/stages")
        known = tuple(rng.choice([0, 2]) if stage is None else stage for stage in self.step.final_stages)
        return replace(self.step, final_stages=known)

    def hidden(self, time: int) -> Tensor:
        return random_tensor(Random(f"{self.seed}/{time}/hidden"), torch.bfloat16, (self.hidden_rows, 4))

    def payload(self, time: int) -> Any:
        return None if self.blueprint is None else self.blueprint(Random(f"{self.seed}/{time}"))

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "blueprint"}
        return f"{shown}, payload {self.payload(0)}"


def random_case(rng: Random) -> Case:
    """One random step of a random stage."""
    stage = Stage(
        output_type=rng.choice(["latent", "latent", "audio", "audio", "Audio", "text", None]),
        async_chunk=rng.random() < 0.7,
        sender=rng.random() < 0.5,
        include_hidden=rng.random() < 0.5,
        client_keys=rng.choice(CLIENT_KEYS),
    )
    count = rng.randint(1, 6)
    order = rng.sample(range(count), count)
    scheduled = tuple(rng.choice([1, 1, 1, 0, 2, 5]) for _ in range(count))
    total = sum(scheduled)
    scheduled_total = max(total + rng.choice([0, 0, 0, 0, 2, -1]), 0)
    hidden_rows = rng.choice([total, total, total + 3, max(total - 2, 0), count])
    everyone = rng.random() < 0.5
    draw = _Draw(
        rng, tuple(f"r{i}" for i in order), (scheduled_total, scheduled_total, hidden_rows, total, 1, count, 0)
    )
    step = StepInput(
        request_ids=draw.request_ids,
        scheduled=scheduled,
        scheduled_total=scheduled_total,
        final_stages=tuple(2 if everyone else rng.choice([2, 2, 2, 0, None]) for _ in range(count)),
    )
    blueprint = draw.payload() if rng.random() < 0.96 else None
    return Case(stage, step, hidden_rows, blueprint, seed=rng.randrange(2**32))


class _Draw:
    """Draws the blueprint of one payload."""

    def __init__(self, rng: Random, request_ids: tuple[str, ...], rows: tuple[int, ...]) -> None:
        self.rng = rng
        self.request_ids = request_ids
        self.rows = rows  # first dimensions that mean something in this step, and some that don't

    def payload(self) -> Blueprint:
        """Nodes under keys that models use, with a sparse audio declaration now and then."""
        parts: dict[Any, Any] = {}
        for key in self.rng.sample(KEYS, self.rng.choice([1, 2, 2, 3, 4, 5])):
            root, _, name = key.partition("/")
            group = parts.setdefault(root, {}) if name else parts
            if isinstance(group, dict):
                group[name or root] = self.layers() if name == "layers" and self.rng.random() < 0.7 else self.node()
        if self.rng.random() < 0.3:
            self.declare_sparse(parts, self.rng.choice(["nested", "nested", "flat", "both"]))
        return _dict_of(parts)

    def node(self) -> Blueprint:
        kinds = [self.tensor] * 8 + [self.list] * 8 + [self.value] * 4 + [self.dict, self.tuple]
        return self.rng.choice(kinds)()

    def tensor(self) -> Blueprint:
        """Rarely without dimensions: the engine raises on such a tensor, which ends the comparison."""
        rest = self.rng.choice([(3,), (1, 4), (), (2, 0), (5,)])
        shape = () if self.rng.random() < 0.02 else (self.rng.choice(self.rows), *rest)
        return _tensor(self.rng.choice(DTYPES), shape, self.rng.choice(LAYOUTS))

    def layers(self) -> Blueprint:
        return _dict_of({layer: self.node() for layer in self.rng.choice([(0, 24), (7,)])})

    def list(self) -> Blueprint:
        """One element per request, or too short, or too long."""
        count = len(self.request_ids)
        length = 0 if self.rng.random() < 0.02 else self.rng.choice([count] * 6 + [1, 1, max(count - 1, 1), count + 1])
        kind = self.rng.choice(["alike", "alike", "ragged", "mixed"])
        if kind == "mixed":
            elements = [self.tensor] * 6 + [self.value] * 4 + [self.dict, self.tuple]
            return _list_of([self.rng.choice(elements)() for _ in range(length)])
        dtype = self.rng.choice(DTYPES)
        shape = self.rng.choice([(1, 16), (3,), (), (0, 2), (1, 1, 4)])
        shapes = [shape if kind == "alike" else (i * 5 % 4, 2) for i in range(length)]
        return _list_of([_tensor(dtype, shape, "plain") for shape in shapes])

    def dict(self) -> Blueprint:
        """A nested dict, which the engine takes apart and then drops."""
        return _dict_of({key: self.node() for key in self.rng.choice([(), ("audio",), ("b", "layers")])})

    def tuple(self) -> Blueprint:
        parts = [self.rng.choice([self.tensor, self.value])() for _ in range(self.rng.randint(0, 2))]
        return lambda rng: tuple(part(rng) for part in parts)

    def value(self) -> Blueprint:
        """A plain value; another one, even of another type, in every step."""
        return self.rng.choice(VALUE_BLUEPRINTS)

    def declare_sparse(self, parts: Any, where: str) -> None:
        ids = list(self.request_ids)
        subset = self.rng.sample(ids, self.rng.randint(0, len(ids)))
        marker = self.rng.choice([*[["1"]] * 6, ["true", "0"], "yes", ["0"], [], "no", [1], 1, torch.tensor([1]), None])
        named = self.rng.choice([*[subset] * 8, ids, [*subset, "unknown"], subset * 2, None, "r0", [1]])
        declared = {"sparse_audio": lambda _: deepcopy(marker), "req_id": lambda _: deepcopy(named)}
        if where != "nested":
            parts.update({f"meta.{name}": part for name, part in declared.items()})
        if where != "flat" and isinstance(parts.setdefault("meta", {}), dict):
            parts["meta"].update(declared)


VALUE_BLUEPRINTS: tuple[Blueprint, ...] = (
    lambda rng: rng.choice(VALUES),
    lambda rng: rng.randrange(100),
    lambda rng: [rng.choice(VALUES) for _ in range(rng.randrange(1, 7))],
    lambda rng: [rng.randrange(100) for _ in range(rng.randrange(1, 7))],
    lambda rng: tuple(rng.random() for _ in range(rng.randrange(1, 4))),
    lambda rng: [[rng.randrange(9)] * rng.randrange(1, 3) for _ in range(rng.randrange(1, 7))],
    lambda rng: [[rng.randrange(9)] * rng.randrange(3) for _ in range(rng.randrange(1, 7))],
    lambda rng: deepcopy(rng.choice(ODD_VALUES)),
)


def random_tensor(rng: Random, dtype: torch.dtype, shape: tuple[int, ...], layout: str = "plain") -> Tensor:
    """Random bytes, NaNs and all, in one of several memory layouts."""
    stored = shape
    if shape:
        stored = {
            "transposed": shape[::-1],
            "offset": (shape[0] + 2, *shape[1:]),
            "strided": (*shape[:-1], 2 * shape[-1]),
        }.get(layout, shape)
    data = bytearray(rng.randbytes(int(np.prod(stored, dtype=np.int64)) * dtype.itemsize))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    tensor = torch.frombuffer(data, dtype=dtype).reshape(stored) if data else torch.empty(stored, dtype=dtype)
    if not shape or layout == "plain":
        return tensor
    if layout == "transposed":
        return tensor.permute(*reversed(range(tensor.dim())))
    return tensor[1:-1] if layout == "offset" else tensor[..., ::2]


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> Blueprint:
    return lambda rng: random_tensor(rng, dtype, shape, layout)


def _list_of(parts: list[Blueprint]) -> Blueprint:
    return lambda rng: [part(rng) for part in parts]


def _dict_of(parts: Any) -> Blueprint:
    """Of blueprints, or of dicts of them."""
    fill = {key: _dict_of(part) if isinstance(part, dict) else part for key, part in parts.items()}
    return lambda rng: {key: part(rng) for key, part in fill.items()}
