"""Test a report's page in Chromium: errors, keyboard, two widths, light and dark; and take screenshots.

    python scripts/look.py report.html --out docs/images

Needs playwright (pip) and a Chromium (`apt install chromium`, or `playwright install chromium`).
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

LONG = 300_000  # timeout in milliseconds, long enough for a busy machine
WIDTHS = {"wide": (1280, 900), "narrow": (390, 844)}


def look(page: Any, name: str, scheme: str, out: Path) -> None:
    """One width in one scheme: use the page, then take a screenshot."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name}: wider than the screen"
    assert page.text_content("#outcome").startswith(("Identical", "Different")), "it opens with the finished race"
    page.keyboard.press("Space")  # it plays, perhaps to its end before anybody looks
    page.keyboard.press("End")
    page.wait_for_function("document.getElementById('play').textContent === 'Play'")
    assert page.text_content("#outcome").startswith(("Identical", "Different"))
    done, lanes = page.locator(".lane.done").count(), page.locator("#lanes .lane").count()
    assert done == lanes > 1
    page.keyboard.press("Home")
    assert page.locator(".lane.done").count() == 0
    page.keyboard.press("End")
    shown = page.locator("#prompt").input_value()
    for option in [*map(str, range(page.locator("#prompt option").count())), shown]:
        page.select_option("#prompt", option)
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("End")
        assert page.text_content("#outcome").startswith(("Identical", "Different"))
    page.locator("#step").focus()
    place = page.locator("#step").input_value()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.text_content("#where").startswith("step 2 of ")
    page.locator("#step").fill(place)
    assert page.locator("#tree rect").count() > 1
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.screenshot(path=out / f"report-{name}-{scheme}.png", full_page=True)
    chosen = page.locator("#lane").input_value()
    for lane in page.locator("#lane option").all_text_contents():
        page.select_option("#lane", lane)
        place = page.locator("#step").input_value()
        page.locator("#step").fill("1")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press(".")
        assert page.text_content("#where").startswith("step 2 of ")
        page.keyboard.press(",")
        assert page.text_content("#where").startswith("step 1 of ")
        page.locator("#step").fill(place)
        if page.locator("#second").is_visible():
            assert page.locator("#second-view rect").count() > 1
            file = re.sub(r"\W+", "-", lane)
            page.locator("#steps").screenshot(path=out / f"steps-{file}-{name}-{scheme}.png")
    page.select_option("#lane", chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    arguments.out.mkdir(parents=True, exist_ok=True)
    assert arguments.report.stat().st_size < 2_000_000, "the page is too large"
    problems: list[str] = []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=LONG)
        for name, (width, height) in WIDTHS.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.set_default_timeout(LONG)
                page.on("console", lambda message: problems.append(message.text))
                page.on("pageerror", lambda error: problems.append(str(error)))
                page.on("request", lambda asked: problems.append(asked.url) if asked.url.startswith("http") else None)
                page.goto(arguments.report.resolve().as_uri())
                look(page, name, scheme, arguments.out)
                page.close()
        browser.close()
    assert problems == [], problems
    print(f"no errors, no requests; pictures in {arguments.out}")


if __name__ == "__main__":
    main()
