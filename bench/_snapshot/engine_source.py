"""Take single functions and classes out of vllm-omni's sources, installed or in a wheel, and run them as they are.

The stock providers run the engine's own code, but importing the engine takes half a minute, needs all its
dependencies, and patches other packages. A snapshot needs only a few dozen functions. They are cut out of the module's
syntax tree and executed in a separate namespace; imports of the engine itself are left out, and the caller provides
the few names that come from it.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import logging
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from bench._snapshot.provider import Unavailable

PACKAGE = "vllm_omni"
_ENGINE_PACKAGES = ("vllm", "vllm_omni")


class EngineSource:
    """The sources of one version of vllm-omni.

    Attributes
    ----------
    version : str
        Version of vllm-omni.
    origin : str
        ``"installed"``, or the wheel's file name.
    """

    def __init__(self, version: str, origin: str, read: Callable[[str], str]) -> None:
        self.version = version
        self.origin = origin
        self._read = read
        self._compiled: dict[tuple[Any, ...], CodeType] = {}  # a cache: providers are made anew for every scenario

    @classmethod
    def from_wheel(cls, wheel: Path) -> EngineSource:
        """Read from a wheel without unpacking it.

        Raises
        ------
        Unavailable
            The file is not a wheel of vllm-omni.
        """
        try:
            archive = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise Unavailable(f"{wheel}: {error}") from error
        version = next(
            (name.split("-")[1] for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None
        )
        if f"{PACKAGE}/__init__.py" not in archive.namelist() or version is None:
            raise Unavailable(f"{wheel} is no wheel of vllm-omni")
        return cls(version.removesuffix(".dist"), wheel.name, lambda path: archive.read(path).decode())

    @classmethod
    def installed(cls) -> EngineSource:
        """Read from the installed package, without importing it.

        Raises
        ------
        Unavailable
            vllm-omni is not installed.
        """
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise Unavailable("vllm-omni is not installed; name a wheel with --stock-wheel")
        root = Path(spec.submodule_search_locations[0]).parent
        found = [path.name for path in root.glob(f"{PACKAGE}-*.dist-info")]
        version = found[0].split("-")[1].removesuffix(".dist") if found else "unknown"
        return cls(version, "installed", lambda path: (root / path).read_text(encoding="utf-8"))

    def take(
        self,
        namespace: dict[str, Any],
        module: str,
        names: Collection[str] | None = None,
        methods: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Execute parts of a module in `namespace`.

        Parameters
        ----------
        namespace
            Receives the definitions, which also look up the names they use in it.
        module
            Module below ``vllm_omni``, e.g. ``"worker.gpu_ar_model_runner"``.
        names
            Top-level functions, classes and constants; None for all of them. The module's imports from outside the
            engine always come along.
        methods
            Methods to keep, by class; the bases and all other members of such a class are left out.

        Raises
        ------
        Unavailable
            The module or one of the names does not exist in this version.
        """
        methods = methods or {}
        key = (module, None if names is None else tuple(names), tuple((name, tuple(methods[name])) for name in methods))
        code = self._compiled.get(key)
        if code is None:
            code = self._compiled[key] = self._compile(module, names, methods)
        namespace.setdefault("__name__", f"{PACKAGE}.{module}")
        namespace.setdefault("init_logger", logging.getLogger)
        namespace.setdefault("logger", logging.getLogger(PACKAGE))
        # Class definitions look up their module in `sys.modules`.
        sys.modules.setdefault(namespace["__name__"], type(sys)(namespace["__name__"]))
        exec(code, namespace)

    def _compile(self, module: str, names: Collection[str] | None, methods: Mapping[str, Collection[str]]) -> CodeType:
        path = f"{PACKAGE}/{module.replace('.', '/')}.py"
        try:
            tree = ast.parse(self._read(path), path)
        except (OSError, KeyError, SyntaxError) as error:
            raise Unavailable(f"vllm-omni {self.version} ({self.origin}): {path}: {error}") from error
        missing = ({*names, *methods} if names is not None else set(methods)) - {
            name for statement in tree.body for name in _defines(statement)
        }
        body = [kept for statement in tree.body for kept in _keep(statement, names, methods, missing)]
        if missing:
            raise Unavailable(f"vllm-omni {self.version} ({self.origin}): {module} has no {', '.join(sorted(missing))}")
        code: CodeType = compile(
            ast.Module(body, type_ignores=[]), path, "exec", __future__.annotations.compiler_flag, dont_inherit=True
        )
        return code


def _keep(
    statement: ast.stmt, names: Collection[str] | None, methods: Mapping[str, Collection[str]], missing: set[str]
) -> list[ast.stmt]:
    """The statement, a class reduced to its wanted methods, or nothing."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [] if _imports_engine(statement) else [statement]
    if isinstance(statement, ast.ClassDef) and statement.name in methods:
        wanted = set(methods[statement.name])
        kept = [item for item in statement.body if isinstance(item, ast.FunctionDef) and item.name in wanted]
        missing.update(f"{statement.name}.{name}" for name in wanted - {item.name for item in kept})
        bare = ast.ClassDef(statement.name, bases=[], keywords=[], body=[*kept] or [ast.Pass()], decorator_list=[])
        if sys.version_info >= (3, 12):
            bare.type_params = []
        return [ast.fix_missing_locations(ast.copy_location(bare, statement))]
    if names is None or any(name in names for name in _defines(statement)):
        return [statement]
    return []


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _imports_engine(statement: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(statement, ast.ImportFrom):
        modules = [statement.module or "." * statement.level]
    else:
        modules = [alias.name for alias in statement.names]
    return any(module.split(".")[0] in (*_ENGINE_PACKAGES, "") for module in modules)
