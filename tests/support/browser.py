"""Debian's Chromium, driven by Playwright, and what must hold for whatever it shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, sync_playwright

from support.waiting import until

__all__ = ["Shown", "chromium", "shown"]

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox --headless --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
WAIT_MS_MAX = 30_000
OVERFLOW_SECONDS_MAX = 5.0
"""How long a page may take to fit into a window whose size has changed."""
NOT_ANSWERED = "Failed to load resource"
"""How Chromium begins a line about a request that was refused or had no answer."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; scripts/bootstrap --tests installs it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


class Shown:
    """One page, and what its console says."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.console: list[str] = []
        page.set_default_timeout(WAIT_MS_MAX)
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.console.append(f"error: {error}"))

    def see(self, text: str, within: str = "main") -> None:
        """Wait until that text is there."""
        self.page.locator(within).get_by_text(text).first.wait_for()

    def overflow(self) -> tuple[int, int]:
        """The width of the document beyond that of the window, and the elements that stick out of it."""
        found: list[int] = self.page.evaluate(
            """() => [
                document.documentElement.scrollWidth - innerWidth,
                [...document.querySelectorAll("main *")].filter((each) =>
                    !each.closest(".scroll, dialog, .spark, .hidden") &&
                    each.getBoundingClientRect().right > innerWidth + 1
                ).length,
            ]"""
        )
        return found[0], found[1]

    def faults(self) -> list[str]:
        """What axe-core finds that is serious or critical."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        axe = cache / "minishuffle" / "page" / "node_modules" / "axe-core" / "axe.min.js"
        self.page.evaluate(axe.read_text())
        found: list[dict[str, Any]] = self.page.evaluate("async () => (await axe.run()).violations")
        return [
            f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes'][:3]]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]

    def check(self, *, faults: bool = True) -> None:
        """Nothing sticks out, everybody can use it, and the console is empty. Looking for faults takes a
        second of processor time."""
        until(lambda: self.overflow() == (0, 0), "a page that nothing sticks out of", OVERFLOW_SECONDS_MAX)
        assert not faults or self.faults() == []
        assert self.console == []


@contextmanager
def shown(
    browser: Browser, url: str, *, width: int = 1280, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Shown]:
    """That page in a window of that width. ``PAGE_SHOTS=FOLDER`` keeps pictures of how it looked last."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    found = Shown(page)
    page.goto(url)
    try:
        yield found
    finally:
        if folder := os.environ.get("PAGE_SHOTS"):
            test = os.environ.get("PYTEST_CURRENT_TEST", "page").rpartition("::")[2].split(" ")[0]
            page.screenshot(path=Path(folder) / f"{test}-{width}-{scheme}.png", full_page=True)
        context.close()
