"""The live page in a real browser, over a real fleet.

``DUALMAP_SCREENSHOTS=docs/images scripts/test tests/fleet/test_live_page.py`` renews the pictures of the README.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from tests.fleet.browser import chromium
from tests.fleet.fleet_process import Fleet, running_fleet, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright").expect
"""Says what it found instead, where ``until`` does not."""

SYSTEM_PROMPTS = ["You are a helpful assistant. " * 150, "Translate into Chinese. " * 260, "Write tests. " * 90]
LONG = "vllm-qwen2-5-7b-instruct"
REMEMBER_STATES = """() => {
    const root = document.documentElement
    window.states = []
    new MutationObserver(() => window.states.push(root.dataset.state)).observe(root, {attributeFilter: ["data-state"]})
}"""
"""Lists what states the page has from now on: on a busy machine one may be over before it is looked at."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def watched(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two replicas, of which the page sees both, behind an admin key."""
    directory = tmp_path_factory.mktemp("watched")
    options = ["--replicas", "2", "--workers", "1", "--router.admin_key", "boss", "--time-scale", "2"]
    options += ["--router.batches.storage", str(directory / "files")]
    with running_fleet(directory, options) as fleet:
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


def order(page: Page) -> list[str]:
    """Request ids of the list, from the top."""
    return [
        str(name)
        for name in page.evaluate("[...document.querySelectorAll('#requests tr[data-id]')].map(r => r.dataset.id)")
    ]


def until_listed(page: Page, first: int, requests: int) -> None:
    """Wait for the rows of so many chats, which come from both replicas."""
    wanted = {f"chat-{number}" for number in range(first, first + requests)}
    until(lambda: wanted <= set(order(page)), f"all of {sorted(wanted)} are listed")


def traffic(fleet: Fleet, first: int, requests: int) -> None:
    """Make so many chats, eight at a time."""
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
    counted = page.locator("#figures small").first
    expect(counted).to_have_text("24 in all", timeout=60_000)
    replicas = {row.get_attribute("title").rpartition(" ")[2] for row in page.locator("#requests td[title]").all()}
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


def test_a_calm_fleet_says_so_in_one_line_and_shows_its_latencies(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched)
    traffic(watched, 200, 16)

    until(lambda: page.locator("#verdict b").inner_text() == "All is well", "all is well")
    assert "4 of 4 instances ready, 2 replicas" in page.locator("#verdict").inner_text()
    assert page.locator("#problems li").count() == 0

    def figures() -> dict[str, str]:
        tiles = [tile.inner_text().split("\n") for tile in page.locator(".figure").all()]
        return {name: value for name, value, *_ in tiles}

    names = ("TTFT P50", "TTFT P99", "per output token", "output tokens / s")
    until(lambda: all(figures()[name] not in ("–", "0") for name in names), "every figure has a value")
    page.close()


def test_rows_stand_still_under_the_pointer_and_under_the_focus(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched)
    traffic(watched, 300, 8)
    until_listed(page, 300, 8)

    page.hover("#requests tbody tr:nth-child(3)")
    before = order(page)
    traffic(watched, 310, 8)
    page.wait_for_selector("#waiting:not([hidden])")
    until(lambda: "8 new" in page.locator("#waiting").inner_text(), "it says how many wait")
    assert order(page) == before
    page.mouse.move(0, 0)
    until_listed(page, 310, 8)
    assert page.locator("#waiting").is_hidden()

    page.focus("#requests tbody tr:nth-child(1)")
    page.keyboard.press("ArrowDown")
    before = order(page)
    assert page.evaluate("document.activeElement.dataset.id") == before[1]
    traffic(watched, 320, 4)
    until(lambda: "4 new" in page.locator("#waiting").inner_text(), "they wait")
    assert order(page) == before
    page.keyboard.press("Enter")
    page.wait_for_selector("#story .candidates")
    assert before[1] in page.locator("#story h2").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    until_listed(page, 320, 4)
    page.close()


def test_chips_show_the_requests_of_one_instance(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched)
    traffic(watched, 400, 12)
    until_listed(page, 400, 12)

    page.select_option("#of", "instance-1")
    shown = {cell.inner_text() for cell in page.locator("#requests td:nth-child(4)").all()}
    assert shown <= {"instance-1"}
    page.select_option("#of", "")
    page.click("#kinds [data-kind=failed]")
    assert page.locator("#requests tbody tr").count() == 0
    assert page.locator(".unmatched").is_visible()
    page.close()


def test_it_survives_the_restart_of_its_replica(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched)
    serving = page.locator("#status span").inner_text().rpartition(" ")[2]
    child = serving.rpartition("-")[0]

    page.evaluate(f"({REMEMBER_STATES})()")
    died = watched.kill(child)
    until(lambda: "lost" in page.evaluate("window.states"), "it says that its replica is lost")
    page.wait_for_selector("html[data-state=live]")
    shown = ticks(page)
    until(lambda: ticks(page) > shown + 1, "it moves again")

    until(lambda: watched.pid(child) != died, "it is started again")
    page.close()


