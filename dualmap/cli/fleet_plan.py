"""The plan of ``dualmap up``: child processes and the settings they share, worked out before anything runs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr, ValidationError

from dualmap.cli.admin_api import base_url, endpoint
from dualmap.cli.errors import CommandError, UsageError
from dualmap.cli.processes import ChildSpec
from dualmap.cli.settings import Settings
from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.state.instance import Role
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.emulator.time_scale import scaled_scheduling
from dualmap.statestore.url import without_password

# Stages in which children stop: those that accept requests first, those that serve them last.
STOP_ROUTERS, STOP_WORKERS, STOP_INSTANCES = range(3)

# An instance that was killed stays away long enough for people to see it down.
_INSTANCE_AGAIN_AFTER_S = 3.0

# Values for one machine, unless set otherwise: clients do not check /ready there, and Ctrl-C should not take long.
_HASTE = {"settle_s": 0.0, "drain_timeout_s": 3.0}


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many of each; ``instances`` are emulated ones, used only when none are configured or given."""

    replicas: int
    workers: int
    instances: int
    autoscale: AutoscaleSettings | None = None
    """Instances are its maximum then, and those beyond its minimum are spares."""
    prefill: int = 0
    decode: int = 0
    """Emulated decode instances, beside the ``instances``, which do both."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the emulated instances."""
        counts = ((Role.MIXED, self.instances), (Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return tuple(role for role, count in counts for _ in range(count))


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The children of one fleet and the settings file they read."""

    settings: Settings
    children: tuple[ChildSpec, ...]
    ops_urls: tuple[str, ...]
    """Each replica's own address, in order."""
    store_shown_as: str
    """The store's URL for people, without a password."""

    @property
    def emulated(self) -> bool:
        """Whether it brings its own instances."""
        return any(child.stop_stage == STOP_INSTANCES for child in self.children)

    @property
    def endpoint(self) -> str:
        """The base URL that clients use."""
        return endpoint(self.settings)

    def with_store(self, url: str) -> FleetPlan:
        """The plan with another store."""
        store = self.settings.store.model_copy(update={"url": url})
        settings = self.settings.model_copy(update={"store": store})
        return replace(self, settings=settings, store_shown_as=without_password(url))


def plan_fleet(settings: Settings, size: FleetSize, instance_urls: Sequence[str], config_file: str) -> FleetPlan:
    """The plan of a fleet of ``size``; ``config_file`` is where its settings will be written.

    Raises:
        CommandError: the endpoint's port is taken, or an instance cannot be as it is given.
    """
    router = settings.router
    port = router.port or free_ports(1, router.host)[0]
    require_free_port(router.host, port)
    ops_ports = free_ports(size.replicas, router.host, taken=(port,))
    pool, emulator = settings.pools[0], settings.emulator
    if size.autoscale is not None:
        size = replace(size, instances=size.autoscale.max_instances)
    emulated = not instance_urls and not any(known.instances for known in settings.pools)
    if emulated:
        count = len(size.roles)
        first_port = first_of_free_ports(emulator.port or 8100, count, emulator.host, taken=(port, *ops_ports))
        model = pool.model if "model" in pool.model_fields_set else emulator.served_model
        emulator = emulator.model_copy(update={"instances": count, "port": first_port, "model": model})
        pool = emulated_pool(pool, emulator, size.roles)
    elif instance_urls:
        pool = pool.model_copy(update={"instances": given_instances(instance_urls)})
    if size.autoscale is not None:
        pool = elastic_pool(pool, size.autoscale)
    changed: dict[str, Any] = {
        **({"scheduling": scaled_scheduling(settings.scheduling, emulator.time_scale)} if emulated else {}),
        "pools": (pool, *settings.pools[1:]),
        "router": router.model_copy(update={"port": port, **_unset(_HASTE, router)}),
        "emulator": emulator,
    }
    planned = settings.model_copy(update=changed)
    ops_urls = tuple(base_url(planned, ops_port) for ops_port in ops_ports)
    ours = pool.instances if emulated else ()
    children = _children(config_file, size, dict(zip(ops_ports, ops_urls, strict=True)), ours)
    return FleetPlan(planned, children, ops_urls, without_password(settings.store.url))


def elastic_pool(pool: PoolSettings, autoscale: AutoscaleSettings) -> PoolSettings:
    """The pool with its instances beyond the minimum as spares."""
    least = autoscale.min_instances
    spares = tuple(instance.model_copy(update={"standby": True}) for instance in pool.instances[least:])
    return pool.model_copy(update={"autoscale": autoscale, "instances": (*pool.instances[:least], *spares)})


def _unset(values: Mapping[str, Any], settings: BaseModel) -> dict[str, Any]:
    """The values that the user did not set."""
    return {name: value for name, value in values.items() if name not in settings.model_fields_set}


def given_instances(urls: Sequence[str]) -> tuple[InstanceSettings, ...]:
    """The running servers that ``--instance-url`` names.

    Raises:
        CommandError: a URL is invalid.
    """
    instances = []
    for number, url in enumerate(urls, 1):
        try:
            instances.append(InstanceSettings(id=f"instance-{number}", url=url))
        except ValidationError as error:
            reason = error.errors()[0].get("ctx", {}).get("reason", "")
            raise UsageError(
                f"--instance-url needs http://HOST:PORT, not {without_password(url)!r}: {reason}"
            ) from error
    return tuple(instances)


def _children(
    config_file: str, size: FleetSize, ops_urls: Mapping[int, str], emulated: Sequence[InstanceSettings]
) -> tuple[ChildSpec, ...]:
    config = ("--config", config_file)
    instances = [  # a process each, so that one can be killed as a server of its own
        ChildSpec(
            instance.id,
            ("emulate", *config, "--emulator.instances", "1", "--emulator.port", str(urlsplit(instance.url).port)),
            STOP_INSTANCES,
            restart_after_s=_INSTANCE_AGAIN_AFTER_S,
        )
        for instance in emulated
    ]
    routers = [
        ChildSpec(
            f"router-{number}",
            ("router", *config, "--name", f"router-{number}", "--router.ops_port", str(ops_port)),
            STOP_ROUTERS,
            health_url=f"{ops_url}/health",
        )
        for number, (ops_port, ops_url) in enumerate(ops_urls.items(), 1)
    ]
    workers = [
        ChildSpec(f"worker-{number}", ("worker", *config, "--name", f"worker-{number}"), STOP_WORKERS)
        for number in range(1, size.workers + 1)
    ]
    return (*instances, *workers, *routers)


def emulated_pool(pool: PoolSettings, emulator: EmulatorSettings, roles: Sequence[Role] = ()) -> PoolSettings:
    """The pool with emulated instances, described by the figures of their engine; mixed ones unless ``roles`` are
    given, one for each.

    Raises:
        CommandError: the figures of the emulator are beyond what an instance may have.
    """
    engine = emulator.engine_config()
    roles = roles or (Role.MIXED,) * emulator.instances
    try:
        instances = tuple(
            InstanceSettings(
                id=f"{'instance' if role is Role.MIXED else role}-{1 + roles[: number - 1].count(role)}",
                role=role,
                url=f"http://127.0.0.1:{emulator.port + number - 1}",
                prefill_tokens_per_s=engine.prefill_tokens_per_s() * emulator.time_scale,
                kv_capacity_tokens=engine.kv_capacity_tokens,
                max_running_requests=engine.max_num_seqs,
            )
            for number, role in enumerate(roles, 1)
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UsageError(f"the emulator's engine is none: {wrong['loc'][0]}: {wrong['msg']}") from error
    return pool.model_copy(update={"model": emulator.served_model, "instances": instances})


def free_ports(count: int, host: str = "127.0.0.1", *, taken: Collection[int] = ()) -> tuple[int, ...]:
    """Ports without a listener right now, all different, and none that is ``taken`` already by this fleet."""
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    ports: list[int] = []
    with contextlib.ExitStack() as bound:
        while len(ports) < count:
            probe = bound.enter_context(socket.socket(family, kind))
            probe.bind(address)
            if (port := probe.getsockname()[1]) not in taken:
                ports.append(port)
    return tuple(ports)


def first_of_free_ports(wanted: int, count: int, host: str, *, taken: Collection[int] = ()) -> int:
    """The first of ``count`` free ports in a row: ``wanted``, or else the next ones above it. None of them
    is ``taken`` already by this fleet, which does not listen yet.

    Raises:
        CommandError: there is no such run of ports.
    """
    first = wanted
    for port in range(wanted, 65536):
        if port in taken or not is_free(host, port):
            first = port + 1
        elif port - first + 1 == count:
            return first
    raise CommandError(f"no {count} free ports in a row from {wanted} on; choose others with --emulator.port PORT")


def is_free(host: str, port: int) -> bool:
    """Whether no process listens on the port."""
    try:
        require_free_port(host, port)
    except CommandError:
        return False
    return True


def require_free_port(host: str, port: int) -> None:
    """Raises CommandError if the port is taken: replicas share it, so the kernel itself would let them join in."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not count
        try:
            probe.bind(address)
        except OSError as error:
            raise CommandError(
                f"cannot listen on {host}:{port}: {error.strerror}. Choose another port with --router.port PORT, "
                "or 0 for any free one"
            ) from error


def plain(value: Any) -> Any:
    """Settings as plain data with their secrets in clear text, for a file that only this user can read."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [plain(item) for item in value]
    return getattr(value, "value", value)  # members of an enumeration
