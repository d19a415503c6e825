"""Where the engine comes from on the GPU host: installed beside torch, or a folder that carries it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from bench.command_line import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHIVE = "engine.tar.xz"

# One process and no network: nothing may look for a hub, a daemon or a second interface.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # A carried engine may lack FlashInfer, so no engine uses its sampler.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_FLASHINFER_MOE_FP16": "0",
    # Where jax is installed, diffusers would import it: 10 s per start.
    "USE_TORCH": "1",
    "USE_JAX": "0",
    "USE_FLAX": "0",
    "USE_TF": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "4",
    "PYTHONUNBUFFERED": "1",
}


def check_engine(engine: Path) -> None:
    """Check that a folder carries the engine.

    Raises
    ------
    UsageError
        The folder carries neither the engine nor its archive.
    """
    if not (engine / ARCHIVE).exists() and not _carried(engine):
        raise UsageError(f"--engine: given {engine}, expected a folder with site/ and deps/, or with {ARCHIVE}")


def engine_environment(engine: Path | None, scratch: Path) -> dict[str, str]:
    """Environment variables for the processes that run the engine.

    Parameters
    ----------
    engine
        A folder with `site/` and `deps/`, or with the archive of both (`engine.tar.xz`), which is unpacked below
        `scratch` once. None if the engine is installed for this Python.
    scratch
        A folder to write to.

    Raises
    ------
    FileNotFoundError
        `engine` is given and holds neither.
    """
    paths = [REPOSITORY / "kernels", REPOSITORY]
    if engine is not None:
        root = _unpacked(engine, scratch) if (engine / ARCHIVE).exists() else engine
        carried = _carried(root)
        if not carried:
            raise FileNotFoundError(f"{engine} holds neither {ARCHIVE} nor site/ and deps/")
        paths += carried
    inherited = os.environ.get("PYTHONPATH")
    search = [str(path) for path in paths] + ([inherited] if inherited else [])
    return {**os.environ, **_OFFLINE, **_ENGINE, "PYTHONPATH": os.pathsep.join(search)}


def _carried(root: Path) -> list[Path]:
    """`site/` and `deps/` of a folder; empty if it does not hold both."""
    folders = [root / "site", root / "deps"]
    return folders if all(folder.is_dir() for folder in folders) else []


def _unpacked(engine: Path, scratch: Path) -> Path:
    archive = engine / ARCHIVE
    about = archive.stat()
    home = scratch / f"engine-{about.st_size:x}-{int(about.st_mtime):x}"
    stamp = home / "complete"
    if stamp.exists():
        return home
    start = time.perf_counter()
    home.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(home, filter="fully_trusted")
    # Compile now, as several processes will import these files at once. Files for other Pythons may fail harmlessly.
    folders = [str(home / name) for name in ("site", "deps")]
    compile_all = [sys.executable, "-m", "compileall", "-q", "-j", "0", *folders]
    subprocess.run(compile_all, stdout=subprocess.DEVNULL, check=False)
    stamp.touch()
    print(f"unpacked {archive} in {time.perf_counter() - start:.0f} s", flush=True)
    return home
