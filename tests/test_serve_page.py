"""The page, in a browser: a chat from the first key to the last, and what it shows of the guesses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outpace import serve

from .serving import LONG, Running, new_decoder, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_is_on_its_own() -> None:
    page = (Path(serve.__file__).parent / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "@import", "import("):
        assert word not in page


browser = pytest.mark.skipif(
    find_spec("playwright") is None or CHROMIUM is None, reason="needs playwright and chromium (apt install chromium)"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(new_decoder()) as found:
        yield found


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * LONG)
        yield found
        found.close()


@pytest.fixture
def page(server: Running, chrome: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The server's page, wide or narrow, light or dark; no error may show in its console."""
    context = chrome.new_context(**getattr(request, "param", {}))
    context.set_default_timeout(1000 * LONG)
    found = context.new_page()
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.goto(server.url)
    found.wait_for_selector("#model:has-text('tiny')")
    yield found
    context.close()
    assert errors == []


def ask(page: Any, text: str, tokens: int = 24) -> None:
    page.evaluate(f"document.getElementById('max_tokens').value = {tokens}")
    page.fill("#said", text)
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:enabled")


SCREENS = [
    {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark", "has_touch": True},
]


@browser
@pytest.mark.parametrize("page", SCREENS, indirect=True)
def test_a_chat(page: Any, server: Running) -> None:
    assert page.evaluate("document.activeElement.id") == "said"
    ask(page, "hello")
    expected = server.text("hello", max_tokens=24)
    assert "".join(page.locator(".assistant .token").all_text_contents()) == expected
    assert float(page.text_content("#speed")) > 0
    assert "×" in page.text_content("#plain")
    assert float(page.text_content("#per-step")) >= 1
    assert page.locator("#rows rect").count() > 2
    assert page.locator("#tree rect").count() >= 1
    ask(page, "and then?")
    assert page.locator(".message").count() == 4
    assert int(page.text_content("#prompt").split(", ")[1]) > 0  # the first turn is not read again
    page.locator(".assistant").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.chosen").count() == 1
    assert page.text_content("#step").startswith("Step ")
    assert page.locator(".assistant .token").nth(3).get_attribute("class").endswith("chosen") is False
    page.locator(".assistant .token").nth(3).hover()
    assert page.locator(".token.chosen").count() == 1
    assert "chosen" in page.locator(".assistant .token").nth(3).get_attribute("class")
    assert page.text_content("#sources").strip()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != back
    page.keyboard.press("Alt+n")
    assert page.locator(".message").count() == 0
    page.select_option("#chats", index=1)
    assert page.locator(".message").count() == 4
    page.reload()
    assert page.locator("#chats option").count() == 2


@browser
def test_what_texts_hold_stays_text(page: Any) -> None:
    ask(page, "<img src=x onerror=document.title='bad'><script>document.title='bad'</script>")
    assert page.title() == "Outpace"
    assert page.locator("#chat img, #chat script").count() == 0


@browser
@pytest.mark.parametrize("by", ["Escape", "#stop"])
def test_stop_ends_the_answer(page: Any, server: Running, by: str) -> None:
    worker = server.service._worker
    assert worker is not None
    with server.paused(when=lambda: sum(job.result.new_tokens for job in worker._jobs.values()) > 30):
        page.evaluate("document.getElementById('max_tokens').value = 1500")
        page.fill("#said", "hello")
        page.keyboard.press("Enter")
        page.wait_for_selector(".token >> nth=3")
        page.click(by) if by.startswith("#") else page.keyboard.press(by)
        page.wait_for_selector("#send:enabled")
        assert page.text_content(".assistant .note") == "stopped"
    server.settle()


@browser
@pytest.mark.parametrize("leave", ["Alt+n", "#chats"])
def test_a_chat_that_is_left_within_its_first_answer_is_stored(page: Any, server: Running, leave: str) -> None:
    ask(page, "an earlier one")
    page.keyboard.press("Alt+n")
    worker = server.service._worker
    assert worker is not None
    with server.paused(when=lambda: sum(job.result.new_tokens for job in worker._jobs.values()) > 30):
        page.evaluate("document.getElementById('max_tokens').value = 1500")
        page.fill("#said", "hello")
        page.keyboard.press("Enter")
        page.wait_for_selector(".token >> nth=3")
        page.keyboard.press(leave) if leave == "Alt+n" else page.select_option("#chats", index=1)
        page.wait_for_selector("#send:enabled")
    assert page.locator(".message").count() == (0 if leave == "Alt+n" else 2)
    page.reload()
    page.select_option("#chats", label="hello")
    assert page.locator(".message.user").text_content() == "hello"
    assert len(page.locator(".message.assistant").text_content()) > 3
    server.settle()


@browser
def test_an_empty_box_means_the_servers_default(page: Any) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#settings summary")
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        page.fill(f"#{name}", "")
    page.fill("#said", "x" * 2000)  # which leaves room for a short answer
    page.keyboard.press("Enter")
    page.wait_for_selector(".token")
    page.wait_for_selector("#send:enabled")
    assert {"max_tokens", "temperature", "top_p", "seed"}.isdisjoint(sent[0])


@browser
def test_a_lost_connection_shows_and_the_page_goes_on(page: Any) -> None:
    page.context.set_offline(True)
    ask(page, "hello")
    assert "connection was lost" in page.text_content(".assistant .note")
    page.wait_for_selector("#lost.shown")
    page.context.set_offline(False)
    page.wait_for_selector("#lost", state="hidden")
    ask(page, "again")
    assert page.locator(".assistant").nth(1).locator(".token").count() > 3


@browser
def test_a_connection_lost_within_an_answer_shows(page: Any) -> None:
    with running(new_decoder(), drain=0.1) as short:
        worker = short.service._worker
        assert worker is not None
        page.goto(short.url)
        page.wait_for_selector("#send:enabled")
        with short.paused(when=lambda: sum(job.result.new_tokens for job in worker._jobs.values()) > 30):
            page.evaluate("document.getElementById('max_tokens').value = 1500")
            page.fill("#said", "hello")
            page.keyboard.press("Enter")
            page.wait_for_selector(".token >> nth=3")
            for connection in [*short.server.server_state.connections]:
                short.server.servers[0].get_loop().call_soon_threadsafe(connection.transport.abort)
            page.wait_for_selector("#send:enabled")
            assert "connection was lost" in page.text_content(".assistant .note")


@browser
def test_settings_and_the_system_prompt_are_sent_and_remembered(page: Any, server: Running) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#settings summary")
    given = {"system": "be brief", "temperature": "0.7", "top_p": "0.9", "seed": "5"}
    for name, value in given.items():
        page.fill(f"#{name}", value)
    page.select_option("#method", "lookahead")
    ask(page, "hello")
    (body,) = sent
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert (body["temperature"], body["top_p"], body["seed"], body["method"]) == (0.7, 0.9, 5, "lookahead")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    expected = server.text(messages=messages, max_tokens=24, temperature=0.7, top_p=0.9, seed=5)
    assert "".join(page.locator(".assistant .token").all_text_contents()) == expected
    page.reload()
    assert {name: page.input_value(f"#{name}") for name in given} == given


@browser
def test_tokens_have_the_colour_of_who_guessed_them(page: Any) -> None:
    ask(page, "one two one two one two", tokens=200)  # by and by the text repeats itself
    colour = "nodes => [...new Set(nodes.map(node => node.title + ' ' + node.style.background))]"
    found = dict(pair.split(" ", 1) for pair in page.eval_on_selector_all(".assistant .token", colour))
    assert found["model"] == "var(--model)"
    assert len({*found.values()}) == len(found) > 1


@browser
def test_a_key_is_asked_for(chrome: Any) -> None:
    with running(new_decoder(), api_keys=("secret",)) as found:
        page = chrome.new_page()
        page.set_default_timeout(1000 * LONG)
        page.goto(found.url)
        page.wait_for_selector("#model:has-text('key is needed')")
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        page.wait_for_selector("#model:has-text('tiny')")
        ask(page, "hello")
        assert page.locator(".assistant .token").count() > 3
        page.close()


@browser
def test_errors_are_shown(page: Any) -> None:
    ask(page, "x" * 3000)
    assert "Shorten" in page.text_content(".assistant .note")
