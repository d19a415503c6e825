"""One run of the engine: ``python -m omni_runner.demo.serve stock|packed FILE [options]``.

Each runner has its own process, since the engine's state is global. Everything that vLLM writes goes to standard
error. Standard output carries one JSON object per line: ``{"ready": ...}`` when the engine has started and this
process waits for a line on standard input, then ``{"done": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# vLLM reads these when it is imported.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # the two runs' requests must have the same names
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_KV_BLOCK_ROWS = 32
_SHARED_PREFIX = [7 + 3 * (i % 50) for i in range(2 * _KV_BLOCK_ROWS)]


@dataclass(frozen=True)
class Request:
    """One prompt of the demo."""

    name: str
    prompt: list[int]
    max_tokens: int
    arrives_at_step: int
    consumed: bool = True
    temperature: float = 0.0


def requests() -> list[Request]:
    """Prompts of 1 to 100 tokens that arrive in waves, so that steps mix prefill and decode."""
    return [
        Request("r0", [*_SHARED_PREFIX, 11, 12, 13], 24, 0),
        Request("r1", [9] * 20, 60, 0, temperature=1.0),
        Request("r2", [5], 80, 0, consumed=False),  # alone in the end: steps without a consumer
        Request("r3", [100 + i for i in range(100)], 30, 4),
        Request("r4", [21, 22, 23, 24], 8, 4),
        Request("r5", [*_SHARED_PREFIX, 31], 32, 12),
        Request("r6", [300 + i % 7 for i in range(33)], 20, 12, consumed=False),
        Request("r7", [3, 1, 4, 1, 5, 9, 2, 6], 50, 20, temperature=1.0),
    ]


def start_engine(kind: str, model_folder: str, *, prefix_caching: bool, chunked_prefill: bool) -> Any:
    """Start vLLM with one of the two workers."""
    # Imported late: importing the engine takes seconds and reads the environment.
    import vllm_omni  # noqa: F401, PLC0415  patches vLLM
    from vllm import LLM, ModelRegistry  # noqa: PLC0415

    from omni_runner.demo import cpu_streams, engine, model  # noqa: PLC0415

    cpu_streams.install()
    engine.allow_async_scheduling()
    model.write_config(Path(model_folder))
    ModelRegistry.register_model(model.ARCHITECTURE, model.DemoModel)
    return LLM(
        model=model_folder,
        hf_overrides={"architectures": [model.ARCHITECTURE]},
        worker_cls=f"omni_runner.demo.engine.{kind.capitalize()}Worker",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        seed=0,
        max_model_len=256,
        max_num_seqs=len(requests()),
        # Enough tokens for every prompt at once, or so few that most prompts take several steps.
        max_num_batched_tokens=24 if chunked_prefill else 256,
        enable_prefix_caching=prefix_caching,
        block_size=_KV_BLOCK_ROWS,
        num_gpu_blocks_override=128,
        async_scheduling=True,
    )


def serve(llm: Any) -> None:
    """Run all requests through the engine, adding each at the step at which it arrives."""
    from vllm import SamplingParams  # noqa: PLC0415

    engine, waiting, step = llm.llm_engine, requests(), 0
    while waiting or engine.has_unfinished_requests():
        for request in [request for request in waiting if request.arrives_at_step <= step]:
            waiting.remove(request)
            sampling = SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                detokenize=False,
                ignore_eos=True,
            )
            engine.add_request(request.name, {"prompt_token_ids": request.prompt}, sampling)
        engine.step()
        step += 1


def counters(runner: Any) -> dict[str, Any]:
    """Return the packed runner's counters, for JSON; empty for the stock runner."""
    return dataclasses.asdict(runner.omni_runner_stats()) if hasattr(runner, "omni_runner_stats") else {}


def run(args: argparse.Namespace, channel: TextIO) -> dict[str, Any]:
    """Execute the whole run and return what to report."""
    with tempfile.TemporaryDirectory(prefix="omni-runner-demo-model-") as folder:
        llm = start_engine(args.kind, folder, prefix_caching=args.prefix_caching, chunked_prefill=args.chunked_prefill)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.without_consumer = {request.name for request in requests() if not request.consumed}
        _say(channel, ready=True)
        if not sys.stdin.readline():
            raise EOFError("whoever started this run is gone")
        serve(llm)
        facts = {"builder_us": runner.builder_us, "prefix_rows": runner.prefix_rows}
        runner.log.save(args.file, {"kind": args.kind, "counters": counters(runner), **facts})
    return {"file": str(args.file)}


def main(argv: list[str] | None = None) -> int:
    """Run the command line of one run."""
    parser = argparse.ArgumentParser(prog="python -m omni_runner.demo.serve", description=__doc__)
    parser.add_argument("kind", choices=("stock", "packed"))
    parser.add_argument("file", type=Path, help="where to leave the payloads, without suffix")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--chunked-prefill", action="store_true")
    args = parser.parse_args(argv)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, vLLM's C++ parts included, ends up in the log
    os.environ.update(ENVIRONMENT)
    try:
        _say(channel, done=run(args, channel))
    except BaseException as error:
        _say(channel, error=f"{type(error).__name__}: {error}")
        raise
    return 0


def _say(channel: TextIO, **message: Any) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    sys.exit(main())
