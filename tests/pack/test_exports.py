"""The public names, their documentation, and the examples in it."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import spanpack

KERNELS = Path(spanpack.__file__).parents[1]
PUBLIC = [
    "Batch",
    "BatchError",
    "ClosedError",
    "ColumnSpec",
    "DeviceError",
    "Fetched",
    "Fetcher",
    "InputError",
    "LeafError",
    "PackedTree",
    "Packer",
    "Placement",
    "PlacementError",
    "Plan",
    "PlanCache",
    "RowMap",
    "Sighting",
    "Snapshot",
    "SpanpackError",
    "Stats",
    "UnavailableError",
    "__version__",
    "flatten",
    "gather_torch",
    "gather_triton",
    "make_plan",
    "unflatten",
]
MODULES = [
    importlib.import_module(f"spanpack.{module.name}")
    for module in pkgutil.iter_modules(spanpack.__path__)
    if module.name != "_kernels"  # device code, imported only where Triton is
]


def test_the_public_names_are_these() -> None:
    assert sorted(spanpack.__all__) == PUBLIC
    assert all(hasattr(spanpack, name) for name in PUBLIC)


def public_members() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name in PUBLIC:
        thing = getattr(spanpack, name)
        if name != "__version__":
            found.append((name, thing))
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            members = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")]
            found += [
                (f"{name}.{key}", value)
                for key, value in members
                if inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod)
            ]
    return found


@pytest.mark.parametrize(("name", "thing"), public_members(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_public_name_is_documented(name: str, thing: object) -> None:
    assert inspect.getdoc(thing), name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("error", [getattr(spanpack, name) for name in PUBLIC if name.endswith("Error")])
def test_every_error_has_one_root_and_bad_input_is_a_value_error(error: type[Exception]) -> None:
    assert issubclass(error, spanpack.SpanpackError)
    bad_input = error.__name__ in ("InputError", "BatchError", "PlacementError", "LeafError", "DeviceError")
    assert issubclass(error, ValueError) == bad_input


def test_importing_needs_neither_the_engine_nor_triton() -> None:
    code = (
        "import sys, spanpack\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'vllm_omni', 'omni_runner'}))\n"
        "print('spanpack._kernels' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split("\n")[:2] == ["[]", "False"]
