"""The demo compares our runner with the stock runner, and packed recorded steps with the reference, byte for byte.

``python -m omni_runner.demo`` runs it. `__main__` is the command, `engine` sets up vLLM on the CPU with either
runner, `serve` is one run of the engine in its own process, and `payload_log` stores the outputs of a run.
"""
