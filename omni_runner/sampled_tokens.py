"""The sampled tokens' way to the host: in the pack of the step's payload, or by one copy of their own.

vLLM's output object makes a stream context, an event and a pinned tensor in every step: most of what an output costs
once its payload is packed. Its tokens are not needed before the payload, for whose builder `get_output` waits first, so
they come along in the pack: 64 tokens more among a megabyte. They stay away from packs that would delay them or that
they would make dearer, see `lowering`, and from all but small ones where the next step's sampling wants them as well
(penalties, some logits processors). Then, and where nothing is packed, `spanpack.Fetcher` makes the copy that vLLM
makes, on the same stream, without torch's share of its cost. On the device nothing changes: the next step is fed with
the very tensor.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

import spanpack

if TYPE_CHECKING:
    from omni_runner.packing import PackedStep

logger = logging.getLogger("vllm.omni_runner")

# Arguments of vLLM's output object: those of the tokens' copy, and those that ask for others.
_OF_TOKENS = frozenset(("sampled_token_ids", "invalid_req_indices", "async_output_copy_stream", "vocab_size"))
_KNOWN = _OF_TOKENS | {"logprobs_tensors", "routed_experts", "num_nans", "check_ep_fault"}

# What vLLM's ``__init__`` stores for those other copies, where none is asked for.
_NO_OTHER_COPIES = dict.fromkeys(
    (
        "_logprobs_tensors",
        "_logprobs_tensors_cpu",
        "_routed_experts",
        "_routed_experts_cpu",
        "_num_nans",
        "_num_nans_cpu",
        "_has_fault",
    )
)
_FIELDS = frozenset(_NO_OTHER_COPIES) | {
    "_model_runner_output",
    "_invalid_req_indices",
    "async_copy_ready_event",
    "_sampled_token_ids",
    "vocab_size",
    "sampled_token_ids_cpu",
}


def stores_as_known(output_cls: type[Any]) -> bool:
    """Whether vLLM's output class, whose ``__init__`` is not going to run, stores nothing but what is known here."""
    try:
        instructions = dis.get_instructions(output_cls.__init__)
    except TypeError:  # not written in Python
        return False
    return {step.argval for step in instructions if step.opname == "STORE_ATTR"} <= _FIELDS


class PromisedTokens:
    """Stands for tokens that are in the pack, and for the event that they wait for, until the builder has made them.

    To make a tensor costs more than all else of an output. The decode thread leaves it to the builder, whose work
    `get_output` waits for. Until then this has the tensor's attributes and methods, which wait for the bytes; it is no
    tensor to torch's functions.

    Attributes
    ----------
    kept
        The tensor, once it was made.
    """

    __slots__ = ("_step",)

    def __init__(self, step: PackedStep) -> None:
        self._step = step

    @property
    def kept(self) -> Tensor | None:
        """See above."""
        return self._step.made_tokens

    def synchronize(self) -> None:
        """Sleep until the bytes are on the host, as vLLM's event does."""
        self._step.arrive()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by whoever copies or inspects objects
            raise AttributeError(name)
        return getattr(self._step.tokens(), name)


class Landed:
    """The event of tokens that are on the host."""

    def synchronize(self) -> None:
        """Return at once."""


class SampledTokens:
    """Brings one runner's sampled tokens to the host. Whatever it can't do is left to the engine.

    Attributes
    ----------
    copied
        How often it has started a copy.
    packed
        How often the tokens were in the pack of their step.
    expected
        Tokens, and the step whose pack they may be in. The next output takes them from there if they are its own.
    wanted
        Whether the next output is likely to take tokens from here: the last one did, and nothing has failed.
    """

    def __init__(self) -> None:
        self.copied = self.packed = 0
        self.wanted = True
        self.expected: tuple[Tensor, PackedStep] | None = None
        self._fetcher: spanpack.Fetcher | None = None
        self._stream: Any = None
        self._failed = False

    def forget(self) -> None:
        """Expect nothing: the step is over, or has failed."""
        self.expected = None

    def fields(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """What vLLM's ``__init__`` would have stored, with the copy under way; None where the engine has to do it.

        Parameters
        ----------
        arguments
            Of vLLM's output object.
        """
        expected, self.expected = self.expected, None
        self.wanted = not self._failed and _only_tokens(arguments)
        if not self.wanted:
            return None
        tokens, stream = arguments["sampled_token_ids"], arguments["async_output_copy_stream"]
        tokens_cpu: Tensor | PromisedTokens
        landed: Any
        if expected is not None and expected[0] is tokens and expected[1].has_tokens:
            self.packed += 1
            tokens_cpu = landed = PromisedTokens(expected[1])
        else:
            try:
                fetched = self._fetch(tokens, stream)
            except Exception:
                self._failed, self.wanted = True, False
                logger.warning(
                    "omni_runner: bringing sampled tokens home is left to the engine from now on", exc_info=True
                )
                return None
            if fetched is None:
                return None
            self.copied += 1
            tokens_cpu, landed = fetched
        return {
            **_NO_OTHER_COPIES,
            "_model_runner_output": None,
            "_invalid_req_indices": arguments["invalid_req_indices"],
            "async_copy_ready_event": landed,
            "_sampled_token_ids": tokens,  # not to be freed before a copy is over; deleted by vLLM's `get_output`
            "vocab_size": arguments["vocab_size"],
            "sampled_token_ids_cpu": tokens_cpu,
        }

    def _fetch(self, tokens: Tensor, stream: Any) -> spanpack.Fetched | None:
        if not tokens.is_cuda or not tokens.is_contiguous() or not tokens.numel():
            return None
        if self._fetcher is None or self._stream is not stream:
            if self._fetcher is not None:
                self._fetcher.close()
            self._fetcher, self._stream = spanpack.Fetcher(tokens.device, stream), stream
        return self._fetcher.fetch(tokens)

    def close(self) -> None:
        """Give the memory back."""
        self.expected = None
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()


def _only_tokens(arguments: Mapping[str, Any]) -> bool:
    """Whether nothing but tokens is to be copied, as far as the arguments are known."""
    given = arguments.get
    return (
        given("logprobs_tensors") is None
        and given("routed_experts") is None
        and given("num_nans") is None
        and not given("check_ep_fault")
        and _OF_TOKENS <= arguments.keys() <= _KNOWN
    )
