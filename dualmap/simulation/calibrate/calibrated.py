"""Engines by name: a preset's, or that of a file which ``dualmap calibrate`` wrote."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.engine.presets import Preset, UnknownPresetError, find_preset
from dualmap.simulation.engine.silicon import PREFIX

_ENDINGS = (".json", ".yaml", ".yml")


def is_calibrated(name: str) -> bool:
    """Whether the name is the path of a file of ``dualmap calibrate URL``."""
    return not name.startswith(PREFIX) and name.endswith(_ENDINGS)


def find_engine(name: str) -> Preset:
    """The preset of this name, or the measured engine of the file at this path, which is named after it.

    Raises:
        UnknownPresetError: there is none, or the file does not describe an engine.
    """
    path = Path(name)
    if not is_calibrated(name):
        return find_preset(name)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        settings = EmulatorSettings.model_validate((document or {})["emulator"])
    except OSError as error:
        raise UnknownPresetError(f"{name}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "it has no section emulator"
        raise UnknownPresetError(f"{name}: no engine of dualmap calibrate: {why}") from error
    return Preset(path.stem, settings.served_model, settings.engine_config(), card="")
