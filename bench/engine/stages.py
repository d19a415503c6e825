"""The stages that the bench runs: the model, the part of it that runs, and the number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CONVERSIONS = "vllm_omni.model_executor.stage_input_processors"
_QWEN3_OMNI = {"model_arch": "Qwen3OmniMoeForConditionalGeneration", "skip_mm_profiling": True}


#: The compared variants; `variants.py` puts them into a live engine.
VARIANTS = ("stock", "stock_batched_clones", "stock_tuned", "ours")
#: Measured in addition to the table: timelines of a few steps, a process that takes the chunks, a consumer that lags
#: without limit, and recorded steps.
EXTRAS = ("profile", "consumer", "backlog", "traces")


@dataclass(frozen=True)
class Stage:
    """One autoregressive stage.

    Attributes
    ----------
    model
        Name of its model folder.
    next_stage_input
        The engine's function that turns a payload into the next stage's input, run by the connector's sender thread.
    steps
        Decode steps of one measured pass. A step of 64 requests takes 12 (thinker) to 36 ms (talker).
    greedy
        Whether sampling is greedy; otherwise it is seeded in the compared passes.
    config
        The engine arguments that are specific to the stage.
    """

    model: str
    next_stage_input: str
    steps: int
    greedy: bool
    config: Mapping[str, Any] = field(repr=False)


STAGES = {
    "thinker": Stage(
        model="qwen3_omni",
        next_stage_input=f"{_CONVERSIONS}.qwen3_omni.thinker2talker_async_chunk",
        steps=150,
        greedy=True,
        config={**_QWEN3_OMNI, "stage_id": 0, "model_stage": "thinker", "hf_config_name": "thinker_config"},
    ),
    "tts": Stage(
        model="qwen3_tts",
        next_stage_input=f"{_CONVERSIONS}.qwen3_tts.talker2code2wav_async_chunk",
        steps=90,
        greedy=False,
        config={"stage_id": 0, "model_stage": "qwen3_tts", "model_arch": "Qwen3TTSTalkerForConditionalGeneration"},
    ),
    "talker": Stage(
        model="qwen3_omni",
        next_stage_input=f"{_CONVERSIONS}.qwen3_omni.talker2code2wav_async_chunk",
        steps=60,
        greedy=False,
        config={**_QWEN3_OMNI, "stage_id": 1, "model_stage": "talker", "hf_config_name": "talker_config"},
    ),
}
