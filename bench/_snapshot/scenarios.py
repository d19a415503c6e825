"""The measured steps: payloads as the engine's stages yield them, and recorded traces.

A scenario is one or more steps in the form of a trace, so that synthetic and recorded steps take the same path
through every provider and through the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from omni_runner.reference import reference_payloads
from omni_runner.trace import Trace, TraceStep

HIDDEN_SIZE = 2048  # of the Thinker
CODEBOOKS = 16  # of the Talker and of Qwen3-TTS
GRAPH_REQUESTS = 64  # number of requests that the engine's metadata buffers hold, as recorded
TTS_ADDRESS_SETS = 61  # more than any cache of addresses should hold
# Providers take turns in blocks of 50 calls. One that remembers 256 steps (64 keys of four shapes) profits only if a
# step recurs within its last 256 calls; with up to 15 providers, this many steps keep recurrences further apart.
CHANGING_STEPS = 4096

_DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.int8, torch.float16, torch.int32, torch.uint8)
_WIDTHS = (16, 64, 7, 256, 1, 33)


@dataclass(frozen=True)
class Scenario:
    """The steps that one row of results describes.

    Attributes
    ----------
    name : str
        Name in the results.
    description : str
        One line for human readers.
    steps : tuple of TraceStep
        Taken in turn.
    num_kinds : int
        How many of the first steps represent all steps: 1 where steps differ in addresses only.
    """

    name: str
    description: str
    steps: tuple[TraceStep, ...]
    num_kinds: int = 1

    def step(self, number: int) -> TraceStep:
        """The step of call `number`, with new containers and tensor objects, as a model yields in every step."""
        return map_tensors(self.steps[number % len(self.steps)], Tensor.detach)

    @property
    def distinct_steps(self) -> tuple[TraceStep, ...]:
        """The steps that are checked, and over which all figures that are not times are averaged.

        All steps of a trace; the first step where only addresses differ; the first few where every step is different.
        """
        return self.steps[: self.num_kinds]

    @cached_property
    def payload_bytes(self) -> float:
        """Bytes that the consumers get in a step, on average."""
        return sum(map(payload_bytes, self.distinct_steps)) / len(self.distinct_steps)

    def about(self) -> dict[str, Any]:
        """Facts for the results file."""
        step = self.steps[0]
        leaves = tensors_of(step)
        return {
            "description": self.description,
            "requests": len(step.request_ids),
            "consumers": len(step.needs_payload),
            "tokens": sum(step.num_scheduled_tokens),
            "leaves": len(leaves),
            "leaf_bytes": sum(leaf.nbytes for leaf in leaves),
            "address_sets": len(self.steps),
        }


def payload_bytes(step: TraceStep) -> int:
    """Bytes of all per-request payloads of a step."""
    return sum(
        tensor.nbytes for payload in reference_payloads(step) if payload is not None for tensor in payload.values()
    )


def tensors_of(step: TraceStep) -> list[Tensor]:
    """The tensors that a step's payload is made of: its hidden rows, if they belong to it, then those of its tree."""
    found: list[Tensor] = []
    if step.include_hidden and step.hidden_states is not None:
        found.append(step.hidden_states)
    _collect(step.multimodal_outputs, found)
    return found


def tree_tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree of dicts, lists and tuples, in walking order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(node: Any, found: list[Tensor]) -> None:
    # Timed as part of the baselines, so it is written to be as fast as a Python walk can be.
    kind = type(node)
    if kind is Tensor:
        found.append(node)
    elif kind is dict:
        for item in node.values():
            _collect(item, found)
    elif kind is list or kind is tuple:
        for item in node:
            if type(item) is Tensor:
                found.append(item)
            else:
                _collect(item, found)


def map_tensors(step: TraceStep, change: Callable[[Tensor], Tensor]) -> TraceStep:
    """A step with new containers and every tensor replaced."""
    hidden = step.hidden_states
    return dataclasses.replace(
        step,
        hidden_states=None if hidden is None else change(hidden),
        multimodal_outputs=_map_tree(step.multimodal_outputs, change),
    )


