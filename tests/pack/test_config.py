"""Launch configurations: the heuristic, tuned files over it, and files that don't fit left aside."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spanpack import config
from spanpack._size_classes import SIZE_CLASSES, size_class
from spanpack._tuned_file import parse_tuned, read_tuned, tuned_file_name, write_tuned
from spanpack.config import DEFAULT_CONFIGS, ConfigTable, LaunchConfig, load_configs

GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A machine with Triton 3.6.0 and no shipped files, on which nothing was logged yet."""
    monkeypatch.setattr(config, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(config, "SHIPPED_FILES", tmp_path / "shipped")
    monkeypatch.delenv("SPANPACK_TUNED", raising=False)
    config._log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="spanpack")
    yield
    config._log_once.cache_clear()


def entry(tile_bytes: int = 2048, num_warps: int = 1, **changes: Any) -> dict[str, Any]:
    measured = {"alone_us": 2, "busy_us": 9.5, "default_alone_us": 2.5, "default_busy_us": 10.5, "gain": 0.15}
    return {"tile_bytes": tile_bytes, "num_warps": num_warps, **measured, **changes}


def tuned(**changes: Any) -> dict[str, Any]:
    document = {
        "format": 1,
        "gpu": GPU,
        "triton": "3.6.0",
        "torch": "2.11.0+cu130",
        "date": "2026-11-29",
        "complete": True,
        "direct_store_bytes": 65536,
        "classes": {"small": entry()},
    }
    return {**document, **changes}


def write(path: Path, document: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


@pytest.mark.parametrize(
    ("device_bytes", "num_segments", "expected"),
    [
        (0, 0, "scattered_tiny"),
        (8192, 64, "scattered_tiny"),
        (4096, 1, "scattered_tiny"),
        (4097, 1, "tiny"),
        (1 << 16, 1, "tiny"),
        ((1 << 16) + 1, 1, "small"),
        (1 << 21, 3, "small"),
        ((1 << 21) + 1, 3, "medium"),
        (1 << 24, 3, "medium"),
        ((1 << 24) + 1, 3, "large"),
        (1 << 40, 3, "large"),
        (1 << 40, 1 << 30, "scattered"),
    ],
)
def test_every_pack_has_a_size_class(device_bytes: int, num_segments: int, expected: str) -> None:
    assert size_class(device_bytes, num_segments).name == expected
    assert size_class(device_bytes, num_segments).default in DEFAULT_CONFIGS


def test_without_files_the_defaults_count_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        table = load_configs(GPU)
    assert table == ConfigTable()
    assert table.configs == DEFAULT_CONFIGS
    assert table.choose(1 << 20, 3) == size_class(1 << 20, 3).default
    assert table.direct_store_bytes == 0
    assert levels(caplog) == ["INFO"]
    assert GPU in caplog.text


def test_the_shipped_file_counts_for_its_gpu_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "shipped" / tuned_file_name(GPU), tuned())
    table = load_configs(GPU)
    assert table.choose(1 << 20, 3) == LaunchConfig(2048, 1)
    assert table.choose(1 << 30, 3) == size_class(1 << 30, 3).default
    assert table.direct_store_bytes == 65536
    assert table.configs == (DEFAULT_CONFIGS[0], LaunchConfig(2048, 1), *DEFAULT_CONFIGS[1:])
    assert load_configs(GPU + " NVL") == ConfigTable()
    assert load_configs("nvidia h200") == ConfigTable()  # the same file name, another GPU
    assert "WARNING" not in levels(caplog)


def test_the_users_file_goes_over_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"small": entry(), "large": entry(8192, 1)}
    write(tmp_path / "shipped" / tuned_file_name(GPU), tuned(classes=both))
    own = write(tmp_path / "own.json", tuned(classes={"large": entry(65536, 8)}, direct_store_bytes=0))
    table = load_configs(GPU, own)
    assert table.by_class == {"small": LaunchConfig(2048, 1), "large": LaunchConfig(65536, 8)}
    assert table.direct_store_bytes == 0
    monkeypatch.setenv("SPANPACK_TUNED", str(own))
    assert load_configs(GPU) == table
    assert load_configs(GPU, tmp_path / "absent.json").by_class["large"] == LaunchConfig(8192, 1)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gpu": "NVIDIA H100"}, id="other-gpu"),
        pytest.param({"triton": "3.7.0"}, id="other-minor"),
        pytest.param({"triton": "4.6.0"}, id="other-major"),
    ],
)
def test_a_stale_file_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str]
) -> None:
    path = write(tmp_path / "own.json", tuned(**changes))
    for _ in range(3):
        assert load_configs(GPU, path) == ConfigTable()
    assert levels(caplog) == ["WARNING", "INFO"]
    assert all(text in caplog.text for text in (str(path), *changes.values()))


