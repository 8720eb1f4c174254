"""The files of a model that a tokenizer needs, as they are published: ``tokenizer.json``, ``tokenizer_config.json``,
``special_tokens_map.json`` and ``chat_template.jinja``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualmap.router.tokens.chat_template import ChatTemplate

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelFilesError(ValueError):
    """The files of a model cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The templates of one model: for requests with and without tools. They are the same for most models."""

    plain: ChatTemplate
    with_tools: ChatTemplate

    @property
    def system_first(self) -> bool:
        """Whether one of them takes no system message but the first."""
        return self.plain.system_first or self.with_tools.system_first

    def of(self, body: Mapping[str, Any]) -> ChatTemplate:
        return self.plain if body.get("tools") is None else self.with_tools


def read_templates(
    folder: Path, *, template_file: Path | None = None, default_variables: Mapping[str, Any] | None = None
) -> ChatTemplates | None:
    """The chat templates of the model in ``folder``, or the one of ``template_file`` (vLLM's ``--chat-template``); None
    for a model without one. ``default_variables`` are vLLM's ``--default-chat-template-kwargs``.

    Raises:
        ModelFilesError: a file is missing or cannot be read.
    """
    config = _object(folder / "tokenizer_config.json")
    variables = default_variables or {}
    return templates_of(_sources(folder, config, template_file), special_tokens(folder, config), variables)


def templates_of(
    sources: Mapping[str, str], special: Mapping[str, str], variables: Mapping[str, Any]
) -> ChatTemplates | None:
    """The chat templates of the sources by name, ``default`` and perhaps ``tool_use``. Raises ModelFilesError."""
    if not sources:
        return None
    try:
        built = {name: ChatTemplate(source, special, variables) for name, source in sources.items()}
    except ValueError as error:
        raise ModelFilesError(str(error)) from error
    plain = built.get("default") or next(iter(built.values()))
    return ChatTemplates(plain, built.get("tool_use", plain))


def named_templates(given: Any) -> dict[str, str]:
    """The field ``chat_template`` of a tokenizer's configuration: a template, or a list of named ones."""
    if isinstance(given, str):
        return {"default": given}
    if not isinstance(given, list):
        return {}
    return {entry["name"]: entry["template"] for entry in given if isinstance(entry, dict) and "template" in entry}


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates may name, by variable."""
    mapped = folder / "special_tokens_map.json"
    return tokens_by_name({**(_object(mapped) if mapped.exists() else {}), **config})


def tokens_by_name(given: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKENS:
        token = given.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _sources(folder: Path, config: Mapping[str, Any], template_file: Path | None) -> dict[str, str]:
    jinja = template_file or folder / "chat_template.jinja"
    if template_file is not None or jinja.exists():
        try:
            return {"default": jinja.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFilesError(f"{jinja}: {error}") from error
    return named_templates(config.get("chat_template"))


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return value
