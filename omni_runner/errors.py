"""Every exception this package raises on purpose.

::

    OmniRunnerError
    ├── UpstreamMissing      vllm-omni (or vLLM) is not installed      also an ImportError
    ├── UpstreamMismatch     a name this package builds on is gone or has changed
    ├── SettingsError        a setting has an invalid value            also a ValueError
    ├── StageRefused         a stage cannot use the packed runner
    ├── TraceError           a trace cannot be read or written          also a ValueError
    └── BuilderThreadClosed  work was handed to a builder thread that no longer runs

Exceptions of a model, the engine or the packer pass through unchanged.
"""

from __future__ import annotations

__all__ = [
    "BuilderThreadClosed",
    "OmniRunnerError",
    "SettingsError",
    "StageRefused",
    "TraceError",
    "UpstreamMismatch",
    "UpstreamMissing",
]


class OmniRunnerError(Exception):
    """Base class of this package's exceptions."""


class UpstreamMissing(OmniRunnerError, ImportError):
    """vllm-omni or vLLM cannot be imported; the message says what to install."""


class UpstreamMismatch(OmniRunnerError):
    """The installed vllm-omni lacks names that this package builds on, or has changed them.

    Attributes
    ----------
    problems : tuple of str
        One entry for each name, e.g. ``"sample_tokens of the runner class is missing (seen in 0.28 and 0.30)"``.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class SettingsError(OmniRunnerError, ValueError):
    """A setting is invalid; the message names it, its value and what is allowed."""


class StageRefused(OmniRunnerError):
    """A stage cannot use the packed runner; the message says why.

    It reaches the user only for a generation stage or in strict mode; the stage then does not start.
    """


class TraceError(OmniRunnerError, ValueError):
    """A trace cannot be read or written; the message names the file and what is wrong with it."""


class BuilderThreadClosed(OmniRunnerError):
    """Work was submitted to a builder thread after `close()`, or in a process forked after the thread was created."""
