"""Model folders without weights, for `load_format="dummy"`: configs at released size and a stand-in tokenizer.

The configs in `model_configs/` have the sizes and token ids of the released models. Only parts that no decode step uses
are smaller: the audio and vision towers of Qwen3-Omni have two layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).with_name("model_configs")
MODELS = {"qwen3_omni": "qwen3_omni.json", "qwen3_tts": "qwen3_tts.json"}

# Tokens whose ids the models and their processors look up by name. All other ids become words `w<id>`.
SPECIAL_IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<|audio_start|>": 151669,
    "<|audio_end|>": 151670,
    "<tts_pad>": 151671,
    "<tts_text_bos>": 151672,
    "<tts_text_eod>": 151673,
    "<tts_text_bos_single>": 151674,
    "<|audio_pad|>": 151675,
}
WORD_IDS = {"user": 872, "system": 8948, "assistant": 77091}
# Attributes that the Qwen3-Omni processor reads from its tokenizer.
PROCESSOR_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


def write_models(folder: Path) -> dict[str, Path]:
    """Write one folder per model below `folder`; returns them by name."""
    written = {}
    for name, config in MODELS.items():
        model = folder / name
        model.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CONFIGS / config, model / "config.json")
        shutil.copyfile(CONFIGS / "processor.json", model / "preprocessor_config.json")
        _write_tokenizer(model)
        written[name] = model
    codec = written["qwen3_tts"] / "speech_tokenizer"  # Qwen3-TTS reads its codec's settings at start-up
    codec.mkdir(exist_ok=True)
    shutil.copyfile(CONFIGS / "codec.json", codec / "config.json")
    shutil.copyfile(CONFIGS / "codec_features.json", codec / "preprocessor_config.json")
    return written


def _write_tokenizer(model: Path) -> None:
    named = {token_id: token for token, token_id in (SPECIAL_IDS | WORD_IDS).items()}
    vocabulary = {named.get(token_id, f"w{token_id}"): token_id for token_id in range(max(named) + 1)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    _write_json(
        model / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": token_id, "content": token, **flags} for token, token_id in SPECIAL_IDS.items()],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        },
    )
    _write_json(
        model / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "w0",
            "model_max_length": 131072,
            "extra_special_tokens": PROCESSOR_TOKENS,
            **PROCESSOR_TOKENS,
        },
    )
    ids = {"eos_token_id": SPECIAL_IDS["<|im_end|>"], "pad_token_id": SPECIAL_IDS["<|endoftext|>"]}
    _write_json(model / "generation_config.json", ids)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, separators=(",", ":")))
