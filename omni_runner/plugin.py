"""What the entry point does when ``OMNI_RUNNER=1``.

vLLM loads its general plugins in the serving process while it parses the command line, and again in every
engine, worker and model-inspection process. By then vllm-omni's own general plugin and the current platform
have been imported. The stages are resolved later, in the serving process: each AR stage without a
`worker_cls` of its own takes the one that the platform names. Making the platform name ours reaches every
worker through the stage's configuration and shows in the engine's logs. It does not affect stages with a
`worker_cls` in the deploy YAML, generation stages, and platforms that have workers of their own.
This module imports neither worker nor runner; the worker reads and checks all other variables.
"""

from __future__ import annotations

import importlib.util
import logging
import sys

from omni_runner.errors import SettingsError
from omni_runner.platforms import current_platform, name_packed_ar_worker, platform_name
from omni_runner.settings import asks_to_be_on, asks_to_be_strict

logger = logging.getLogger("vllm.omni_runner.plugin")  # below "vllm", so that the engine's handler shows it

SWITCHED_PLATFORMS = ("cuda", "rocm")


def activate() -> bool:
    """Switch AR stages over to `PackedGPUARWorker` if the environment asks for it.

    Returns
    -------
    bool
        Whether the platform now names our worker.
    """
    try:
        if not asks_to_be_on():
            return False
    except SettingsError as error:
        if not asks_to_be_strict():  # in strict mode the worker refuses to start
            logger.warning("omni_runner stays off: %s", error)
            return False
    if "vllm_omni" not in sys.modules:
        # Importing vllm_omni patches vLLM, so it is not imported in a process that does not use it.
        if importlib.util.find_spec("vllm_omni") is None:
            logger.warning("omni_runner stays off: OMNI_RUNNER is set, but vllm-omni is not installed")
        else:
            logger.info("omni_runner stays off: this process does not use vllm-omni")
        return False
    platform = current_platform()
    name = platform_name(platform)
    if name not in SWITCHED_PLATFORMS:
        logger.info("omni_runner stays off: platform %s is left alone", name)
        return False
    name_packed_ar_worker(platform)
    logger.debug("omni_runner: AR stages without a worker_cls take omni_runner.PackedGPUARWorker")
    return True
