"""Settings from flags, environment and file: ``flags > environment > YAML > defaults``.

Every value keeps the name of its source, so that a wrong one is reported as the user wrote it. An unknown name is an
error, never ignored: a misspelt setting without effect is the most expensive kind.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dualmap.cli.settings import Settings
from dualmap.runtime.amounts import whole_amount
from dualmap.runtime.complaints import in_words
from dualmap.runtime.spelling import did_you_mean
from dualmap.scheduling.removed_settings import removed
from dualmap.statestore.url import without_password

ENVIRONMENT_PREFIX = "DUALMAP_"
CONFIG_VARIABLE = "DUALMAP_CONFIG"
_SEPARATOR = "__"
_FLAG = re.compile(r"--([a-z][a-z0-9_-]*(?:\.[a-z0-9_-]+)*)(?:=(.*))?", re.DOTALL)
_SECRET = re.compile(r"key|password|secret")


class ConfigurationError(Exception):
    """The settings cannot be used; the message names every wrong one and where it came from."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value given by the user: where in the tree it goes and where it came from."""

    path: tuple[str, ...]
    value: object
    origin: str


def load_settings(flags: Sequence[Assignment], environment: Mapping[str, str], config: Path | None = None) -> Settings:
    """The settings of this process.

    Raises:
        ConfigurationError: the file cannot be read, a name is unknown or a value is wrong.
    """
    if config is None and environment.get(CONFIG_VARIABLE):
        config = Path(environment[CONFIG_VARIABLE])
    assignments = [*(from_file(config) if config else ()), *from_environment(environment), *flags]
    return validated(assignments)


def names_a_fleet(flags: Sequence[Assignment], environment: Mapping[str, str], config: Path | None) -> bool:
    """Whether the user says which fleet is meant: by a file, or by where its store or its routers are."""
    if config is not None or environment.get(CONFIG_VARIABLE):
        return True
    given = {assignment.path for assignment in (*from_environment(environment), *flags)}
    return not given.isdisjoint({("store", "url"), ("router", "port"), ("router", "host")})


def validated(assignments: Iterable[Assignment]) -> Settings:
    """The settings tree after all assignments, later ones over earlier ones.

    Raises:
        ConfigurationError: a name is unknown or a value is wrong.
    """
    tree: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for assignment in assignments:
        _assign(tree, assignment)
        origins[assignment.path] = assignment.origin
    try:
        return Settings.model_validate({name: counted(name, value) for name, value in tree.items()})
    except ValidationError as error:
        raise ConfigurationError("\n".join(_complaints(error, origins))) from error


def counted(name: str, value: object) -> Any:
    """The value of a setting with its counts of tokens as numbers where they are written as ``100k`` or ``2M``."""
    if isinstance(value, dict):
        return {inner: counted(str(inner), each) for inner, each in value.items()}
    if isinstance(value, list):
        return [counted(name, each) for each in value]
    if isinstance(value, str) and "tokens" in name:
        with contextlib.suppress(ValueError):  # it is wrong, and complained of with its place
            return whole_amount(value)
    return value


def _assign(tree: dict[str, Any], assignment: Assignment) -> None:
    *parents, leaf = assignment.path
    for name in parents:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            child = tree[name] = {}
        tree = child
    tree[leaf] = assignment.value


class _UniqueKeys(yaml.SafeLoader):
    """Reads YAML and JSON, and refuses a mapping that names one key twice: the first value would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # "<<" may be given several times, and is overridden
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key!r} is given twice in one section, the second time in line {line}: keep one"
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> object:
    """The document; raises yaml.YAMLError."""
    return yaml.load(text, _UniqueKeys)  # a safe loader


# sources --------------------------------------------------------------------------------------------------


def from_file(path: Path) -> Iterator[Assignment]:
    """The assignments of a YAML file.

    Raises:
        ConfigurationError: unreadable, not YAML, or not a mapping.
    """
    try:
        document = _read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except yaml.constructor.ConstructorError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    if document is None:
        return
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} must hold sections such as 'router:', not a {type(document).__name__}")
    for leaf, value in _leaves(document, ()):
        yield Assignment(leaf, value, f"{path}: {'.'.join(leaf)}")


def from_environment(environment: Mapping[str, str]) -> Iterator[Assignment]:
    """The assignments of ``DUALMAP_SECTION__NAME`` variables.

    Variables with the prefix but without the double underscore are not settings unless they name a section:
    Kubernetes injects such names for a service called ``dualmap``. See ``nearly_settings``.
    """
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        path = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split(_SEPARATOR))
        if len(path) > 1 or path[0] in Settings.model_fields:
            yield from _from_text(path, environment[variable], variable)


def nearly_settings(environment: Mapping[str, str]) -> list[str]:
    """A warning for every variable that would be a setting with a second underscore; Kubernetes' own left out."""
    warnings = []
    for variable, value in sorted(environment.items()):
        given = variable.removeprefix(ENVIRONMENT_PREFIX)
        section, _, name = given.partition("_")
        meant = annotation_at((section.lower(), name.lower()))
        if given != variable and meant is not None and not value.startswith("tcp://"):
            known = f"{ENVIRONMENT_PREFIX}{section}{_SEPARATOR}{name}"
            warnings.append(f"{variable} is not a setting; did you mean {known}?")
    return warnings


