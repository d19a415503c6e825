"""Pipelines and model flags of the installed vllm-omni, read from its source.

Importing a model needs its libraries and often a GPU, and a model sets its flags when it is constructed.
``omni-runner doctor`` has neither, so it reads only constants from the source and runs none of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MODEL_FLAGS = ("use_async_omni_output", "has_postprocess", "eager_omni_postprocess_before_async_output")

_MODELS = Path("model_executor", "models")
_KINDS = {"LLM_AR": "ar", "LLM_GENERATION": "generation", "DIFFUSION": "diffusion"}


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of a pipeline.

    Attributes
    ----------
    stage_id : int
        Number of the stage in the deploy YAML.
    name : str
        The engine's `model_stage`: ``thinker``, ``talker``, ...
    kind : str
        ``ar``, ``generation`` or ``diffusion``; only ``ar`` stages have the runner that this package replaces.
    architecture : str
        Name of the model in vllm-omni's registry; empty if the source computes it.
    """

    stage_id: int
    name: str
    kind: str
    architecture: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a model, and the name of its bundled deploy YAML (empty if it has none)."""

    name: str
    deploy_name: str
    stages: tuple[PipelineStage, ...]


@dataclass(frozen=True, slots=True)
class EngineSource:
    """The source code of one vllm-omni.

    Attributes
    ----------
    root : Path
        Folder of the package ``vllm_omni``.
    """

    root: Path
    _parsed: dict[Path, ast.Module] = field(default_factory=dict, compare=False, repr=False)

    def pipelines(self) -> dict[str, Pipeline]:
        """Return by name all pipelines whose stages can all be read as constants."""
        found = {}
        for path in sorted((self.root / _MODELS).glob("*/pipeline.py")):
            module = self._parse(path)
            constants = _constants(module)
            for call in _calls(module, "PipelineConfig"):
                pipeline = _read_pipeline(call, constants)
                if pipeline is not None:
                    found[pipeline.name] = pipeline
        return found

    def model_flags(self, architecture: str, stage_name: str) -> dict[str, bool | None]:
        """Return a model's values of `MODEL_FLAGS` in a stage; None where a value depends on more than the stage."""
        if not architecture:
            return dict.fromkeys(MODEL_FLAGS)
        # The engine treats an absent flag as False.
        flags: dict[str, bool | None] = dict.fromkeys(MODEL_FLAGS, False)
        place = self._registry().get(architecture)
        if place is None:  # one of vLLM's own models, which do not have these flags
            return flags
        folder, module, class_name = place
        path = self.root / _MODELS / folder / f"{module}.py"
        # Bases first, so that a class's own assignments override those of its bases.
        for definition in reversed(list(self._class_chain(path, class_name))):
            _apply(definition.body, flags, stage_name, target="")
            for method in definition.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    _apply(method.body, flags, stage_name, target="self")
        return flags

    def _registry(self) -> Mapping[str, Sequence[str]]:
        """Return architecture -> folder, module, class."""
        for statement in self._parse(self.root / _MODELS / "registry.py").body:
            if isinstance(statement, ast.Assign) and _name(statement.targets[0]) == "_OMNI_MODELS":
                registry: Mapping[str, Sequence[str]] = ast.literal_eval(statement.value)
                return registry
        return {}

    def _class_chain(self, path: Path, class_name: str) -> Iterator[ast.ClassDef]:
        """Yield the class, then those of its bases that vllm-omni defines, in no particular order."""
        if not path.is_file():
            return
        module = self._parse(path)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                yield node
                for base in node.bases:
                    yield from self._class_chain(path, _name(base))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == class_name and node.module.startswith("vllm_omni."):
                        source = self.root.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
                        yield from self._class_chain(source, alias.name)

    def _parse(self, path: Path) -> ast.Module:
        if path not in self._parsed:
            self._parsed[path] = ast.parse(path.read_text(encoding="utf-8"))
        return self._parsed[path]


def _read_pipeline(call: ast.Call, constants: Mapping[str, str]) -> Pipeline | None:
    values = {word.arg: word.value for word in call.keywords if word.arg}
    name = _text(values.get("model_type"), constants)
    stages = values.get("stages")
    if not name or not isinstance(stages, (ast.Tuple, ast.List)):
        return None
    default_architecture = _text(values.get("model_arch"), constants)
    found = []
    for stage in stages.elts:
        words = {word.arg: word.value for word in stage.keywords if word.arg} if isinstance(stage, ast.Call) else {}
        stage_id = words.get("stage_id")
        if not (isinstance(stage_id, ast.Constant) and isinstance(stage_id.value, int)):
            return None  # better no pipeline than one that seems to lack a stage
        kind = _KINDS.get(_name(words["execution_type"]), "?") if "execution_type" in words else "ar"
        architecture = _text(words.get("model_arch"), constants) or default_architecture
        stage_name = _text(words.get("model_stage"), constants)
        found.append(PipelineStage(stage_id.value, stage_name, kind, architecture))
    return Pipeline(name, _text(values.get("default_deploy_config_name"), constants), tuple(found))


def _apply(body: Sequence[ast.stmt], flags: dict[str, bool | None], stage_name: str, *, target: str) -> None:
    """Apply the assignments in `body` to flags of `target` ("self", or "" for bare names)."""
    for statement in body:
        if isinstance(statement, ast.If):
            holds = _stage_test(statement.test, stage_name)
            if holds is not None:
                _apply(statement.body if holds else statement.orelse, flags, stage_name, target=target)
                continue
            # Either branch may be taken: a flag on which they disagree is unknown.
            other = dict(flags)
            _apply(statement.body, flags, stage_name, target=target)
            _apply(statement.orelse, other, stage_name, target=target)
            flags.update({name: None for name in flags if flags[name] is not other[name]})
        elif isinstance(statement, (ast.With, ast.Try)):
            _apply(statement.body, flags, stage_name, target=target)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for assigned in targets:
                owner = _name(assigned.value) if isinstance(assigned, ast.Attribute) else ""
                if owner == target and _name(assigned) in flags:
                    value = statement.value
                    flags[_name(assigned)] = bool(value.value) if isinstance(value, ast.Constant) else None


def _stage_test(test: ast.expr, stage_name: str) -> bool | None:
    """Return the outcome of ``model_stage == "x"`` or ``model_stage in ("x", ...)``; None for any other test."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and _name(test.left) == "model_stage"):
        return None
    try:
        value = ast.literal_eval(test.comparators[0])
    except ValueError:
        return None
    operator = test.ops[0]
    if isinstance(operator, (ast.Eq, ast.NotEq)):
        return (value == stage_name) is isinstance(operator, ast.Eq)
    if isinstance(operator, (ast.In, ast.NotIn)):
        return (stage_name in value) is isinstance(operator, ast.In)
    return None


def _calls(module: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and _name(node.func) == name:
            yield node


def _constants(module: ast.Module) -> dict[str, str]:
    """Return the module-level string constants by name."""
    return {
        _name(statement.targets[0]): statement.value.value
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    }


def _text(node: ast.expr | None, constants: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return constants.get(_name(node), "")


def _name(node: ast.AST | None) -> str:
    """Return the last part of a dotted name, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
