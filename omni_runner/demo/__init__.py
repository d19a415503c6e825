"""The demo: the real engine with the stock runner and with ours, and recorded steps, compared byte for byte.

``python -m omni_runner.demo`` runs it. `__main__` says what happens in which order, `engine` is vLLM on the
CPU with either runner, `serve` one run of it in a process of its own, `payload_log` what a run leaves behind.
"""
