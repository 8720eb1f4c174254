"""A Kubernetes API server, as far as lists, watches and merge patches go, whose failures a test chooses.

It keeps what matters honest: every change has a version of its own; a list is of one version and comes in pages; a
watch continues from a version or is told that it has expired; a selector turns a change of labels into ADDED or
DELETED; bookmarks bring versions alone; a watch ends when it was asked to; a patch of another version is a conflict. It
is reached in the process by a transport of httpx, or over a socket by ``asgi``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import httpx

from dualmap.runtime.clock import Clock

PODS = "/api/v1/namespaces/default/pods"
SERVICES = "/api/v1/namespaces/default/services"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"

Object = dict[str, Any]

FIRST_VERSION = 100


@dataclass(frozen=True)
class Happened:
    """One change: an object before it and after it."""

    version: int
    path: str
    before: Object | None
    after: Object | None


@dataclass
class Refusal:
    """A reply in the place of the right one."""

    status: int
    body: bytes = b'{"kind": "Status", "message": "no"}'
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    path: str
    params: dict[str, str]
    token: str
    method: str = "GET"
    body: bytes = b""

    @property
    def is_watch(self) -> bool:
        return self.params.get("watch") == "1"


class Cluster:
    """The content of the cluster, and how its API server behaves now."""

    def __init__(self, clock: Clock) -> None:
        self.calls: list[Call] = []
        self.refuse: Callable[[Call], Refusal | None] = lambda _: None
        """The reply to a call instead of the right answer."""
        self.is_silent = False
        """Watches are open, and nothing comes any more, not even their end."""
        self.expires_by_status = False
        """An expired watch is refused with 410, instead of an event ERROR."""
        self.scales: dict[str, Scaled] = {}
        """What has a scale, by the path of that."""
        self._clock = clock
        self._objects: dict[str, dict[str, Object]] = {}
        self._version = FIRST_VERSION
        self._compacted = 0
        self.log: list[Happened] = []
        """Every change so far."""
        self._uids = 0
        self._cuts = 0
        self._bookmarks = 0
        self._said: list[bytes] = []
        self._is_closed = False
        self._changed: asyncio.Future[None] | None = None

    # what happens in the cluster
    def put(self, path: str, name: str, **content: Any) -> Object:
        """Make an object, or replace what is in it; its uid stays."""
        before = self._objects.get(path, {}).get(name)
        metadata = dict(content.pop("metadata", {}))
        if before is None:
            self._uids += 1
        uid = f"uid-{self._uids}" if before is None else before["metadata"]["uid"]
        self._version += 1
        after = {**content, "metadata": {**metadata, "name": name, "uid": uid, "resourceVersion": str(self._version)}}
        self._objects.setdefault(path, {})[name] = after
        self._happen(path, before, after)
        return after

    def delete(self, path: str, name: str) -> None:
        before = self._objects[path].pop(name)
        self._version += 1
        self._happen(path, before, None)

    def put_pod(
        self,
        name: str,
        *,
        ip: str = "10.0.0.1",
        ready: bool = True,
        terminating: bool = False,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
    ) -> Object:
        metadata: Object = {"labels": {"app": "vllm"} if labels is None else labels, "annotations": annotations or {}}
        if terminating:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        status = {"phase": "Running", "podIP": ip, "conditions": conditions}
        return self.put(PODS, name, metadata=metadata, status=status)

    def pods(self) -> dict[str, Object]:
        return self._objects.get(PODS, {})

    def _happen(self, path: str, before: Object | None, after: Object | None) -> None:
        self.log.append(Happened(self._version, path, before, after))
        self._wake()

    # what happens to the API server
    def compact(self) -> None:
        """Forget what happened: nobody can continue from an older version than the newest."""
        self._compacted = self._version

    def cut(self) -> None:
        """Break every connection that watches."""
        self._cuts += 1
        self._wake()

    def bookmark(self) -> None:
        """Tell every watch the newest version."""
        self._bookmarks += 1
        self._wake()

    def say(self, line: bytes) -> None:
        """Send every watch a line that is no event of the cluster: an ERROR, or garbage."""
        self._said.append(line)
        self._wake()

    def close(self) -> None:
        """End every watch, as a server that stops does."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    # the calls
    def answer(
        self, path: str, query: str, token: str, method: str = "GET", body: bytes = b""
    ) -> tuple[int, dict[str, str], AsyncIterator[bytes]]:
        call = Call(path, dict(parse_qsl(query)), token, method, body)
        self.calls.append(call)
        refusal = self.refuse(call)
        if refusal is not None:
            return refusal.status, refusal.headers, _once(refusal.body)
        if call.is_watch:
            if self.expires_by_status and int(call.params["resourceVersion"]) < self._compacted:
                return 410, {}, _once(json.dumps(_EXPIRED).encode())
            return 200, {}, self._watch(call)
        if path in self.scales:
            return self._scale(call, self.scales[path])
        return self._patch(call) if method == "PATCH" else self._list(call)

    def _scale(self, call: Call, scaled: Scaled) -> tuple[int, dict[str, str], AsyncIterator[bytes]]:
        if call.method == "PATCH":
            patch = json.loads(call.body)
            if patch["metadata"]["resourceVersion"] != str(scaled.version):
                return 409, {}, _once(json.dumps(_CONFLICT).encode())
            scaled.scale(patch["spec"]["replicas"])
        return 200, {}, _once(json.dumps(scaled.as_scale()).encode())

    def _patch(self, call: Call) -> tuple[int, dict[str, str], AsyncIterator[bytes]]:
        path, _, name = call.path.rpartition("/")
        if name not in self._objects.get(path, {}):
            return 404, {}, _once(b'{"kind": "Status", "message": "not found"}')
        after = _merged(self._objects[path][name], json.loads(call.body))
        return 200, {}, _once(json.dumps(self.put(path, name, **after)).encode())

    def _list(self, call: Call) -> tuple[int, dict[str, str], AsyncIterator[bytes]]:
        limit = int(call.params.get("limit", "500"))
        version, _, offset = call.params.get("continue", f"{self._version}:0").partition(":")
        if int(version) < self._compacted:
            return 410, {}, _once(json.dumps(_EXPIRED).encode())
        found = self._at(int(version), call)
        page = found[int(offset) : int(offset) + limit]
        metadata = {"resourceVersion": version}
        if int(offset) + limit < len(found):
            metadata["continue"] = f"{version}:{int(offset) + limit}"
        return 200, {}, _once(json.dumps({"kind": "List", "metadata": metadata, "items": page}).encode())

    def _at(self, version: int, call: Call) -> list[Object]:
        """Return the selected objects, as they were at a version."""
        objects = dict(self._objects.get(call.path, {}))
        for happened in reversed(self.log):
            if happened.version > version and happened.path == call.path:
                name = (happened.after or happened.before or {})["metadata"]["name"]
                objects.pop(name, None)
                if happened.before is not None:
                    objects[name] = happened.before
        return [copy.deepcopy(objects[name]) for name in sorted(objects) if _selects(call, objects[name])]

    def _since(self, version: int) -> list[Happened]:
        """The changes after a version: each change has the next one."""
        return self.log[version - FIRST_VERSION :]

    async def _watch(self, call: Call) -> AsyncIterator[bytes]:
        since = int(call.params["resourceVersion"])
        if since < self._compacted:
            yield _line("ERROR", _EXPIRED)
            return
        cuts, bookmarks, said = self._cuts, self._bookmarks, len(self._said)
        end = asyncio.ensure_future(self._clock.sleep(float(call.params["timeoutSeconds"])))
        try:
            while True:
                if self.is_silent:
                    await asyncio.get_running_loop().create_future()
                if cuts != self._cuts:
                    raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
                for happened in self._since(since):
                    since = happened.version
                    event = _event(call, happened)
                    if event is not None:
                        yield event
                if bookmarks != self._bookmarks and call.params.get("allowWatchBookmarks") == "true":
                    bookmarks = self._bookmarks
                    since = self._version
                    yield _line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(since)}})
                for line in self._said[said:]:
                    said += 1
                    yield line
                if self._is_closed or (end.done() and not self.is_silent):
                    return
                if not self._since(since):
                    change = asyncio.ensure_future(self._change())
                    try:
                        await asyncio.wait({change, end}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        change.cancel()
        finally:
            end.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await end


_EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


_CONFLICT = {"kind": "Status", "code": 409, "message": "the object has been modified"}


def _merged(given: Any, patch: Any) -> Any:
    """The merge of RFC 7396: None takes a name out."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(given) if isinstance(given, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


class Scaled:
    """A workload with its controller: it has as many pods as replicas as soon as ``reconcile`` runs, which each change
    of the scale does. Pods are named and removed as those of its kind are."""

    def __init__(
        self, cluster: Cluster, workload: str, *, replicas: int = 0, is_ready: bool = True, role: str = ""
    ) -> None:
        """``workload`` is KIND/NAME; with ``is_ready`` its new pods are ready at once. With a ``role`` pods have its
        label, and are selected by it."""
        self.labels = {"app": "vllm", **({"dualmap/role": role} if role else {})}
        self.kind, _, self.name = workload.partition("/")
        self.replicas = replicas
        self.version = 1
        self.sets: list[int] = []
        """Every number that was set by the API."""
        self.is_ready = is_ready
        self._cluster = cluster
        self._made = 0
        group = "leaderworkerset.x-k8s.io" if self.kind == "leaderworkerset" else "apps"
        self.path = f"/apis/{group}/v1/namespaces/default/{self.kind}s/{self.name}/scale"
        cluster.scales[self.path] = self
        self._network = len(cluster.scales)
        self.reconcile()

    def as_scale(self) -> Object:
        return {
            "kind": "Scale",
            "metadata": {"name": self.name, "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas} if self.replicas else {},  # the API leaves out a zero
            "status": {
                "replicas": len(self.pods()),
                "selector": ",".join(f"{name}={value}" for name, value in self.labels.items()),
            },
        }

    def scale(self, replicas: int) -> None:
        self.sets.append(replicas)
        self.replicas = replicas
        self.version += 1
        self.reconcile()

    def pods(self) -> list[str]:
        """Its pods that do not terminate."""
        pods = self._cluster.pods().items()
        return [name for name, pod in pods if "deletionTimestamp" not in pod["metadata"] and self._owns(name)]

    def _owns(self, name: str) -> bool:
        return name.rpartition("-")[0] == self.name

    def reconcile(self) -> None:
        """Make the pods that are missing, and remove those that are too many: these terminate."""
        while len(self.pods()) < self.replicas:
            self.add()
        for name in self._first_to_go()[: max(0, len(self.pods()) - self.replicas)]:
            self.terminate(name)

    def add(self) -> str:
        number = self._made
        if self.kind != "deployment":
            number = next(each for each in range(self.replicas) if f"{self.name}-{each}" not in self._cluster.pods())
        self._made += 1
        name = f"{self.name}-{number}" if self.kind != "deployment" else f"{self.name}-x{number}"
        ip = f"10.{self._network}.0.{self._made}"
        self._cluster.put_pod(name, ip=ip, ready=self.is_ready, labels=self.labels)
        return name

    def make_ready(self) -> None:
        for name in self.pods():
            self._cluster.put_pod(name, ip=self._cluster.pods()[name]["status"]["podIP"], labels=self.labels)

    def terminate(self, name: str) -> None:
        pod = self._cluster.pods()[name]
        notes = pod["metadata"].get("annotations", {})
        ip = pod["status"]["podIP"]
        self._cluster.put_pod(name, ip=ip, terminating=True, labels=self.labels, annotations=notes)

    def finish(self) -> None:
        """End the pods that terminate."""
        for name, pod in list(self._cluster.pods().items()):
            if "deletionTimestamp" in pod["metadata"] and self._owns(name):
                self._cluster.delete(PODS, name)

    def _first_to_go(self) -> list[str]:
        """Its pods, in the order in which its controller removes them."""
        pods = self._cluster.pods()
        if self.kind != "deployment":
            return sorted(self.pods(), key=lambda name: -int(name.rpartition("-")[2]))

        def rank(name: str) -> tuple[bool, int, int]:
            pod = pods[name]
            is_ready = pod["status"]["conditions"][0]["status"] == "True"
            cost = int(pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", "0"))
            return is_ready, cost, -int(name.rpartition("-x")[2])

        return sorted(self.pods(), key=rank)


def _line(kind: str, given: Object) -> bytes:
    return json.dumps({"type": kind, "object": given}).encode() + b"\n"


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _selects(call: Call, given: Object) -> bool:
    for term in filter(None, call.params.get("labelSelector", "").split(",")):
        name, _, text = term.partition("=")
        if given["metadata"].get("labels", {}).get(name) != text:
            return False
    _, _, wanted = call.params.get("fieldSelector", "").partition("=")
    return not wanted or given["metadata"]["name"] == wanted


def _event(call: Call, happened: Happened) -> bytes | None:
    """Return a change as it looks through the selector of a watch."""
    if happened.path != call.path:
        return None
    was = happened.before is not None and _selects(call, happened.before)
    now = happened.after is not None and _selects(call, happened.after)
    if now:
        return _line("MODIFIED" if was else "ADDED", happened.after or {})
    if not was:
        return None
    gone = copy.deepcopy(happened.before or {})
    gone["metadata"]["resourceVersion"] = str(happened.version)
    return _line("DELETED", gone)


class _Stream(httpx.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part

    async def aclose(self) -> None:
        await self._parts.aclose()  # type: ignore[attr-defined]


class ClusterTransport(httpx.AsyncBaseTransport):
    """Reaches the cluster in this process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        content = await request.aread()
        answer = self._cluster.answer(request.url.path, request.url.query.decode(), token, request.method, content)
        status, headers, parts = answer
        return httpx.Response(status, headers=headers, stream=_Stream(parts))


def asgi(cluster: Cluster) -> Callable[..., Any]:
    """Reaches the cluster over a socket, for a server of ASGI applications."""

    async def app(scope: Object, receive: Callable[[], Any], send: Callable[[Object], Any]) -> None:
        assert scope["type"] == "http"
        given = {name.decode(): text.decode() for name, text in scope["headers"]}
        token = given.get("authorization", "").removeprefix("Bearer ")
        body, more = b"", scope["method"] != "GET"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        query = scope["query_string"].decode()
        status, headers, parts = cluster.answer(scope["path"], query, token, scope["method"], body)
        sent = [(name.encode(), text.encode()) for name, text in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        try:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.RemoteProtocolError:
            return  # cut: without its last chunk the reply is broken
        await send({"type": "http.response.body", "body": b""})

    return app
