"""Who is served by which revision of a pool: weights of sessions, and the sessions that stay where they are.

A *revision* is a label of instances: engine version, model revision, flags. A *session* is a run where its client names
one, else a conversation by its first messages (``router.prompts.session``). Each is hashed with every revision, and the
weights decide: a revision whose weight grows takes sessions from others and none from it goes elsewhere. The *home* of
a session is the revision that it began on. It stays there while the home stands, so a growing weight takes new sessions
alone.

Source of the choice: weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", SPAA
2005), logarithmic method: the largest of ``-weight / ln(u)`` with ``u`` uniform in (0, 1) by session and revision.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, field, replace
from math import isfinite, log
from typing import Any, Final

import orjson
import xxhash

from dualmap.scheduling.values import value

LABEL: Final = r"[A-Za-z0-9._:/@+-]{1,63}"
"""The form of a revision's label, as a regular expression: the length of those of Kubernetes, and nothing that texts of
JSON escape."""
MOST_REVISIONS: Final = 16
_SCALE: Final = 2.0**-53


@value
class RevisionShare:
    """A revision's part in the sessions of its pool."""

    weight: float = 0.0
    since: int = 0
    """The version of the weights from which on homes on this revision stand: earlier sessions were moved."""


@value
class RevisionWeights:
    """The record of a pool's revisions, which every replica has a copy of."""

    shares: Mapping[str, RevisionShare] = field(default_factory=dict)
    """By revision; one that is not named is sent nothing. Empty: revisions do not matter."""
    _: KW_ONLY
    tenants: Mapping[str, str] = field(default_factory=dict)
    """Tenants that are served by one revision whatever the weights say."""
    version: int = 0
    """Grows with every change."""
    shadow: str = ""
    """The revision that gets copies of finished requests and answers nobody; empty: none."""
    shadow_percent: float = 0.0
    """The part of all sessions whose requests are copied."""
    salt: str = ""
    """The salt that sessions are hashed with, which no client knows: their ids are clients' own words. Empty until the
    store writes the first weights, and where an older version wrote the last ones."""

    @property
    def in_force(self) -> bool:
        """Whether requests are to be told apart by revision at all."""
        return bool(self.shares)

    @property
    def are_first(self) -> bool:
        """Whether revisions mattered to no session before these weights, so that none has a home."""
        return self.version == 1

    @classmethod
    def alone(cls, revision: str) -> RevisionWeights:
        """The weights by which one revision serves all."""
        return cls({revision: RevisionShare(100.0)})

    def text(self) -> bytes:
        """The record as the store keeps it."""
        shares = {name: {"weight": each.weight, "since": each.since} for name, each in self.shares.items()}
        shadow = {"shadow": self.shadow, "shadow_percent": self.shadow_percent} if self.shadow else {}
        salt = {"salt": self.salt} if self.salt else {}
        return orjson.dumps(
            {"shares": shares, "tenants": dict(self.tenants), "version": self.version, **shadow, **salt}
        )

    @classmethod
    def parse(cls, text: bytes) -> RevisionWeights:
        """Raises ValueError, or the like, where it is no such record."""
        given = orjson.loads(text)
        shares = {name: _share(each) for name, each in given["shares"].items()}
        tenants, version = given.get("tenants", {}), given["version"]
        if not all(isinstance(each, str) for each in tenants.values()) or type(version) is not int:
            raise ValueError(f"no weights of revisions: {text!r}")
        shadow, percent = str(given.get("shadow", "")), float(given.get("shadow_percent", 0.0))
        salt = str(given.get("salt", ""))
        return cls(shares, tenants=tenants, version=version, shadow=shadow, shadow_percent=percent, salt=salt)


def _share(given: Mapping[str, Any]) -> RevisionShare:
    share = RevisionShare(float(given["weight"]), given["since"])
    if not 0.0 <= share.weight < float("inf") or type(share.since) is not int:
        raise ValueError(f"no share of a revision: {given!r}")
    return share


NO_WEIGHTS: Final = RevisionWeights()


@value
class Home:
    """The revision that a session began on."""

    revision: str
    version: int
    """The version of the weights when it did."""

    @property
    def text(self) -> str:
        return f"{self.version} {self.revision}"

    @classmethod
    def parse(cls, text: str) -> Home | None:
        """None where it is none."""
        version, _, revision = text.partition(" ")
        return cls(revision, int(version)) if version.isdecimal() and revision else None


@value
class Assigned:
    """The revision of one request."""

    revision: str
    cohort: int = 0
    """The version of the weights that gave its session to the revision; 0: they did not."""
    session: str = ""
    """Its session, where they did."""
    shadowed: str = ""
    """Its session, where the request is to be copied to the shadow once it is answered; empty: it is not."""


def is_shadowed(weights: RevisionWeights, session: str) -> bool:
    """Whether the requests of a session are copied."""
    return (
        bool(weights.shadow)
        and 100 * _salted_point(weights, session, f"shadow {weights.shadow}") < weights.shadow_percent
    )


def with_shadow(known: RevisionWeights, revision: str, percent: float) -> RevisionWeights:
    """The weights with copies of so many sessions' requests for a revision; "" for the revision: no copies.

    Raises:
        WeightError: no revision serves, this one does, or the percentage is none.
    """
    if not revision:
        return replace(known, shadow="", shadow_percent=0.0, version=known.version + 1)
    if not 0 < percent <= 100:
        raise WeightError("the part that is copied must be above 0 and at most 100 %")
    serving = [name for name, each in known.shares.items() if each.weight > 0]
    if not serving or serving == [revision]:
        raise WeightError("give the revisions that serve now their weights first")
    if revision in serving:
        raise WeightError(f"{revision} serves sessions: a shadow answers nobody")
    return replace(known, shadow=revision, shadow_percent=percent, version=known.version + 1)


