"""The page at /: what it loads, and, where a browser is, what happens in it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import mock_llm
from .live import Live, live

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def test_it_is_one_file_that_asks_nobody_else(server: Live) -> None:
    """Catches: a page that needs the network, or that may talk to anyone but its own server."""
    status, headers, body = server.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = body.decode()
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"(?m)^\s*//.*$", "", text)), "an address of somebody else's"
    assert not re.search(r"<(?:script|img|iframe)[^>]*\ssrc=|@import|url\(", text)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A tab of a headless browser, its console's complaints in `page.complaints`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        tab = browser.new_page(viewport={"width": 1360, "height": 850})
        tab.set_default_timeout(20_000)
        tab.complaints = []
        tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.on("console", lambda told: tab.complaints.append(told.text) if told.type == "error" else None)
        yield tab
        browser.close()


def test_a_chat_and_its_report(page: Any) -> None:
    """Catches: a page that does not stream, does not show what runs, or reads what a model says as HTML.

    RAPID_LLM_TEST_SCREENSHOT=FILE keeps a picture of it.
    """
    llm = mock_llm()
    with live(llm, ["<b>a model</b>"]) as server:
        page.goto(server.url)
        page.fill("#limit", "20")
        page.fill("#text", "<img src=x onerror=alert(1)>")
        page.press("#text", "Enter")
        page.wait_for_selector(".facts:not(:empty)")
        assert page.locator(".turn.user").inner_text() == "<img src=x onerror=alert(1)>"
        assert len(page.locator(".turn.assistant").inner_text()) == 20
        facts = page.locator(".facts").inner_text()
        assert "tok/s" in facts
        assert facts.endswith("cut at max tokens")
        page.wait_for_selector("td.row")
        assert page.locator("#model").inner_text() == "<b>a model</b>"
        assert "native/sample" in page.locator("#figures").inner_text()
        assert page.locator("#state").inner_text() == "ready"
        llm._decoder.gate.clear()  # type: ignore[attr-defined]
        page.fill("#text", "more")
        page.click("#send")
        page.click("#stop")
        page.wait_for_selector("#send:visible")
        llm._decoder.gate.set()  # type: ignore[attr-defined]
        if path := os.environ.get("RAPID_LLM_TEST_SCREENSHOT"):
            page.screenshot(path=path)
        assert page.complaints == []


def test_an_error_is_shown(page: Any) -> None:
    """Catches: a refusal that leaves the page waiting."""
    with live(mock_llm(), api_keys=("secret",)) as server:
        page.goto(server.url)
        page.fill("#text", "hi")
        page.press("#text", "Enter")
        page.wait_for_selector(".turn.error")
        assert "Authorization: Bearer" in page.locator(".turn.error").inner_text()
        page.fill("#key", "secret")
        page.fill("#limit", "5")
        page.fill("#text", "hi")
        page.press("#text", "Enter")
        page.wait_for_selector(".facts:not(:empty)")
        page.goto("about:blank")
