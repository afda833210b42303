"""The HTML report in a real browser: it fits a phone, it is readable in light and dark, and nothing
goes wrong. Needs Playwright for Python and a Chromium; skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stored import H200, decisions

from cudnn_autotune.cli.report import page

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright for Python")

SIZES = {"phone": (390, 844), "desktop": (1280, 800)}
# Names of the programs, where Playwright has not brought a browser of its own.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        program = (
            own if Path(own).is_file() else next(filter(None, map(shutil.which, PROGRAMS)), "")
        )
        if not program:
            pytest.skip("needs Chromium: `playwright install chromium`, or a system package")
        # As root, as in a container, Chromium refuses to start with its sandbox.
        sandbox = os.getuid() != 0
        opened = playwright.chromium.launch(executable_path=program, chromium_sandbox=sandbox)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("report") / "page.html"
    # More than are open from the start.
    made.write_text(page.render(decisions(), H200, source="h200.json"), encoding="utf-8")
    return made


class Opened:
    """A page, and all that the browser complains of."""

    def __init__(
        self, browser: Any, file: Path, size: str, scheme: str, script: bool = True
    ) -> None:
        self.complaints: list[str] = []
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            java_script_enabled=script,
        )
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.requests: list[str] = []
        self.page.goto(file.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: object) -> None:
        self.context.close()
        assert self.complaints == []
        assert len(self.requests) == 1, self.requests


def open_all(opened: Any) -> None:
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")


@pytest.mark.basic(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_it_fits(browser: Any, file: Path, size: str, scheme: str) -> None:
    with Opened(browser, file, size, scheme) as opened:
        open_all(opened)
        width = SIZES[size][0]
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        # Nothing is cut off either: no box ends outside of the page, or of its table.
        outside = opened.evaluate(
            """(width) => [...document.querySelectorAll('main *, header *')]
                .filter((e) => !e.closest('.hidden, thead, svg') && e.getClientRects().length)
                .filter((e) => e.getBoundingClientRect().right > width + 0.5)
                .map((e) => e.outerHTML.slice(0, 80))""",
            width,
        )
        assert outside == []


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(...)``: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    channels = [int(part) / 255 for part in colour.strip("rgba()").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.basic(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: Any, file: Path, scheme: str) -> None:
    """Every text against what is behind it: at least 4.5, WCAG's level AA."""
    with Opened(browser, file, "desktop", scheme) as opened:
        open_all(opened)
        pairs = opened.evaluate(
            """() => {
              const found = new Map();
              const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
              while (walker.nextNode()) {
                const e = walker.currentNode.parentElement;
                if (!walker.currentNode.data.trim() || !e.getClientRects().length) continue;
                if (e.closest('script, style')) continue;
                let back = e;
                while (back.parentElement
                       && getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') {
                  back = back.parentElement;
                }
                const style = getComputedStyle(e);
                const front = e instanceof SVGElement ? style.fill : style.color;
                const key = front + ' ' + getComputedStyle(back).backgroundColor;
                found.set(key, [front, getComputedStyle(back).backgroundColor,
                                walker.currentNode.data.trim().slice(0, 40)]);
              }
              return [...found.values()];
            }"""
        )
        assert len(pairs) > 8
        for front, back, text in pairs:
            bright, dark = sorted((luminance(front), luminance(back)), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (front, back, text)
        assert {luminance(back) > 0.5 for _, back, _ in pairs} == {scheme == "light"}


def test_filter(browser: Any, file: Path) -> None:
    with Opened(browser, file, "desktop", "light") as opened:
        rows = "section .sortable tbody tr:visible"
        assert opened.locator(rows).count() == 6
        opened.fill("#filter", "DGRAD 512")
        assert opened.locator(rows).count() == 1
        assert opened.locator("details:visible").count() == 1
        assert "512 of 3×3" in opened.locator(rows).inner_text()
        assert opened.locator("#shown").inner_text() == "1 of 6"
        opened.fill("#filter", "nothing like it")
        assert opened.locator(rows).count() == 0
        opened.fill("#filter", "")
        assert opened.locator(rows).count() == 6


def test_sorting(browser: Any, file: Path) -> None:
    with Opened(browser, file, "desktop", "light") as opened:

        def times() -> list[float]:
            cells = opened.locator(".sortable tbody td:nth-child(3)").all_inner_texts()
            return [float(cell) for cell in cells]

        before = times()
        button = opened.locator(".sortable thead button", has_text="time, ms")
        button.click()
        assert times() == sorted(before)
        assert opened.locator("[aria-sort=ascending]").count() == 1
        button.press("Enter")  # by keyboard as well
        assert times() == sorted(before, reverse=True)
        assert opened.locator("[aria-sort=descending]").inner_text().startswith("time, ms")
        opened.locator(".sortable thead button", has_text="problem").click()
        assert times() == before


def test_links_open_what_they_lead_to(browser: Any, file: Path) -> None:
    with Opened(browser, file, "phone", "light") as opened:
        assert opened.locator("details[open]").count() == 0
        opened.locator(".sortable tbody a").nth(3).click()
        opened.wait_for_function("document.querySelectorAll('details')[3].open")
        assert opened.locator("details[open]").count() == 1
        assert opened.locator("details[open] summary").bounding_box()["y"] < SIZES["phone"][1]


def test_without_scripts(browser: Any, file: Path) -> None:
    """The page reads without: only sorting and filtering are gone."""
    with Opened(browser, file, "phone", "light", script=False) as opened:
        assert not opened.locator("#filter").is_visible()
        assert opened.locator(".sortable tbody tr:visible").count() == 6
        opened.locator("details summary").nth(1).click()
        assert opened.locator("details[open] .candidates").is_visible()
