"""A two-layer model whose payloads have the shapes of an Omni stage's payloads. Imports vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm_omni.model_executor.models.output_templates import OmniOutput

ARCHITECTURE = "OmniRunnerDemo"
HIDDEN_SIZE = 64
VOCABULARY = 512

_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_config(folder: Path) -> None:
    """Write a model config to `folder`; the engine generates dummy weights for it."""
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")


class DemoModel(Qwen3ForCausalLM):
    """A tiny Qwen3 whose payload combines those of a Thinker and a Talker, with mixed dtypes."""

    have_multimodal_outputs = True
    use_async_omni_output = True

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **_: Any,
    ) -> Any:
        """Return the hidden rows; other arguments that the Omni runner passes are ignored."""
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def make_omni_output(self, hidden: Tensor | OmniOutput, **_: Any) -> OmniOutput:
        """Return the hidden rows and the payload made from them.

        Parameters
        ----------
        hidden
            ``[rows, HIDDEN_SIZE] float32``.
        """
        if isinstance(hidden, OmniOutput):
            return hidden
        return OmniOutput(
            hidden,
            {
                "hidden_states": {"layers": {0: hidden.to(torch.bfloat16), 24: hidden * 3}},
                "codes": {"audio": (hidden[:, :4] * 1000).to(torch.int64)},
                "embed": {"tts_bos": [torch.ones(1, 1, HIDDEN_SIZE, dtype=torch.bfloat16)]},
                "meta": {"codec_streaming": (hidden[:, 0] > 0).to(torch.int8)},
            },
        )
