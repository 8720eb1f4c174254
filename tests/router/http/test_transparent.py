"""Whatever a body or a header says, an instance gets it as it came and its judgement is the answer.

Bodies of every API with random JSON values in their fields go through a whole replica to an instance that judges by the
bytes alone.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualmap.router.prompts.inference_request import COMPLETIONS_PATHS
from dualmap.runtime.pool_settings import PoolSettings
from tests.router import tools
from tests.support.bodies import BODIES, ODD_VALUES, places, with_value

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.sampled_from(ODD_VALUES),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "\ud800"]), inner, max_size=3)
    ),
    max_leaves=5,
)
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=20)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["x-request-id", "x-slo-ttft-ms", "traceparent", "tracestate", "priority", "content-type", "content-encoding",
         "x-dualmap-instance", "x-data-parallel-rank", "accept", "x-session-id", "authorization"]
    ),
    PRINTABLE,
    max_size=3,
)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(BODIES)))
    body = {"model": "default", **BODIES[path]}
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=4)):  # many fields change how others are read
        body.pop(name, None)
    if draw(st.integers(0, 9)) == 0:
        whole = json.dumps(draw(VALUES))
        return path, whole[: draw(st.integers(0, 40))].encode()
    for _ in range(draw(st.integers(1, 3))):
        if open_to := places(body):
            body = with_value(body, draw(st.sampled_from(open_to)), draw(VALUES))
    if isinstance(body.get("model"), str):
        body["model"] = "default"  # another is not in the fleet, which is the router's to say
    text = json.dumps(body)
    if draw(st.integers(0, 9)) == 0:
        text += " " * (70 << 10)  # read in steps
    return path, (b"\xef\xbb\xbf" if draw(st.integers(0, 9)) == 0 else b"") + text.encode()


def as_it_came(path: str, body: bytes) -> bytes:
    """Without the documented additions of the router."""
    added = (
        rb'"stream_options":{"include_usage":true}' if path in COMPLETIONS_PATHS else rb'"request_id":"resp_[^"]*@one"'
    )
    return re.sub(rb",?%b(}\s*)$" % added, rb"\1", body)


def verdict(body: bytes) -> dict[str, Any]:
    return {"judged": len(body), "error": "whatever it says"}


@pytest.fixture
async def replica(start_runtime: Any, start_instance: Any, start_router: Any) -> Any:
    async def judge(talk: Any) -> None:
        await talk.answer(verdict(talk.body), status=(200, 400, 404, 422)[len(talk.body) % 4])

    instance = await start_instance(judge)
    runtime = await start_runtime(instances=(tools.spec("one", url=instance.url),), pools=(PoolSettings(),))
    router = await start_router(runtime.intake, trust_transfers=True)
    return router, instance


@given(sent=requests(), headers=HEADERS, drop=st.booleans())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_the_instance_gets_the_same_bytes_and_its_answer_is_the_clients(
    replica: Any, sent: tuple[str, bytes], headers: dict[str, str], drop: bool
) -> None:
    router, instance = replica
    path, body = sent
    client = await router.connect()
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    client.request(path, body, headers=fields.encode("latin-1").decode("latin-1"))
    answer = await client.answer()
    talk = instance.talks.pop()
    client.close()

    assert as_it_came(path, talk.body) == body
    assert answer.json() == verdict(talk.body), answer
    assert answer.status == (200, 400, 404, 422)[len(talk.body) % 4]