def test_what_is_wrong_comes_first_and_colours_and_names_stay(browser: Browser, tmp_path: Path) -> None:
    with running_fleet(tmp_path, ("--replicas", "1", "--workers", "1", "--time-scale", "2")) as fleet:
        urls = [each["url"] for each in fleet.instances().values()]
        for number in range(20):
            fleet.post("/admin/instances", {"id": f"{LONG}-{number}", "url": urls[number % 4]})
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{fleet.endpoint}/ui")
        until(lambda: page.locator("#instances .row").count() == 24, "every instance has a row")

        def rows() -> list[str]:
            return list(page.evaluate("[...document.querySelectorAll('#instances .row')].map(r => r.dataset.id)"))

        def colours() -> dict[str, str]:
            tints = "r => [r.dataset.id, r.style.getPropertyValue('--c')]"
            return dict(page.evaluate(f"[...document.querySelectorAll('#instances .row')].map({tints})"))

        def is_whole(name: str) -> bool:
            of_name = page.locator(f"#instances .row[data-id='{name}'] .id")
            cut = "n => [n, ...n.children].some(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)"
            return of_name.inner_text() == name and not of_name.evaluate(cut)

        before = colours()
        assert len(set(before.values())) == 24, "no two of one colour"
        assert is_whole(f"{LONG}-0")
        assert is_whole(f"{LONG}-19")

        fleet.emulator("instance-3", "/emulator/die", {"abruptly": True, "revive_after_s": 600})
        until(lambda: rows()[0] == "instance-3", "it is the first row")
        page.wait_for_selector(".row[data-id=instance-3][data-state=down]")
        until(lambda: "instances are down" in page.locator("#problems").inner_text(), "they are said together")
        banner = page.locator("#problems").inner_text()
        assert "refused" in banner
        assert "critical" in banner
        row = page.locator(".row[data-id=instance-3]")
        assert "refused" in row.inner_text()
        assert "since" in row.inner_text()
        assert float(row.evaluate("r => getComputedStyle(r).opacity")) == 1, "it does not pale"
        assert is_whole("instance-3")

        request = urllib.request.Request(f"{fleet.endpoint}/admin/instances/{LONG}-0?force=true", method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
        until(lambda: f"{LONG}-0" not in rows(), "one leaves")
        assert colours() == {name: tint for name, tint in before.items() if name != f"{LONG}-0"}
        page.reload()
        until(lambda: page.locator("#instances .row").count() == 23, "it is loaded again")
        assert colours() == {name: tint for name, tint in before.items() if name != f"{LONG}-0"}

        page.set_viewport_size({"width": 360, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.close()


def test_a_store_that_is_away_is_the_first_problem_and_old_figures_say_so(browser: Browser, tmp_path: Path) -> None:
    with running_fleet(tmp_path, ("--replicas", "2", "--workers", "1")) as fleet:
        page = browser.new_page()
        page.goto(f"{fleet.endpoint}/ui")
        until(lambda: page.locator("#verdict b").inner_text() == "All is well", "all is well")
        store = fleet.pid("store")
        os.kill(store, signal.SIGSTOP)
        try:
            until(lambda: "The store" in page.locator("#problems li").first.inner_text(), "it is said")
            assert "The figures below are of" in page.locator("#verdict").inner_text()
            fresh = browser.new_page()
            fresh.goto(f"{fleet.endpoint}/ui")
            until(lambda: fresh.locator("#instances .row").count() == 4, "a new viewer sees the instances")
            fresh.close()
        finally:
            os.kill(store, signal.SIGCONT)
        until(lambda: page.locator("#verdict b").inner_text() == "All is well", "all is well again")
        page.close()


@pytest.mark.skipif("DUALMAP_SCREENSHOTS" not in os.environ, reason="makes pictures where DUALMAP_SCREENSHOTS says")
def test_pictures_of_the_readme(browser: Browser, watched: Fleet) -> None:
    folder = Path(os.environ["DUALMAP_SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    replay = subprocess.Popen(
        [
            sys.executable, "-m", "dualmap", "replay", "--trace", "toolagent", "--limit", "1500", "--rate", "4",
            "--max-input-tokens", "20480", "--time-scale", "2", "--url", watched.endpoint,
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for scheme in ("dark", "light"):
            size, still = {"width": 1280, "height": 1080}, "reduce"
            page = opened(browser, watched, viewport=size, color_scheme=scheme, reduced_motion=still)
            page.wait_for_timeout(25_000)
            busy = page.locator("#instances .bar:not(.kv) small:not(:empty)")
            until(lambda busy=busy: busy.count() >= 3, "most instances have work ahead")
            page.screenshot(path=folder / f"live-page-{scheme}.png", full_page=True)
            if scheme == "dark":
                page.locator("#requests tbody tr", has_text="completed").nth(6).click()
                page.wait_for_selector("#story .candidates")
                page.locator("#story").screenshot(path=folder / "explain.png")
            page.close()
    finally:
        replay.terminate()
        replay.wait(20)


def test_batches_are_shown_with_how_far_they_are(browser: Browser, watched: Fleet) -> None:
    page = opened(browser, watched)
    assert page.locator("#batches").is_hidden()
    # The first lines are answered soon, and the batch is still at work when it is cancelled.
    body = {"model": watched.model, "prompt": "batch", "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body | {"max_tokens": tokens}}
        for number, tokens in enumerate([100] * 100 + [600] * 900)
    ]
    with OpenAI(base_url=f"{watched.endpoint}/v1", api_key="any", timeout=60) as client:
        file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        row = page.locator("#batches tbody tr")
        expect(row).to_contain_text("in progress", timeout=60_000)
        expect(row).to_contain_text("1,000")
        expect(row).to_contain_text(batch.id[:14])
        bar = row.locator(".answered")
        until(lambda: "width: 0%" not in (bar.get_attribute("style") or "width: 0%"), "the bar grows")

        client.batches.cancel(batch.id)
        expect(page.locator("#batches")).to_be_hidden(timeout=60_000)
    page.close()
