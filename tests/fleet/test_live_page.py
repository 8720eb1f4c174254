"""The live page in a real browser, over a real fleet.

``DUALMAP_SCREENSHOTS=docs/images scripts/test tests/fleet/test_live_page.py`` renews the pictures of the README.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import chromium
from fleet_process import Fleet, running_fleet, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SYSTEM_PROMPTS = ["You are a helpful assistant. " * 150, "Translate into Chinese. " * 260, "Write tests. " * 90]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def watched(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two replicas, of which the page sees both, behind an admin key."""
    options = ("--replicas", "2", "--workers", "1", "--router.admin_key", "boss", "--time-scale", "2")
    with running_fleet(tmp_path_factory.mktemp("watched"), options) as fleet:
        yield fleet


def chat(fleet: Fleet, number: int, tokens: int = 24) -> str:
    """A streamed chat to its end; its request id."""
    messages = [
        {"role": "system", "content": SYSTEM_PROMPTS[number % 3 if number % 5 else 0]},
        {"role": "user", "content": f"Question {number}: " + "why? " * (number * 37 % 400)},
    ]
    body = json.dumps({"model": fleet.model, "messages": messages, "max_tokens": tokens, "stream": True}).encode()
    headers = {"content-type": "application/json", "x-request-id": f"chat-{number}"}
    request = urllib.request.Request(f"{fleet.endpoint}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
        return str(answer.headers["x-request-id"])


def traffic(fleet: Fleet, first: int, requests: int) -> None:
    """So many chats, eight at a time."""
    numbers = iter(range(first, first + requests))

    def client() -> None:
        for number in numbers:
            chat(fleet, number)

    clients = [threading.Thread(target=client) for _ in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()


def opened(browser: Browser, fleet: Fleet, **options: Any) -> Page:
    """The page, unlocked and live."""
    page = browser.new_page(**options)
    page.set_default_timeout(20_000)
    page.goto(f"{fleet.endpoint}/ui")
    page.fill("#key", "boss")
    page.click("#lock button")
    page.wait_for_selector("html[data-state=live]")
    return page


def ticks(page: Page) -> int:
    return int(page.evaluate("Number(document.documentElement.dataset.ticks ?? 0)"))


def test_it_asks_for_the_admin_key_and_says_when_it_is_wrong(browser: Browser, watched: Fleet) -> None:
    page = browser.new_page()
    page.goto(f"{watched.endpoint}/ui")
    page.fill("#key", "wrong")
    page.click("#lock button")

    page.wait_for_selector("#refused:not([hidden])")
    assert page.evaluate("document.documentElement.dataset.state") == "locked"
    page.close()


def test_it_loads_and_shows_the_fleet_as_it_moves(browser: Browser, watched: Fleet) -> None:
    problems: list[str] = []
    page = opened(browser, watched)
    page.on("pageerror", lambda error: problems.append(str(error)))
    shown = ticks(page)
    traffic(watched, 100, 24)

    page.wait_for_selector("#requests tbody tr:nth-child(24)")
    until(lambda: ticks(page) > shown + 2, "it moves")
    assert {row.get_attribute("data-id") for row in page.locator("#instances .row").all()} == {
        f"instance-{number}" for number in range(1, 5)
    }
    assert page.locator("#keys tbody tr").count() >= 3
    assert page.locator("#replicas").inner_text().count("live requests") == 2
    until(lambda: "24 in all" in page.locator("#figures").inner_text(), "all are counted")
    replicas = {row.get_attribute("title").rpartition(" ")[2] for row in page.locator("#requests td[title]").all()}  # type: ignore[union-attr]
    assert len(replicas) == 2, "requests of every replica are listed"
    painted = page.evaluate(
        "performance.getEntriesByType('paint').find(e => e.name === 'first-contentful-paint').startTime"
    )
    assert painted > 0
    assert problems == []
    page.close()


def test_a_click_on_a_request_shows_why_it_went_where_it_went(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched)
    request_id = chat(watched, 7)

    page.click(f"#requests tr[data-id='{request_id}']")
    page.wait_for_selector("#story .candidates")

    story = page.locator("#story").inner_text()
    for words in (request_id, "Chosen: instance-", "The prompt", "cost, in seconds", "to first token", "completed"):
        assert words in story
    assert page.locator("#story .candidates .taken").count() == 1
    page.close()


def test_it_fits_a_phone_and_the_dark(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched, viewport={"width": 360, "height": 800}, color_scheme="dark")
    chat(watched, 8)
    page.wait_for_selector("#requests tbody tr")

    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(red, green, blue) < 40
    page.close()


def test_it_survives_the_restart_of_its_replica(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched)
    serving = page.locator("#status span").inner_text().rpartition(" ")[2]
    child = serving.rpartition("-")[0]

    died = watched.kill(child)
    page.wait_for_selector("html[data-state=lost]")
    page.wait_for_selector("html[data-state=live]")
    shown = ticks(page)
    until(lambda: ticks(page) > shown + 1, "it moves again")

    until(lambda: watched.pid(child) != died, "it is started again")
    page.close()


@pytest.mark.skipif("DUALMAP_SCREENSHOTS" not in os.environ, reason="makes pictures where DUALMAP_SCREENSHOTS says")
def test_pictures_of_the_readme(browser: Browser, watched: Fleet) -> None:
    folder = Path(os.environ["DUALMAP_SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    replay = subprocess.Popen(
        [
            sys.executable, "-m", "cli.main", "replay", "--trace", "toolagent", "--limit", "1500", "--rate", "4.6",
            "--max-input-tokens", "20480", "--time-scale", "2", "--url", watched.endpoint,
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for scheme in ("dark", "light"):
            size, still = {"width": 1280, "height": 1080}, "reduce"
            page = opened(browser, watched, viewport=size, color_scheme=scheme, reduced_motion=still)
            page.wait_for_timeout(25_000)
            page.screenshot(path=folder / f"live-page-{scheme}.png", full_page=True)
            if scheme == "dark":
                page.locator("#requests tbody tr", has_text="completed").nth(6).click()
                page.wait_for_selector("#story .candidates")
                page.locator("#story").screenshot(path=folder / "explain.png")
            page.close()
    finally:
        replay.terminate()
        replay.wait(20)
