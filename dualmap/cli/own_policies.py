"""Policies of other packages: found by entry point, known by name before settings are read.

A package offers one by an entry point of the group ``dualmap.policies`` whose object is called like a builder of
``scheduling.placing.policies.registry``: with the name and the scheduling settings, and with the entries of the setting
``policy_options`` by name. ``examples/own_policy`` is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dualmap.cli.configuration import ConfigurationError
from dualmap.scheduling.placing.decision import Policy
from dualmap.scheduling.placing.policies.registry import BUILDERS, add_policy
from dualmap.scheduling.settings import SchedulingSettings

GROUP = "dualmap.policies"


@dataclass(frozen=True)
class InstalledPolicy:
    """The builder that an entry point names. It can be sent to another process whatever the builder is."""

    point: EntryPoint

    def __call__(self, name: str, settings: SchedulingSettings, **options: Any) -> Policy:
        policy: Policy = self.point.load()(name, settings, **options)
        return policy


def load_own_policies() -> None:
    """Make the installed ones known to the settings.

    Raises:
        ConfigurationError: one cannot be imported.
    """
    for found in entry_points(group=GROUP):
        if found.name in BUILDERS:
            continue
        try:
            found.load()
            add_policy(found.name, InstalledPolicy(found))
        except Exception as error:
            which = f"policy {found.name!r} of entry point {found.value}"
            raise ConfigurationError(f"{which} cannot be loaded: {error!r}") from error
