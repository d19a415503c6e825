"""Checks of the arguments before a program does any work; an error is one line and exit status 2."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn


class UsageError(Exception):
    """A given argument or file can't be used; the message says what was expected instead."""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text, which is longer."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> float:
    """Parse an option's value: a finite number greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"given {text!r}, expected a finite number greater than 0")
    return number


def positive_whole(text: str) -> int:
    """Parse an option's value: a whole number greater than 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"given {text!r}, expected a whole number greater than 0")
    return number


def check_folder(option: str, folder: Path) -> None:
    """Create a folder for results if it does not exist, and check that it is writable.

    Raises
    ------
    UsageError
        It is a file, or nothing can be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except FileExistsError as error:
        raise UsageError(f"{option}: {folder} is a file, expected a folder") from error
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {folder}: {error.strerror}; name another folder") from error


def check_file(option: str, file: Path) -> None:
    """Create the folder of a file, and check that the file can be written.

    Raises
    ------
    UsageError
        The folder is not writable, or `file` is a folder.
    """
    check_folder(option, file.parent)
    if file.is_dir():
        raise UsageError(f"{option}: {file} is a folder, expected the name of a file")


def read_result(file: Path, bench: str, fields: Collection[str]) -> dict[str, Any]:
    """Read the results that a benchmark wrote.

    Parameters
    ----------
    bench
        Name of the benchmark, as in the field ``bench`` of its results.
    fields
        Other fields that the results must have.

    Raises
    ------
    UsageError
        The file can't be read, or does not hold complete results of this benchmark.
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
