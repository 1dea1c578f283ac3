"""The chat page in a real browser, as a person uses it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import KEYS, Server, serving
from tests.serving.test_lifecycle import wait_for
from tests.serving.test_models import models_in

DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(DRIVER is None, reason="needs Chromium and its driver"),
]
webdriver: Any = pytest.importorskip("selenium.webdriver")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1200,800",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page"), keys=False) as started:
        yield started


class Page:
    """The page, by what is on it."""

    def __init__(self, browser: Any, url: str) -> None:
        self._browser = browser
        browser.get("about:blank")
        browser.get(url)

    def all(self, css: str) -> list[Any]:
        return list(self._browser.find_elements("css selector", css))

    def one(self, css: str) -> Any:
        (element,) = self.all(css)
        return element

    def run(self, script: str) -> Any:
        return self._browser.execute_script(script)

    def click(self, css: str, at: int = 0) -> None:
        """Click in one step: a list may be drawn again between two."""
        self.run(f"document.querySelectorAll({css!r})[{at}].click()")

    def wait(self, condition: Callable[[], object]) -> None:
        wait_for(lambda: bool(condition()), 30)

    def write(self, text: str) -> None:
        self.one("#text").send_keys(text, "\ue007")

    def say(self, text: str) -> None:
        """Send a text, and wait for the whole answer."""
        notes = len(self.all(".note"))
        self.write(text)
        self.wait(lambda: len(self.all(".note")) > notes)

    def texts(self, css: str) -> list[str]:
        return self.run(f"return [...document.querySelectorAll({css!r})].map((x) => x.textContent)")

    def errors(self) -> list[str]:
        log = self._browser.get_log("browser")
        return [line["message"] for line in log if line["level"] == "SEVERE"]


def test_conversations_are_listed_opened_renamed_and_deleted(browser: Any, local: Server) -> None:
    page = Page(browser, local.url)
    page.say("Tell me a story")
    assert len(page.all(".said.user")) == 1
    assert not page.one("#key").is_displayed()
    answer = page.texts(".said.model")[0]
    assert answer
    page.wait(lambda: page.texts(".row .open") == ["Tell me a story"])
    browser.refresh()
    page.wait(lambda: page.texts(".said") == ["Tell me a story", answer])
    page.one("#new").click()
    page.wait(lambda: not page.all(".said"))
    page.say("Another one")
    page.wait(lambda: page.texts(".row .open") == ["Another one", "Tell me a story"])
    page.click(".row .open", 1)
    page.wait(lambda: page.texts(".said") == ["Tell me a story", answer])
    page.run("window.prompt = () => 'My title'; window.confirm = () => true")
    page.click(".row [title=Rename]")
    page.wait(lambda: page.texts(".row .open") == ["My title", "Tell me a story"])
    page.click(".row [title=Delete]", 1)  # the one that is shown
    page.wait(lambda: page.texts(".row .open") == ["My title"])
    page.wait(lambda: not page.all(".said"))
    page.click(".row [title=Delete]")
    page.wait(lambda: not page.all(".row"))
    assert page.errors() == []


BEGIN = "$('text').value = 'Tell me a story'; $('form').requestSubmit(); "


def test_an_answer_is_stopped_by_button_and_by_new(browser: Any, local: Server) -> None:
    page = Page(browser, local.url)
    for _ in range(2):
        assert page.run(BEGIN + "return $('send').textContent") == "Stop"
        page.run("$('send').click()")
        assert page.texts("#send") == ["Send"]
    page.wait(lambda: page.texts(".said .failed") == ["stopped: not part of the conversation"] * 2)
    page.run(BEGIN + "$('new').click()")
    page.wait(lambda: not page.all(".said"))
    page.say("A new one")
    assert page.texts(".said.user") == ["A new one"]


SLOW = """
const real = window.fetch;
window.sent = [];
window.fetch = async (path, options) => {
  if (path === "/v1/responses") window.sent.push(JSON.parse(options.body));
  const answer = await real(path, options);
  if (path === "/v1/conversations") await new Promise((go) => setTimeout(go, 500));
  return answer;
};
"""


def test_new_while_a_conversation_is_made_leaves_nothing(browser: Any, local: Server) -> None:
    page = Page(browser, local.url)
    page.wait(lambda: page.texts("#work")[0])  # the list is drawn
    listed = page.texts(".row .open")
    page.run(SLOW + BEGIN + "setTimeout(() => $('new').click(), 100)")
    page.wait(lambda: not page.all(".said"))
    page.say("A new one")
    assert page.texts(".said.user") == ["A new one"]
    assert [each["input"] for each in page.run("return window.sent")] == ["A new one"]
    page.wait(lambda: page.texts(".row .open") == ["A new one", *listed])


def test_settings_are_those_of_the_next_answer(browser: Any, local: Server) -> None:
    page = Page(browser, local.url)
    changed = "$({0!r}).value = {1!r}; $({0!r}).dispatchEvent(new Event('change')); "
    given = {"temperature": "0.3", "top_p": "0.9", "system": "Be brief.", "thinking": "none"}
    page.run(SLOW + "".join(changed.format(*each) for each in given.items()))
    try:
        page.say("With settings")
        (sent,) = page.run("return window.sent")
    finally:
        page.run("localStorage.clear()")
    assert (sent["temperature"], sent["top_p"]) == (0.3, 0.9)
    assert sent["instructions"] == "Be brief."
    assert sent["reasoning"] == {"effort": "none"}
    assert page.texts("#work")[0], "what the devices do, in words"


def test_markup_is_text_and_code_is_code(browser: Any, local: Server) -> None:
    page = Page(browser, local.url)
    text = "<b>x</b> `a<b` and **bold**\\n```py\\nif a < b:\\n    go()\\n```"
    page.run(f'say("model", "{text}")')
    assert page.texts(".said code") == ["a<b", "if a < b:\n    go()"]
    assert page.texts(".said strong") == ["bold"]
    assert page.all(".said b") == []
    page.run('const line = answerLine(); line.think("Hm."); line.write("Well.")')
    assert page.texts("details.thought div") == ["Hm."]
    assert not page.one("details.thought div").is_displayed()


def test_enter_that_ends_a_composition_does_not_send(browser: Any, local: Server) -> None:
    page = Page(browser, local.url)
    page.run(
        "document.querySelector('#text').value = 'x'; document.querySelector('#text')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true}))"
    )
    assert page.all(".said") == []
    page.one("#text").clear()
    page.one("#send").click()
    assert page.all(".said") == []


WRITES = """
events = async function* () {
  for (let i = 0; i < 60; i++) {
    yield { type: "response.output_text.delta", delta: "line " + i + "\\n" };
    if (i === 40 && window.up) $("said").scrollTop = 0;
    await new Promise((done) => setTimeout(done, 1));
  }
  throw new Error("network error");
};
"""


def test_an_error_keeps_the_text_and_scrolling_up_stays(browser: Any, local: Server) -> None:
    page = Page(browser, local.url)
    page.run(WRITES)
    for up in (False, True):
        page.run(f"window.up = {str(up).lower()}")
        count = len(page.all(".said .failed"))
        page.write("x")
        page.wait(lambda count=count: len(page.all(".said .failed")) > count)
        assert page.texts(".said .failed")[-1] == "network error"
        assert page.texts(".said.model")[-1].startswith("line 0\nline 1\n")
        assert "line 59" in page.texts(".said.model")[-1]
        top, end = page.run("const x = $('said'); return [x.scrollTop, x.scrollHeight]")
        assert end > 1000
        assert (top == 0) == up
    assert page.run("return document.activeElement.id") == "text"


def test_a_model_is_chosen_where_there_are_several(
    browser: Any, local: Server, tmp_path: Path
) -> None:
    first, second = models_in(tmp_path / "files")
    page = Page(browser, local.url)
    page.wait(lambda: page.texts("#model") == ["demo"])
    assert not page.one("#models").is_displayed()
    options = (str(second), "--models-max", "1", "--max-seq-len", "256")
    with serving(tmp_path / "two", *options, model=str(first), keys=False) as server:
        page = Page(browser, server.url)
        page.wait(lambda: page.one("#models").is_displayed())
        unloaded = ["assistant (unloaded)", "tiny (unloaded)"]
        assert page.texts("#models option") == unloaded
        page.run("$('models').value = 'tiny'; $('models').dispatchEvent(new Event('change'))")
        page.say("abc")
        page.wait(lambda: page.texts("#models option") == [unloaded[0], "tiny"])
        browser.refresh()
        page.wait(lambda: page.run("return $('models').value") == "tiny")
        page.run("$('models').value = 'assistant'; $('models').dispatchEvent(new Event('change'))")
        page.say("abc")  # the conversation goes on with another model
        page.wait(lambda: page.texts("#models option") == ["assistant", "tiny (unloaded)"])
        assert page.texts(".said.failed") == []
        assert page.errors() == []
    page.run("localStorage.clear()")


def test_a_key_is_asked_for_once(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path / "keyed") as server:
        page = Page(browser, server.url)
        page.wait(lambda: page.one("#key").is_displayed())
        assert page.texts("#model") == ["this server needs a key"]
        page.one("#key").send_keys(KEYS["notes"], "\ue004")
        page.wait(lambda: page.texts("#model")[0].startswith("demo"))
        page.say("Tell me a story")
        assert page.texts(".said.failed") == []