def tree_paths(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted paths of a tree's tensors and of its lists, as placement rules name them."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from tree_paths(item, (*path, str(key)))
    elif isinstance(tree, Tensor | list):
        yield ".".join(path), tree


def _map_tree(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map_tree(item, change) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tree(item, change) for item in tree)
    return tree


def random_like(tensor: Tensor) -> Tensor:
    """Random bit patterns in the dtype and shape of a tensor, contiguous, on its device."""
    if tensor.dtype is torch.bool:
        return torch.randint(0, 2, tensor.shape, dtype=torch.uint8, device=tensor.device).bool()
    data = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, device=tensor.device)
    return data.view(tensor.dtype).view(tensor.shape)


class _Maker:
    """Makes synthetic steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return random_like(torch.empty(shape, dtype=dtype, device=self.device))

    def step(
        self,
        counts: Sequence[int],
        tree: dict[str, Any],
        *,
        hidden: Tensor | None = None,
        consumers: Iterable[int] | None = None,
    ) -> TraceStep:
        ids = tuple(f"request-{index}" for index in range(len(counts)))
        starts = [0]
        for rows in counts:
            starts.append(starts[-1] + rows)
        padding = [starts[-1]] * (GRAPH_REQUESTS - len(counts))  # the engine's buffer is as long as its largest batch
        return TraceStep(
            request_ids=ids,
            num_scheduled_tokens=tuple(counts),
            query_start_loc=(*starts, *padding),
            needs_payload=ids if consumers is None else tuple(ids[index] for index in consumers),
            include_hidden=hidden is not None,
            hidden_states=hidden if hidden is not None else self.tensor(torch.bfloat16, sum(counts), 16),
            staged_hidden_states_cpu=None,
            multimodal_outputs=tree,
        )

    def thinker(
        self, counts: Sequence[int], *, rows: int | None = None, consumers: Iterable[int] | None = None
    ) -> tuple[TraceStep, ...]:
        """Hidden rows, layers 0 and 24, and three embeddings that are views of one tensor, as the model has them."""
        rows = sum(counts) if rows is None else rows
        hidden, first, last = (self.tensor(torch.bfloat16, rows, HIDDEN_SIZE) for _ in range(3))
        bos, eos, pad = self.tensor(torch.bfloat16, 1, 3, HIDDEN_SIZE).split(1, dim=1)
        tree = {
            "hidden_states": {"layers": {0: first, 24: last}},
            "embed": {"tts_bos": [bos], "tts_eos": [eos], "tts_pad": [pad]},
        }
        return (self.step(counts, tree, hidden=hidden, consumers=consumers),)

    def changing_thinker(self, decodes: int, prefills: Sequence[tuple[int, ...]]) -> tuple[TraceStep, ...]:
        """One step for each set of prefills. The rows of all steps start at the same addresses, as with CUDA graphs."""
        (longest,) = self.thinker([*[1] * decodes, *max(prefills, key=sum)])
        steps = []
        for lengths in prefills:
            counts = [*[1] * decodes, *lengths]
            cut = map_tensors(longest, partial(_first_rows, rows=sum(counts)))
            steps.append(self.step(counts, cut.multimodal_outputs, hidden=cut.hidden_states))
        return tuple(steps)

    def talker(self, requests: int) -> tuple[TraceStep, ...]:
        tree = {"codes": {"audio": self.tensor(torch.int64, requests, CODEBOOKS)}}
        return (self.step([1] * requests, tree),)

    def tts(self, requests: int) -> tuple[TraceStep, ...]:
        """One codec tensor per request, at a different address in every step."""
        return tuple(
            self.step(
                [1] * requests,
                {
                    "codes": {"audio": [self.tensor(torch.int64, 1, CODEBOOKS) for _ in range(requests)]},
                    "meta": {
                        "codec_streaming": self.tensor(torch.int8, requests),
                        "frame_index": self.tensor(torch.int32, requests),
                    },
                },
            )
            for _ in range(TTS_ADDRESS_SETS)
        )

    def leaves(self, requests: int, count: int) -> tuple[TraceStep, ...]:
        tree = {
            f"leaf_{index}": self.tensor(_DTYPES[index % len(_DTYPES)], requests, _WIDTHS[index % len(_WIDTHS)])
            for index in range(count)
        }
        return (self.step([1] * requests, tree),)


def _first_rows(leaf: Tensor, rows: int) -> Tensor:
    return leaf[:rows]


def _changing_prefills() -> list[tuple[int, ...]]:
    """Four lengths for each of `CHANGING_STEPS` distinct steps; the longest is first, as memory is reserved for it."""
    source = Random(0)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < CHANGING_STEPS:
        found[tuple(source.randint(200, 1200) for _ in range(4))] = None
    lengths = list(found)
    lengths.insert(0, lengths.pop(lengths.index(max(lengths, key=sum))))
    return lengths


_MIXED_PREFILLS = (300, 512, 850, 1200)
_PREFILL_REQUEST_TOKENS = 2048

_Recipe = tuple[str, Callable[[_Maker], tuple[TraceStep, ...]]]

# Scenarios run in this order: those of the headline targets come first.
_RECIPES: dict[str, _Recipe] = {
    "thinker_decode_64": ("Thinker, 64 requests decode one token", lambda make: make.thinker([1] * 64)),
    "talker_decode_64": ("Talker, 64 requests, one [64, 16] int64 leaf", lambda make: make.talker(64)),
    "tts_decode_64": (
        "TTS, 64 tensors of [1, 16] int64 at new addresses in every step, int8 and int32 metadata",
        lambda make: make.tts(64),
    ),
    "thinker_prefill_8k": (
        "Thinker, four prompts of 2,048 tokens",
        lambda make: make.thinker([_PREFILL_REQUEST_TOKENS] * 4),
    ),
    "thinker_decode_1": ("Thinker, one request decodes", lambda make: make.thinker([1])),
    "thinker_decode_8": ("Thinker, 8 requests decode", lambda make: make.thinker([1] * 8)),
    "thinker_decode_256": ("Thinker, 256 requests decode", lambda make: make.thinker([1] * 256)),
    "thinker_padded": (
        "Thinker, 48 requests decode in a CUDA graph's buffers of 64 rows",
        lambda make: make.thinker([1] * 48, rows=64),
    ),
    "thinker_mixed": (
        "Thinker, 60 decodes and four prefills of 300 to 1,200 tokens",
        lambda make: make.thinker([*[1] * 60, *_MIXED_PREFILLS]),
    ),
    "thinker_changing": (
        "Thinker, 60 decodes and four prefills of 200 to 1,200 tokens, other ones in every step",
        lambda make: make.changing_thinker(60, _changing_prefills()),
    ),
    "thinker_subset": (
        "Thinker, 64 requests with 256 tokens each, 8 of them with a consumer",
        lambda make: make.thinker([256] * 64, consumers=range(3, 64, 8)),
    ),
    "few_leaves": ("64 requests, 2 leaves of mixed dtype", lambda make: make.leaves(64, 2)),
    "many_leaves": ("64 requests, 128 leaves of mixed dtype", lambda make: make.leaves(64, 128)),
    "thinker_prefill_32k": (
        "Thinker, 16 prompts of 2,048 tokens",
        lambda make: make.thinker([_PREFILL_REQUEST_TOKENS] * 16),
    ),
}

SCENARIO_NAMES = tuple(_RECIPES)
_KINDS = {"thinker_changing": 8}  # steps that represent all steps, where these differ in more than addresses


def make_scenario(name: str, device: torch.device) -> Scenario:
    """Allocate the tensors of one of `SCENARIO_NAMES`."""
    description, make_steps = _RECIPES[name]
    return Scenario(name, description, make_steps(_Maker(device)), _KINDS.get(name, 1))


def trace_scenario(trace: Trace) -> Scenario:
    """The steps of a trace that is loaded onto the device.

    Raises
    ------
    ValueError
        The trace has no dense step on the asynchronous path; only our provider supports sparsely routed steps.
    """
    steps = tuple(_with_hidden(step) for step in trace.steps if step.use_async_omni_output and step.elements is None)
    if not steps:
        raise ValueError(f"trace {trace.source} has no dense asynchronous step")
    name = trace.source.rpartition("/")[2]
    return Scenario(f"trace_{name}", f"recorded: {trace.stage}, {len(steps)} steps in turn", steps, len(steps))


def _with_hidden(step: TraceStep) -> TraceStep:
    """Add hidden rows to a step of Model Runner V2, which records none: V1 always has some, even if it omits them."""
    if step.hidden_states is not None:
        return step
    return dataclasses.replace(step, hidden_states=torch.empty((0, 1)), include_hidden=False)
