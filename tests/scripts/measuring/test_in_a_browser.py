"""The page of a run in a real browser: it draws itself alone, the keyboard reaches it all, and all of it is legible."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.measuring.runs import NASTY, Story, page_of_one_token

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: its page is not tried in a browser")
TEXT = (
    "The lamp was lit at dusk, and the keeper wrote in the log: all is well.\nNext day \U0001f642 the boat came. " * 3
)
SIZES = [(1400, 900), (380, 800)]
Seen = Callable[..., list[Any]]
# before the page's own script: what goes wrong, and who asks when light changes to dark
BEFORE = """const complaints = [], asked = [], media = window.matchMedia.bind(window);
window.addEventListener("error", (e) => complaints.push(String(e.message)));
document.addEventListener("securitypolicyviolation", (e) => complaints.push(e.blockedURI));
console.error = (...what) => complaints.push(what.join(" "));
window.matchMedia = (q) => { const m = media(q); m.addEventListener = (_, f) => asked.push(f); return m; };"""
ANSWERS = """(() => {
  const all = (s) => [...document.querySelectorAll(s)], first = (s) => document.querySelector(s);
  const said = () => document.getElementById("looked").textContent, here = () => document.activeElement;
  const press = (key) => { here().dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true})); return here(); };
  const point = (e) => { e.scrollIntoView({block: "center"}); const b = e.getClientRects()[0];
    document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2)
      .dispatchEvent(new MouseEvent("mouseover", {bubbles: true})); return said(); };
  return [[EXPRESSIONS], complaints, performance.getEntriesByType("resource").map((e) => e.name)];
})()"""
# the contrast of each element that holds text with what is painted behind it (WCAG 2.1), the least first
CONTRASTS = """(() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = ([r, g, b]) => { const f = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    if (!e.getClientRects().length || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(e.tagName)) continue;
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const inks = own ? [getComputedStyle(e).color] : [];
    if (e.classList.contains("mark")) inks.push(getComputedStyle(e, "::before").color);
    for (const ink of inks) {
      const [a, b] = [light(parse(ink)), light(behind(e))].sort((x, y) => y - x);
      found.push([(a + 0.05) / (b + 0.05), e.tagName + "." + e.className]);
    }
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""
WRITTEN = "all('.t').map((e) => e.textContent).join('')"


class Browser:
    """A headless Chromium and one page of it: its debugging protocol over two pipes."""

    def __init__(self, profile: Path) -> None:
        (theirs_in, self.to), (self.back, theirs_out) = os.pipe(), os.pipe()

        def place() -> None:  # where the protocol wants the pipes; neither may be written over first
            for end, spare in ((3, os.dup(theirs_in)), (4, os.dup(theirs_out))):
                os.dup2(spare, end)

        flags = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-dev-shm-usage"
        command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={profile}", "about:blank"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=place, close_fds=False, **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.rest, self.last, self.session = b"", 0, dict[str, str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Page.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=BEFORE)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.last += 1
        os.write(
            self.to, json.dumps({"id": self.last, "method": method, "params": params, **self.session}).encode() + b"\0"
        )
        while True:
            while b"\0" not in self.rest:
                assert select.select([self.back], [], [], 60.0)[0], "the browser does not answer"
                data = os.read(self.back, 1 << 20)
                assert data, "the browser ended"
                self.rest += data
            line, _, self.rest = self.rest.partition(b"\0")
            if (answer := json.loads(line)).get("id") == self.last:
                assert "exceptionDetails" not in answer.get("result", answer), answer
                result: dict[str, Any] = answer["result"]
                return result

    def run(self, expression: str) -> Any:
        """What an expression gives in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.process.kill()
    one.process.wait()
    os.close(one.to)
    os.close(one.back)


@pytest.fixture
def seen(browser: Browser, tmp_path: Path) -> Seen:
    """What expressions give in a page, one after the other; it must load without a complaint and ask for no file."""

    def look(html: str, *expressions: str, size: tuple[int, int] = SIZES[0], dark: bool = False) -> list[Any]:
        page = tmp_path / f"run{browser.last}.html"
        page.write_text(html, encoding="utf-8")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme])
        width, height = size
        how = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **how)
        browser.call("Page.navigate", url=page.as_uri())
        until = time.monotonic() + 60
        while browser.run("document.readyState + location.href") != f"complete{page.as_uri()}":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.02)
        found, complaints, asked_for = browser.run(ANSWERS.replace("EXPRESSIONS", ", ".join(expressions)))
        assert complaints == asked_for == []
        return list(found)

    return look


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_page_draws_itself_alone_and_fits_the_window(seen: Seen, size: tuple[int, int]) -> None:
    story = Story(TEXT, title="a run")
    counts = [f"all('{what}').length" for what in (".round", "#positions tr", ".t.s1", ".text del", ".reads")]
    root = "document.documentElement"
    fits, title, text, tiles, *found = seen(
        story.page(), f"{root}.scrollWidth <= {root}.clientWidth", "document.title", WRITTEN,
        "first('#tiles').innerText", *counts, size=size,
    )  # fmt: skip
    assert fits and title == "a run" and text == story.request.text == TEXT
    refused = sum(len(event.refused) for told in story.events for event in told.events)
    assert found == [len(story.events), len(story.stats.drafted_by_position), story.stats.accepted, refused, 1]
    assert f"{story.stats.decode_tokens_per_second / 5.0:.2f}\u00d7" in tiles


@pytest.mark.parametrize("where", ["text", "prompt", "title", "refused"])
def test_nasty_texts_are_shown_and_not_obeyed(seen: Seen, where: str) -> None:
    given = {"text": TEXT} | ({"refused": NASTY.encode()} if where == "refused" else {where: NASTY})
    story = Story(**given)  # type: ignore[arg-type]
    text, heading, title, n_scripts, planted, refused = seen(
        story.page(), WRITTEN, "first('h1').textContent", "document.title", "document.scripts.length",
        "all('article b').length", "point(first('[data-round]'))",
    )  # fmt: skip
    assert (text, heading, planted) == (story.request.text, story.title, 0)
    assert title != "broken" and n_scripts == 2
    if where == "refused":
        assert "</script>" in refused.replace(" ", "")


def test_a_nasty_token_is_shown_whole_as_text_as_prompt_and_as_what_was_refused(seen: Seen) -> None:
    shown = [f"first('{s}').textContent" for s in ("h1", ".prompt", "#facts", "#verdict", ".text del")]
    text, heading, *others, title = seen(page_of_one_token(NASTY), WRITTEN, *shown, "document.title")
    assert text == heading == NASTY and title != "broken"
    assert all("</script><script>" in other for other in others)


def test_pointing_at_a_token_or_a_round_says_what_the_round_did_and_frames_all_of_it(seen: Seen) -> None:
    top = "first('canvas').getClientRects()[0].y"  # of the picture, wherever the page is scrolled to
    moved = f"first('canvas').dispatchEvent(new MouseEvent('mousemove', {{clientY: {top} + 2}}))"
    nothing, token, framed, bar, raster, again, hidden = seen(
        Story(TEXT, refused=b" no").page(), "said()", "point(first('.t'))", "all('.on').length",
        "point(all('.round')[1])", f"({moved}, said())",
        "point(first('h1'))", "(first('#refusals').click(), getComputedStyle(first('.text del')).display)",
    )  # fmt: skip
    assert nothing == "Nothing is pointed at."
    assert token.startswith("Round 0: 1 text, gamma 5, 2 of 5 drafts kept; 200 ms, of it draft 40 ms, verify")
    assert token.endswith("; request 0: 2 of 5 drafts kept, refused \u00b7 n o, 7 positions read")
    assert framed == 2 and bar.startswith("Round 1: 1 text, gamma 5, 2 of 2 drafts kept")
    assert raster == again == token and hidden == "none"  # what was looked at last stays


def test_the_keyboard_alone_reaches_tokens_and_rounds(seen: Seen) -> None:
    keys = [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Home", 0), ("ArrowLeft", 0), ("End", 100)]
    stops, width, *found, text = seen(
        Story(TEXT).page(), "all('[data-round][tabindex=\"0\"]').length",
        "(first('[data-round]').focus(), here().matches(':focus-visible') && getComputedStyle(here()).outlineWidth)",
        *(f"Number(press('{key}').dataset.round)" for key, _ in keys),
        "(first('.round').focus(), Number(press('ArrowRight').dataset.round))",
        "all('[data-round][tabindex=\"0\"]').length", "said()",
    )  # fmt: skip
    assert (stops, width) == (2, "2px")  # one stop for the text, one for the rounds
    assert found == [*(place for _, place in keys), 1, 2] and text.startswith("Round 1: 1 text, gamma 5")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(seen: Seen, dark: bool, size: tuple[int, int]) -> None:
    html = Story(TEXT, sources=("lookup", "streaming", "guided")).page()
    paper = "getComputedStyle(document.body).backgroundColor"
    paper, contrasts = seen(html, paper, CONTRASTS, dark=dark, size=size)
    assert (paper == "rgb(255, 255, 255)") != dark and len(contrasts) > 100
    assert contrasts[0][0] >= 4.5, contrasts[:5]


def test_the_picture_of_what_was_read_follows_light_and_dark(seen: Seen) -> None:
    change = "(document.documentElement.style.setProperty('--s1', '#123456'), asked.forEach((f) => f()))"
    shot = "first('canvas').toDataURL()"
    before, _, after = seen(Story(TEXT).page(), shot, change, shot)
    assert before != after


@pytest.mark.parametrize("timed", [False, True])
def test_rounds_without_timed_parts_are_drawn_whole(seen: Seen, timed: bool) -> None:
    said, n_pictures, page = seen(
        Story(TEXT, timed=timed).page(), "all('.round')[3].getAttribute('aria-label')",
        "all('.reads').length", "document.body.innerText",
    )  # fmt: skip
    assert ("verify" in said) == timed == ("CUDA graph" not in page) and n_pictures == timed
