"""What every program checks before it does any work; what can't be used is one line and exit status 2."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn


class UsageError(Exception):
    """Something that was given can't be used; the message says what was expected instead."""


class Parser(argparse.ArgumentParser):
    """Refuses in one line: the usage of these programs is longer than what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> float:
    """A number greater than 0, as the type of an option."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"given {text!r}, expected a finite number greater than 0")
    return number


def positive_whole(text: str) -> int:
    """A whole number greater than 0, as the type of an option."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"given {text!r}, expected a whole number greater than 0")
    return number


def check_folder(option: str, folder: Path) -> None:
    """Make a folder for results if there is none yet.

    Raises
    ------
    UsageError
        Nothing can be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except FileExistsError as error:
        raise UsageError(f"{option}: {folder} is a file, expected a folder") from error
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {folder}: {error.strerror}; name another folder") from error


def check_file(option: str, file: Path) -> None:
    """Make the folder of a file that will be written.

    Raises
    ------
    UsageError
        It can't be written there.
    """
    check_folder(option, file.parent)
    if file.is_dir():
        raise UsageError(f"{option}: {file} is a folder, expected the name of a file")


def read_result(file: Path, bench: str, fields: Collection[str]) -> dict[str, Any]:
    """What a benchmark wrote.

    Parameters
    ----------
    bench
        Which benchmark, as its results say in their field ``bench``.
    fields
        Others that must be there.

    Raises
    ------
    UsageError
        The file can't be read, or is something else.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{file} is not JSON ({error}); expected a complete file of results") from error
    found = result.get("bench") if isinstance(result, dict) else None
    if found != bench:
        raise UsageError(f"{file}: its field 'bench' is {found!r}, expected results in which it is {bench!r}")
    if missing := [field for field in fields if field not in result]:
        raise UsageError(f"{file} lacks {', '.join(missing)}; expected a complete file of results")
    return result
