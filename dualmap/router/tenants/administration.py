"""Changes of tenants in the running fleet: each is derived from the tenant as it is, and made if it is still so."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

from dualmap.router.errors import ConflictError, NotFoundError
from dualmap.router.tenants.keeper import TenantKeeper
from dualmap.router.tenants.tenant_record import TenantRecord
from dualmap.scheduling.tenants.budgets import budget_of

MAX_TRIES: Final = 32
"""Tries of a change before concurrent ones are reported as a conflict."""
KEY_PREFIX: Final = "dm-"
MAX_KEYS: Final = 1000
"""Keys of one tenant at most: it is one text, which every change of it writes again."""
MAX_TENANTS: Final = 100_000

Derive = Callable[[TenantRecord | None], TenantRecord | None]
"""The tenant as it is to be, made of the one as it is; None: there is none."""


def new_key() -> str:
    """A random key, which cannot be guessed."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class TenantAdministration:
    """Makes the changes of operators, on one replica."""

    def __init__(self, keeper: TenantKeeper) -> None:
        self._keeper = keeper

    async def change(self, name: str, derive: Derive, *, by: str, action: str) -> TenantRecord | None:
        """Change a tenant, in one step; returns it as it is then. What changes nothing is not entered.

        Raises:
            RouterError: ``derive`` refuses it, the tenant is one of the settings, or others never stop changing some.
            StoreError: the store is out of reach.
        """
        keeper = self._keeper
        if name in keeper.directory.configured:
            raise ConflictError(
                f"tenant {name!r} is in the settings file: change it there (tenants), and restart routers and pickers",
                param="name",
            )
        for _ in range(MAX_TRIES):
            await keeper.refresh()
            known, edition = keeper.records.get(name), keeper.edition
            assert edition is not None
            wanted = derive(known)
            if wanted == known:
                return known
            if known is None and len(keeper.records) >= MAX_TENANTS:
                raise ConflictError(f"there are {MAX_TENANTS} tenants already: remove some")
            if wanted is not None:
                wanted = wanted.model_copy(update={"revision": edition.number + 1})
            before, after = differences(known, wanted)
            text = None if wanted is None else wanted.text()
            gone = _budgets(name, known) - _budgets(name, wanted)
            made = await keeper.book.change(
                edition, {name: text}, by=by, action=action, before=before, after=after, gone=sorted(gone)
            )
            if made is not None:
                await keeper.refresh()
                return wanted
        raise ConflictError("tenants are changed by others all the time; try again")

    def refuse_taken(self, digest: str) -> None:
        """Raises ConflictError where somebody has a key of this hash."""
        if self._keeper.directory.owner(bytes.fromhex(digest)) is not None:
            raise ConflictError("a tenant has this key already: make another one", param="sha256")


def _budgets(name: str, record: TenantRecord | None) -> set[str]:
    return set() if record is None else {budget_of(name, limit) for limit in record.as_tenant(name).limits}


def found(record: TenantRecord | None, name: str) -> TenantRecord:
    """Raises NotFoundError where there is none."""
    if record is None:
        raise NotFoundError(f"there is no tenant {name!r} that was made in the running fleet", param="name")
    return record


def checked(record: TenantRecord) -> TenantRecord:
    """Raises ConflictError where it has more keys than may be."""
    if len(record.keys) > MAX_KEYS:
        raise ConflictError(f"a tenant has {MAX_KEYS} keys at most: revoke some, or make another tenant", param="keys")
    return record


def differences(known: TenantRecord | None, wanted: TenantRecord | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The fields that changed, as they were and as they are, for the log; each key by its name."""
    before, after = ({} if record is None else _logged(record) for record in (known, wanted))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return (
        {name: before[name] for name in names if name in before},
        {name: after[name] for name in names if name in after},
    )


def _logged(record: TenantRecord) -> dict[str, Any]:
    shown = record.described()
    del shown["revision"], shown["created_ms"]
    for key in shown.pop("keys"):
        shown.setdefault(f"key {key.pop('name')}", []).append(key)
    return shown
