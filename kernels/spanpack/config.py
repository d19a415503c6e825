"""Launch configurations: which one a pack gets, by default, and on a GPU with a tuned file.

`load_configs` overrides the heuristic with results of `python -m spanpack.tune`: first the file shipped for exactly
this GPU, then the user's own file. A file that does not apply is ignored. Nothing is tuned here.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ._size_classes import LARGE, MEDIUM, SIZE_CLASSES, SMALL, LaunchConfig, size_class
from ._tuned_file import Tuned, read_tuned, tuned_file_name

logger = logging.getLogger("spanpack")

USER_FILE_VARIABLE = "SPANPACK_TUNED"
SHIPPED_FILES = Path(__file__).parent / "tuned"

DEFAULT_CONFIGS: tuple[LaunchConfig, ...] = (SMALL, MEDIUM, LARGE)


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """Which configuration a pack is launched with.

    Attributes
    ----------
    by_class
        Tuned configurations by name of the size class; the other classes use the default.
    direct_store_bytes
        Packs of up to this many device bytes are stored by the kernel into the mapped pinned slab, without a device
        slab and a copy. 0: the copy engine copies every pack to the host.
    source
        Where the configurations come from, for log messages.
    """

    by_class: Mapping[str, LaunchConfig] = field(default_factory=dict)
    direct_store_bytes: int = 0
    source: str = "defaults"

    def choose(self, device_bytes: int, num_segments: int) -> LaunchConfig:
        """The configuration for a pack of `device_bytes` bytes in `num_segments` segments."""
        group = size_class(device_bytes, num_segments)
        return self.by_class.get(group.name, group.default)

    @property
    def configs(self) -> tuple[LaunchConfig, ...]:
        """Every configuration that `choose` can return, each once."""
        return tuple(dict.fromkeys(self.by_class.get(group.name, group.default) for group in SIZE_CLASSES))


def load_configs(gpu_name: str, path: str | os.PathLike[str] | None = None) -> ConfigTable:
    """The configurations for a GPU: the defaults, overridden by the shipped file, then by the user's file.

    Parameters
    ----------
    gpu_name
        As `torch.cuda.get_device_name` returns it; a file applies to exactly this name.
    path
        The user's file, from `python -m spanpack.tune`; by default the file that the environment variable
        ``SPANPACK_TUNED`` names, if it is set.

    Returns
    -------
    ConfigTable
        Nothing is raised: a file that is missing, malformed, or was tuned for another GPU or another minor version of
        Triton is ignored, the user's with one warning. If only the defaults are left, one log line says so.
    """
    path = path or os.environ.get(USER_FILE_VARIABLE, "").strip() or None
    table = ConfigTable()
    shipped = SHIPPED_FILES / tuned_file_name(gpu_name)
    if shipped.is_file():
        table = _overlay(table, shipped, gpu_name, stale_level=logging.INFO)  # the user can't fix a shipped file
    if path is not None:
        table = _overlay(table, Path(path).expanduser(), gpu_name, stale_level=logging.WARNING)
    if table.source == "defaults":
        _log_once(logging.INFO, f"nothing tuned for {gpu_name}, Triton {triton_version()}; using the defaults")
    else:
        _log_once(logging.INFO, f"using the tuned configurations in {table.source}")
    return table


def _overlay(table: ConfigTable, path: Path, gpu_name: str, *, stale_level: int) -> ConfigTable:
    try:
        tuned = read_tuned(path)
    except (OSError, ValueError) as error:
        _log_once(logging.WARNING, f"ignoring the tuned configurations in {path}: {error}")
        return table
    why_stale = _why_stale(tuned, gpu_name)
    if why_stale:
        _log_once(stale_level, f"ignoring the tuned configurations in {path}: {why_stale}")
        return table
    direct = tuned.direct_store_bytes
    return ConfigTable(
        by_class={**table.by_class, **tuned.classes},
        direct_store_bytes=table.direct_store_bytes if direct is None else direct,
        source=str(path),
    )


def _why_stale(tuned: Tuned, gpu_name: str) -> str | None:
    if tuned.gpu != gpu_name:
        return f"tuned for {tuned.gpu!r}, this is {gpu_name!r}"
    here = triton_version()
    if tuned.triton.split(".")[:2] != here.split(".")[:2]:
        return f"tuned with Triton {tuned.triton}, this is {here}; run `python -m spanpack.tune` again"
    return None


def triton_version() -> str:
    """Version of the installed Triton; ``"none"`` if it can't be imported."""
    try:
        return str(importlib.import_module("triton").__version__)
    except Exception:  # noqa: BLE001 - a broken installation can raise anything on import
        return "none"


@lru_cache(maxsize=256)  # logs each message once, however many packers there are
def _log_once(level: int, message: str) -> None:
    logger.log(level, "spanpack: %s", message)