def chosen(weights: RevisionWeights, among: Collection[str], session: str) -> str:
    """The revision of a new session among those that have ready instances; of all that have a weight where none has.
    Empty where no revision has any."""
    weighted = {name: each.weight for name, each in weights.shares.items() if each.weight > 0}
    offered = {name: weight for name, weight in weighted.items() if name in among} or weighted
    return max(
        offered, key=lambda name: (-offered[name] / log(_salted_point(weights, session, name)), name), default=""
    )


def _salted_point(weights: RevisionWeights, session: str, revision: str) -> float:
    return point(weights.salt + session, revision)


def point(session: str, revision: str) -> float:
    """Where a session lies for a revision: uniform in (0, 1), the same in every process."""
    digest = xxhash.xxh3_64_intdigest(f"{revision}\n{session}".encode("utf-8", "surrogatepass"))
    return ((digest >> 11) + 0.5) * _SCALE


def stands(weights: RevisionWeights, home: Home, among: Collection[str]) -> bool:
    """Whether a session stays at its home: the revision lives, and its sessions were not moved since."""
    share = weights.shares.get(home.revision)
    return share is not None and home.version >= share.since and home.revision in among


def earlier_home(weights: RevisionWeights, among: Collection[str], cached: Mapping[str, int]) -> Home | None:
    """The home of a session that began before revisions had weights: where most blocks of its prompt are ``cached``,
    else the revision of most weight. It counts as one that began before the weights, so no figures compare it. None:
    no revision that has one of these is ready."""
    offered = {name: each for name, each in weights.shares.items() if name in among}
    revision = max(offered, key=lambda name: (cached.get(name, 0), offered[name].weight, name), default="")
    if not revision or not (cached.get(revision) or offered[revision].weight):
        return None
    return Home(revision, offered[revision].since)


def fixed(weights: RevisionWeights, *, tenant: str, asked: str) -> str:
    """The revision that a request has whatever the weights say: that of its tenant, else the one that its client asks
    for, where it is one of the pool's. Empty: there is none."""
    pinned = weights.tenants.get(tenant, "") if tenant else ""
    return pinned or (asked if asked in weights.shares else "")


class WeightError(Exception):
    """The weights that were given make no sense."""


def with_weights(known: RevisionWeights, given: Mapping[str, float], *, move: bool = False) -> RevisionWeights:
    """The weights with these revisions at these percentages of all sessions; the others share what is left in the
    proportion that they have now. ``move``: sessions of revisions that lose weight are placed again, else only new ones
    follow.

    Raises:
        WeightError: the percentages are none, or leave something over for nobody.
    """
    for name, percent in given.items():
        if not re.fullmatch(LABEL, name):
            raise WeightError(f"{name!r} is no label of a revision")
        if not isfinite(percent) or not 0 <= percent <= 100:
            raise WeightError(f"the weight of {name} must be between 0 and 100 %")
    total, others = sum(given.values()), {name: each for name, each in known.shares.items() if name not in given}
    if total > 100 + 1e-9:
        raise WeightError(f"the weights are {total:g} % together, more than 100")
    spread = sum(each.weight for each in others.values())
    if total < 100 - 1e-9 and not spread:
        raise WeightError(f"the weights are {total:g} % together, and no other revision has a weight: name all of them")
    if len(others) + len(given) > MOST_REVISIONS:
        raise WeightError(f"a pool has {MOST_REVISIONS} revisions at most: forget some")
    version = known.version + 1
    scale = (100.0 - total) / spread if spread else 0.0
    wanted = {name: each.weight * scale for name, each in others.items()} | dict(given)
    shares = {name: _changed(known.shares.get(name), weight, version, move) for name, weight in wanted.items()}
    after = replace(known, shares=shares, version=version)
    serves = known.shadow in shares and shares[known.shadow].weight > 0
    return replace(after, shadow="", shadow_percent=0.0) if serves else after


def _changed(known: RevisionShare | None, weight: float, version: int, move: bool) -> RevisionShare:
    if known is None:
        return RevisionShare(weight, version - 1)  # no home on it is of that version
    return RevisionShare(weight, version if move and weight < known.weight else known.since)


def without(known: RevisionWeights, revision: str) -> RevisionWeights:
    """The weights without a revision, whose sessions go elsewhere; without the last one revisions matter no more.

    Raises:
        WeightError: there is no such revision, or all others have weight 0.
    """
    if revision not in known.shares:
        raise WeightError(f"revision {revision!r} has no weight here")
    shares = {name: each for name, each in known.shares.items() if name != revision}
    if shares and not any(each.weight for each in shares.values()):
        raise WeightError(f"no other revision than {revision} has a weight: give one first")
    tenants = {tenant: name for tenant, name in known.tenants.items() if name != revision}
    bare = replace(known, shares=shares, tenants=tenants, version=known.version + 1)
    return bare if shares and known.shadow != revision else replace(bare, shadow="", shadow_percent=0.0)


def with_tenant(known: RevisionWeights, tenant: str, revision: str) -> RevisionWeights:
    """The weights with a tenant served by one revision alone; "" for the revision: by the weights again.

    Raises:
        WeightError: there is no such revision.
    """
    if revision and revision not in known.shares:
        raise WeightError(f"revision {revision!r} has no weight here: give it one first, 0 will do")
    tenants = {name: each for name, each in known.tenants.items() if name != tenant}
    if revision:
        tenants[tenant] = revision
    return replace(known, tenants=tenants, version=known.version + 1)
