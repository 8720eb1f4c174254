"""The schema of a pool: its number, which versions may share it, and how neighbouring versions read each other's state.

A version writes fields that the one before did not know, and both run beside each other while a fleet is updated. Two
rules make that work, as long as a change keeps to them:

- A reader leaves unknown fields out. A process of the older version keeps none of them when it writes a record again.
- A field that may be missing, as an older version wrote the record, has a value that stands for it: its default. In the
  records of instances and requests it is declared as ``added``. So a new field must be one whose loss costs an estimate
  and no count.

``SCHEMA`` grows with every such change. A change that breaks one of these rules (a field goes, or means something else;
a key changes its type; a script counts otherwise) also raises ``OLDEST_BESIDE`` to the new number: older versions may
not run beside this one then. ``docs/operate/upgrades.md`` says what that means for operators.

A pool says in ``meta`` what wrote it: ``schema``, the highest number of those that entered it, and ``oldest_schema``,
the lowest number that may still enter. The leases of replicas and of the leader say the number of each that lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from dualmap.runtime.extras import package_version
from dualmap.statestore.errors import StoreSchemaError
from dualmap.statestore.pool.readable import count_from, is_readable

SCHEMA: Final = 5
"""Number of the schema that this version writes."""
OLDEST_BESIDE: Final = 2
"""The oldest schema whose processes may run beside this version."""
UNNUMBERED: Final = 0
"""The schema of versions that wrote no number."""

SCHEMA_FIELD: Final = "schema"
OLDEST_FIELD: Final = "oldest_schema"


@dataclass(frozen=True, slots=True)
class PoolSchema:
    """The versions that wrote a pool, by the pool's own record."""

    newest: int = UNNUMBERED
    oldest: int = UNNUMBERED

    @classmethod
    def of(cls, meta: Mapping[bytes, bytes]) -> PoolSchema:
        """Read the schema from the fields of the key ``meta``; an impossible value, which somebody wrote by hand,
        counts as none."""
        said = [meta.get(name.encode(), b"0") for name in (SCHEMA_FIELD, OLDEST_FIELD)]
        if not all(is_readable(partial(count_from, text)) for text in said):
            return cls()
        newest, oldest = map(int, said)
        return cls(newest, oldest) if oldest <= newest else cls()

    @property
    def is_known(self) -> bool:
        return self.newest != UNNUMBERED

    def entered(self) -> PoolSchema:
        """The schema once this version has entered."""
        return PoolSchema(max(self.newest, SCHEMA), max(self.oldest, OLDEST_BESIDE))

    def refuse_newer(self, pool: str) -> None:
        """Raises StoreSchemaError where newer versions use the pool, beside which this one may not run."""
        if self.oldest > SCHEMA:
            raise StoreSchemaError(
                f"pool {pool} is used by a newer version, of schema {self.newest}, beside which this version"
                f" {package_version()}, of schema {SCHEMA}, must not run: run the newer version here too, or give this"
                " one another store.prefix"
            )


def refuse_older(pool: str, living: Mapping[str, int]) -> None:
    """Raises StoreSchemaError where a process that lives, by name and schema, is of an older version beside which this
    one must not run. What such versions leave behind when they are stopped is mended."""
    older = {name: number for name, number in living.items() if number < OLDEST_BESIDE}
    if older:
        raise StoreSchemaError(
            f"pool {pool} is used by an older version, of schema {min(older.values())}, beside which this version"
            f" {package_version()}, of schema {SCHEMA}, must not run: stop the older version first"
            f" ({', '.join(older)}), or give this one another store.prefix"
        )
