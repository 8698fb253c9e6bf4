"""A headless Chromium for pages on disk. No page may reach the network or write to the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from tests.browser.chromium import chromium_program, sandbox_arguments

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = chromium_program()
    if program is None:
        pytest.skip("no Chromium on PATH; install Debian's package chromium, or set GKD_CHROMIUM to the program")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=sandbox_arguments())
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Return a function that opens a file, with options of the browser's context; checks all pages at the end."""
    contexts, wrong = [], list[str]()

    def on_request(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            wrong.append(f"request: {request.url}")

    def opened(file: Path, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}, "offline": True} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("request", on_request)
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.goto(file.as_uri())
        page.locator("html[data-ready]").wait_for(state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
