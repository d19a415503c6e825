"""Requests with random prompts: the same for the same index, in every pass and every process."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm_omni  # noqa: F401  patches vllm, so it must come before vllm's own modules
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm_omni.engine import OmniEngineCoreRequest

IM_START, IM_END, USER, ASSISTANT, NEWLINE = 151644, 151645, 872, 77091, 198
FINAL_STAGE_ID = 2
Prompt = tuple[list[int], dict[str, Any]]  # token ids, and the other inputs of the stage


class RequestMaker:
    """Makes the arguments of `EngineCore.add_request`.

    Parameters
    ----------
    stage
        Name of the stage; each stage has its own kind of prompt.
    greedy
        Whether to sample greedily; otherwise at temperature 0.9.
    prompt_tokens
        Length of the user's turn; TTS prompts have a fixed length.
    """

    def __init__(self, core: EngineCore, config: VllmConfig, stage: str, greedy: bool, prompt_tokens: int = 32) -> None:
        self._core = core
        self._prompt = {"thinker": self._thinker, "talker": self._talker, "tts": self._tts}[stage]
        self._greedy = greedy
        self._tokens = prompt_tokens
        self._hf_config = config.model_config.hf_config

    def make(self, request_id: str, index: int, steps: int, seeded: bool) -> tuple[Any, int]:
        """Make a request of `steps` output tokens; a `seeded` one samples from its own random generator."""
        random = torch.Generator().manual_seed(1234 + index)
        token_ids, buffer = self._prompt(random, steps)
        buffer["omni_final_stage_id"] = FINAL_STAGE_ID  # as the orchestrator marks a request that later stages serve
        wire = OmniEngineCoreRequest(
            request_id=request_id,
            external_req_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=self._sampling(index, steps, seeded),
            model_intermediate_buffer=buffer,
            additional_information=None,
            mm_features=None,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request, wave = self._core.preprocess_add_request(wire)
        request.additional_information = None
        request.external_req_id = request_id
        return request, wave

    def _sampling(self, index: int, steps: int, seeded: bool) -> SamplingParams:
        length = {"max_tokens": steps, "ignore_eos": True, "detokenize": False}
        if self._greedy:
            return SamplingParams(temperature=0.0, **length)
        seed = 42 + index if seeded else None
        return SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=seed, **length)

    def _words(self, random: torch.Generator, count: int) -> list[int]:
        return torch.randint(1000, 140_000, (count,), generator=random).tolist()

    def _thinker(self, random: torch.Generator, _steps: int) -> Prompt:
        words = self._words(random, self._tokens - 6)
        return [IM_START, USER, *words, IM_END, IM_START, ASSISTANT, NEWLINE], {}

    def _talker(self, random: torch.Generator, steps: int) -> Prompt:
        """The thinker's embeddings, hidden states and token ids, as the talker gets them."""
        hidden_size = self._hf_config.thinker_config.text_config.hidden_size
        turn = [IM_START, USER, *self._words(random, self._tokens - 4), IM_END, NEWLINE]
        token_ids = [*turn, IM_START, ASSISTANT, NEWLINE, 1234]

        def rows(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=random) * 0.5).to(torch.bfloat16)

        embeddings = {"prefill": rows(len(token_ids), hidden_size), "decode": rows(steps, hidden_size)}
        embeddings |= {name: rows(1, 1, hidden_size) for name in ("tts_bos", "tts_eos", "tts_pad")}
        buffer = {
            "embed": embeddings,
            "hidden_states": {"output": rows(len(token_ids), hidden_size)},
            "ids": {"all": token_ids, "prompt": token_ids[:-1]},
            "meta": {},
        }
        return [0] * (len(turn) + 9), buffer  # the talker's own prompt: the user's turn and nine more rows

    def _tts(self, random: torch.Generator, _steps: int) -> Prompt:
        text = " ".join(f"w{word}" for word in self._words(random, 40))
        buffer = {"text": [text], "task_type": ["CustomVoice"], "speaker": ["vivian"], "language": ["English"]}
        return [1] * 64, buffer  # the length is arbitrary: the model makes its own prompt embeddings