def split_flags(arguments: Sequence[str], shorthands: Mapping[str, str]) -> tuple[list[Assignment], list[str]]:
    """Separate setting flags (``--router.port 8000``, ``--pools=[…]``) from a command's own arguments.

    ``shorthands`` are a command's short options for settings: ``{"--policy": "scheduling.policy"}``.

    Raises:
        ConfigurationError: a setting flag has no value.
    """
    assignments: list[Assignment] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        match = _FLAG.fullmatch(word)
        name = shorthands.get(f"--{match[1]}", match[1].replace("-", "_")) if match else ""
        path = tuple(name.split("."))
        if match is None or (len(path) == 1 and path[0] not in Settings.model_fields):
            rest.append(word)
            continue
        text = match[2] if match[2] is not None else next(words, None)
        if text is None:
            raise ConfigurationError(f"--{match[1]} needs a value")
        assignments.extend(_from_text(path, text, f"--{match[1]}"))
    return assignments, rest


def _from_text(path: tuple[str, ...], text: str, origin: str) -> Iterator[Assignment]:
    value = _parse(annotation_at(path), text, origin)
    if isinstance(value, dict):
        for leaf, leaf_value in _leaves(value, path):
            yield Assignment(leaf, leaf_value, origin)
    else:
        yield Assignment(path, value, origin)


def _leaves(mapping: Mapping[object, object], prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, value in mapping.items():
        path = (*prefix, str(name))
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        elif value is not None or len(path) > 1:  # an empty section ("router:") means its defaults
            yield path, value


# text to values -------------------------------------------------------------------------------------------


def annotation_at(path: Sequence[str]) -> object:
    """The declared type of a setting, or of what a list holds, which a number names; None when there is none of that
    name."""
    annotation: object = Settings
    for name in path:
        model = _section_of(annotation)
        if model is not None and name in model.model_fields:
            annotation = model.model_fields[name].annotation
        elif name.isdecimal() and get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return None
    return annotation


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a type is, or may be."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := _section_of(part)) is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _parse(annotation: object, text: str, origin: str) -> object:
    """Plain values stay text (the model converts them); lists and sections are JSON, or a comma list."""
    if get_origin(annotation) in (Union, types.UnionType):
        if text.lower() in ("", "null", "none"):
            return None
        annotation = next(choice for choice in get_args(annotation) if choice is not types.NoneType)
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    is_list = get_origin(annotation) in (tuple, list, frozenset, set)
    if is_list and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    if not (is_list or is_section or annotation is Any or get_origin(annotation) in (dict, Mapping)):
        return text
    try:
        return _read_yaml(text)
    except yaml.constructor.ConstructorError as error:
        raise ConfigurationError(f"{origin}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{origin} is neither JSON nor YAML: {error}") from error


# complaints -----------------------------------------------------------------------------------------------


def _complaints(error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    details = error.errors(include_url=False)
    paths = [tuple(str(part) for part in detail["loc"]) for detail in details]
    for path, detail in zip(paths, details, strict=True):
        inside = any(other != path and other[: len(path)] == path for other in paths)
        if detail["type"] == "too_short" and inside:
            continue  # a list whose items are wrong is not empty
        name = ".".join(path)
        if detail["type"] == "extra_forbidden":
            problem = removed(name) or f"there is no such setting{_suggestion(path)}"
        else:
            problem = _problem(name, detail)
        origin = _origin(path, origins) if path else None  # what concerns the whole tree names its settings itself
        yield (f"{name}: {problem}" if name else problem) + (f" (from {origin})" if origin else "")


def _problem(name: str, detail: ErrorDetails) -> str:
    """The complaint, in terms of the configuration file."""
    if detail["type"] in ("too_short", "string_too_short") and detail["ctx"]["min_length"] == 1:
        return "must not be empty"
    if detail["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        meant = did_you_mean(str(detail["input"]), known)
        return f"there is no {str(detail['input'])[:80]!r}{meant or '; there are: ' + ', '.join(known)}"
    message = "input should be a list" if detail["type"] == "tuple_type" else in_words(detail)
    return message[:1].lower() + message[1:] + _shown(name, detail["input"])


def _shown(name: str, value: object) -> str:
    """The wrong value, unless it is large or may hold a secret (a key, or a URL with a password)."""
    if isinstance(value, (dict, list, tuple)) or _SECRET.search(name) or "@" in str(value):
        return ""
    return f", not {without_password(str(value))[:80]!r}"


def _origin(path: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> str | None:
    """The origin of the value: given as such, as a part of a list, or (missing) somewhere in its section."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return next((origin for given, origin in origins.items() if given[: len(path)] == path), None)


def _suggestion(path: tuple[str, ...]) -> str:
    parent = _section_of(annotation_at(path[:-1]))
    if parent is None:
        return ""
    close = difflib.get_close_matches(path[-1], parent.model_fields, n=1)
    return f"; did you mean {'.'.join([*path[:-1], close[0]])}?" if close else ""