def test_another_patch_release_of_triton_is_not_stale(tmp_path: Path) -> None:
    path = write(tmp_path / "own.json", tuned(triton="3.6.1"))
    assert load_configs(GPU, path).by_class


def test_a_stale_shipped_file_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "shipped" / tuned_file_name(GPU), tuned(triton="3.5.0"))
    assert load_configs(GPU) == ConfigTable()
    assert levels(caplog) == ["INFO", "INFO"]


MALFORMED = {
    "empty": "",
    "not-json": "{",
    "binary": "\x00",
    "deep": "[" * 100_000,
    "a-list": [],
    "no-format": {"gpu": GPU},
    "other-format": tuned(format=2),
    "no-gpu": tuned(gpu=None),
    "no-date": tuned(date=""),
    "complete-is-text": tuned(complete="yes"),
    "classes-is-a-list": tuned(classes=[]),
    "class-is-a-number": tuned(classes={"small": 1}),
    "unknown-class": tuned(classes={"gigantic": entry()}),
    "odd-tile": tuned(classes={"small": entry(3000)}),
    "tiny-tile": tuned(classes={"small": entry(32)}),
    "huge-tile": tuned(classes={"small": entry(1 << 30)}),
    "tile-is-a-float": tuned(classes={"small": entry(tile_bytes=4096.0)}),
    "tile-is-true": tuned(classes={"small": entry(num_warps=True)}),
    "no-warps": tuned(classes={"small": entry(num_warps=0)}),
    "time-is-nan": tuned(classes={"small": entry(alone_us=float("nan"))}),
    "no-gain": tuned(classes={"small": entry(gain=None)}),
    "negative-threshold": tuned(direct_store_bytes=-1),
    "threshold-is-text": tuned(direct_store_bytes="64K"),
    "threshold-is-true": tuned(direct_store_bytes=True),
}


def test_what_the_packer_has_no_use_for_is_not_looked_at(tmp_path: Path) -> None:
    """Such as a threshold that earlier files have."""
    for value in (0, 4096, None, "64K"):
        own = write(tmp_path / "own.json", tuned(mapped_address_bytes=value, rejected=[]))
        assert load_configs(GPU, own).direct_store_bytes == 65536


@pytest.mark.parametrize("document", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, document: Any
) -> None:
    path = write(tmp_path / "own.json", document)
    for _ in range(3):
        assert load_configs(GPU, path) == ConfigTable()
    assert levels(caplog) == ["WARNING", "INFO"]
    assert str(path) in caplog.text


def test_a_file_that_cant_be_read_is_ignored_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"gpu": "\xe9"}')
    (tmp_path / "long.json").write_bytes(b" " * (1 << 21))
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "latin.json", tmp_path / "long.json"):
        assert load_configs(GPU, path) == ConfigTable()
    assert levels(caplog) == ["WARNING", "INFO", "WARNING", "WARNING", "WARNING"]


def test_only_what_can_be_read_back_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "own.json"
    write_tuned(path, tuned())
    before = path.read_bytes()
    assert read_tuned(path) == parse_tuned(tuned())
    with pytest.raises(ValueError, match="tile_bytes is 3000"):
        write_tuned(path, tuned(classes={"small": entry(3000)}))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["own.json"]


def test_shipped_files_are_right() -> None:
    folder = Path(config.__file__).parent / "tuned"
    for path in folder.glob("*.json"):
        shipped = read_tuned(path)
        assert path.name == tuned_file_name(shipped.gpu)
        assert set(shipped.classes) == {group.name for group in SIZE_CLASSES}, "tune it in full before shipping it"
        assert shipped.direct_store_bytes is not None
