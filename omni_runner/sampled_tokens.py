"""Transfer of the sampled tokens to the host: in the pack of the step's payload, or by one copy of their own.

vLLM's output object creates a stream context, an event and a pinned tensor in every step, which is most of the cost of
an output once its payload is packed. The tokens are not needed before the payload, because `get_output` first waits for
the builder. They are therefore added to the pack: 64 more tokens in a megabyte. They are not added to packs that would
delay them or that they would make more expensive, see `lowering`; and if the next step's sampling needs the tokens as
well (penalties, some logits processors), only to small packs. Otherwise, and if nothing is packed, `spanpack.Fetcher`
makes the same copy as vLLM, on the same stream, without torch's share of its cost. On the device nothing changes: the
next step gets the same tensor.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor

import spanpack

if TYPE_CHECKING:
    from omni_runner.packing import PackedStep

logger = logging.getLogger("vllm.omni_runner")

# Arguments of vLLM's output object: those for the copy of the tokens, and those that request other copies.
_OF_TOKENS = frozenset(("sampled_token_ids", "invalid_req_indices", "async_output_copy_stream", "vocab_size"))
_KNOWN = _OF_TOKENS | {"logprobs_tensors", "routed_experts", "num_nans", "check_ep_fault"}

# What vLLM's ``__init__`` stores for those other copies if none is requested.
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
VLLM_FIELDS = frozenset(_NO_OTHER_COPIES) | {
    "_model_runner_output",
    "_invalid_req_indices",
    "async_copy_ready_event",
    "_sampled_token_ids",
    "vocab_size",
    "sampled_token_ids_cpu",
}


def stores_only(output_cls: type[Any], fields: frozenset[str]) -> bool:
    """Whether ``__init__`` of an output class, which will be skipped, stores nothing but some of these attributes.

    False if that cannot be seen: if it is not written in Python, is wrapped, or leaves all the storing to others.
    """
    init = output_cls.__init__
    if not isinstance(init, FunctionType) or hasattr(init, "__wrapped__"):
        return False
    stored = {step.argval for step in dis.get_instructions(init) if step.opname == "STORE_ATTR"}
    return bool(stored) and stored <= fields


class PromisedTokens:
    """Placeholder for packed tokens, and for their event, until the builder has made the tensor.

    Making a tensor costs more than all else in an output. The decode thread leaves it to the builder, for which
    `get_output` waits. Until then this object has the tensor's attributes and methods, which wait for the bytes;
    torch's functions do not accept it as a tensor.

    Attributes
    ----------
    kept
        The tensor; None until it has been made.
    """

    __slots__ = ("_step",)

    def __init__(self, step: PackedStep) -> None:
        self._step = step

    @property
    def kept(self) -> Tensor | None:
        """The tensor, once made."""
        return self._step.made_tokens

    def synchronize(self) -> None:
        """Sleep until the bytes are on the host, as vLLM's event does."""
        self._step.arrive()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked up when objects are copied or inspected
            raise AttributeError(name)
        return getattr(self._step.tokens(), name)


class Landed:
    """The event of tokens that are already on the host."""

    def synchronize(self) -> None:
        """Return at once."""


class SampledTokens:
    """Transfers one runner's sampled tokens to the host; cases that it does not support are left to the engine.

    Attributes
    ----------
    copied
        How many copies it has started.
    packed
        How many steps had their tokens in their pack.
    expected
        Tokens, and the step whose pack they may be in. The next output uses the pack if it is given these tokens.
    wanted
        Whether the next output is likely to get its tokens from here: the last one did, and nothing has failed.
    """

    def __init__(self) -> None:
        self.copied = self.packed = 0
        self.wanted = True
        self.expected: tuple[Tensor, PackedStep] | None = None
        self._fetcher: spanpack.Fetcher | None = None
        self._stream: Any = None
        self._failed = False

    def forget(self) -> None:
        """Clear `expected`: the step has ended or failed."""
        self.expected = None

    def fields(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Start the transfer and return what vLLM's ``__init__`` would have stored; None if the engine has to do it.

        Parameters
        ----------
        arguments
            Constructor arguments of vLLM's output object.
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
            "_sampled_token_ids": tokens,  # must not be freed before a copy ends; vLLM's `get_output` deletes it
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
        """Free the memory."""
        self.expected = None
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()


def _only_tokens(arguments: Mapping[str, Any]) -> bool:
    """Whether only tokens are to be copied; False if an argument is missing or unknown."""
    given = arguments.get
    return (
        given("logprobs_tensors") is None
        and given("routed_experts") is None
        and given("num_nans") is None
        and not given("check_ep_fault")
        and _OF_TOKENS <= arguments.keys() <= _KNOWN
    )
