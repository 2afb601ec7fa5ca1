"""The page of a run in a real browser: it draws itself alone, the keyboard reaches it all, and all of it is legible."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts.measuring.browser import Browser, browsing, find_chromium
from tests.scripts.measuring.runs import NASTY, Story, page_of_one_token

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: its page is not tried in a browser")
TEXT = (
    "The lamp was lit at dusk, and the keeper wrote in the log: all is well.\nNext day \U0001f642 the boat came. " * 3
)
SIZES = [(1400, 900), (380, 800)]
HERE = "document.activeElement"
LOOKED = "document.getElementById('looked').innerText"
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
    const marked = getComputedStyle(e, "::before").content;
    const inks = own ? [getComputedStyle(e).color] : [];
    if (e.classList.contains("mark")) inks.push(getComputedStyle(e, "::before").color);
    for (const ink of inks) {
      const [a, b] = [light(parse(ink)), light(behind(e))].sort((x, y) => y - x);
      found.push([(a + 0.05) / (b + 0.05), e.tagName + "." + e.className]);
    }
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = find_chromium()
    assert chromium
    with browsing(chromium, tmp_path_factory.mktemp("profile")) as one:
        yield one


def shown(browser: Browser, tmp_path: Path, story: Story, **window: object) -> Story:
    """Open the page of a story, which must load without a complaint and ask for nothing but itself."""
    path = tmp_path / "run.html"
    path.write_text(story.page(), encoding="utf-8")
    browser.open(path, **window)  # type: ignore[arg-type]
    assert browser.complaints == [] and browser.requested == [path.as_uri()]
    return story


def text_of(browser: Browser) -> str:
    text: str = browser.run("document.querySelector('.text').textContent")
    return text


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_page_draws_itself_alone_and_fits_the_window(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    story = shown(browser, tmp_path, Story(TEXT, title="a run"), width=size[0], height=size[1])
    assert text_of(browser) == story.request.text == TEXT
    assert browser.run("document.title") == "a run"
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.run("document.querySelectorAll('.round').length") == len(story.events)
    assert browser.run("document.querySelectorAll('#positions tr').length") == len(story.stats.drafted_by_position)
    assert browser.run("document.querySelectorAll('.t.s1').length") == story.stats.accepted
    refusals = sum(bool(event.refused) for told in story.events for event in told.events)
    assert browser.run("document.querySelectorAll('.t.x').length") == refusals
    ratio = story.stats.decode_tokens_per_second / 5.0
    assert f"{ratio:.2f}\u00d7" in browser.run("document.getElementById('tiles').innerText")


@pytest.mark.parametrize("where", ["text", "prompt", "title", "refused"])
def test_nasty_texts_are_shown_and_not_obeyed(browser: Browser, tmp_path: Path, where: str) -> None:
    given = {"text": TEXT} | ({"refused": NASTY.encode()} if where == "refused" else {where: NASTY})
    story = shown(browser, tmp_path, Story(**given))  # type: ignore[arg-type]
    assert text_of(browser) == story.request.text
    assert browser.run("document.querySelector('h1').textContent") == story.title
    assert browser.run("document.title") != "broken"
    assert browser.run("document.scripts.length") == 2
    assert browser.run("document.querySelectorAll('article b, aside b').length") == 0
    browser.run("document.querySelector('.t.x').focus()")
    assert browser.complaints == []
    if where == "refused":
        assert "</script>" in browser.run(f"{LOOKED}.replace(/\\s/g, '')")


def test_a_nasty_token_is_shown_whole_as_text_as_prompt_and_as_what_was_refused(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    path.write_text(page_of_one_token(NASTY), encoding="utf-8")
    browser.open(path)
    browser.press("Tab")
    browser.run("document.querySelector('.t').focus()")
    assert browser.complaints == [] and browser.requested == [path.as_uri()]
    assert text_of(browser) == browser.run("document.querySelector('h1').textContent") == NASTY
    for selector in (".prompt", "#facts", "#ways", "#looked .chip.no", "#looked .token"):
        assert "</script><script>" in browser.run(f"document.querySelector('{selector}').textContent"), selector
    assert browser.run("document.scripts.length") == 2 and browser.run("document.title") != "broken"


def test_the_mouse_shows_what_was_refused_and_a_click_keeps_it(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, Story(TEXT, refused=b" no"))
    assert "Look closer" in browser.run(LOOKED)
    browser.point(".t.x", click=False)
    assert (
        browser.run("[...document.querySelectorAll('#looked .chip.no')].map((e) => e.textContent).join('')")
        == "\u00b7no"
    )
    browser.point("h1", click=False)
    assert "Look closer" in browser.run(LOOKED)
    browser.point(".t.x", click=True)
    browser.point("h1", click=False)
    assert "in place of a draft that it refused" in browser.run(LOOKED)
    assert browser.run("document.querySelectorAll('#looked .chip.s1').length") == 2  # kept before it
    assert "refused" in browser.run(f"{HERE}.getAttribute('aria-label')").lower()


def test_the_keyboard_alone_reaches_tokens_and_rounds(browser: Browser, tmp_path: Path) -> None:
    story = shown(browser, tmp_path, Story(TEXT))
    for _ in range(12):
        browser.press("Tab")
        if browser.run(f"{HERE}.classList.contains('t')"):
            break
    assert browser.run(f"{HERE}.classList.contains('t') && {HERE}.matches(':focus-visible')")
    assert browser.run(f"parseFloat(getComputedStyle({HERE}).outlineWidth)") >= 2
    assert browser.run(f"{HERE}.number") == 0
    for key, number in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("r", 2), ("r", 8), ("Home", 0)]:
        browser.press(key)
        assert browser.run(f"{HERE}.number") == number, key
    top = browser.run(f"{HERE}.getBoundingClientRect().top")
    browser.press("ArrowDown")
    assert browser.run(f"{HERE}.getBoundingClientRect().top") > top
    browser.press("ArrowUp")
    assert browser.run(f"{HERE}.number") == 0
    browser.press("End")
    assert browser.run(f"{HERE}.number") == len(TEXT.encode()) - 1
    browser.press("Tab")
    for _ in range(3):  # what lies between, if anything
        if browser.run(f"{HERE}.classList.contains('round')"):
            break
        browser.press("Tab")
    at = browser.run(f"{HERE}.number")
    assert browser.run(f"{HERE}.classList.contains('round')")
    browser.press("Home")
    browser.press("ArrowRight")
    assert browser.run(f"{HERE}.number") == 1 and at is not None
    assert browser.run(f"{HERE}.getAttribute('aria-label')").startswith(
        "Round 1: one text, gamma 5, 2 of 2 drafts kept"
    )
    assert "Round 1" in browser.run(LOOKED) and browser.run("document.querySelectorAll('.t.on').length") == 3
    browser.press("Escape")
    assert "Look closer" in browser.run("document.getElementById('looked').textContent")
    assert browser.run("document.querySelectorAll('[role=listbox] > [tabindex=\"0\"]').length") == 2  # one stop each
    assert len(story.events) == browser.run("document.querySelectorAll('.round').length")


def test_in_a_narrow_window_what_is_looked_at_comes_from_below_and_goes_again(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, Story(TEXT), width=380, height=800)
    look = "getComputedStyle(document.getElementById('look')).display"
    assert browser.run(look) == "none"
    browser.point(".t.x", click=True)
    assert browser.run(look) == "block"
    box = "document.getElementById('look').getBoundingClientRect()"
    assert browser.run(f"{box}.bottom <= innerHeight && {box}.top > innerHeight / 2 && {box}.width <= 380")
    browser.point("#close", click=True)
    assert browser.run(look) == "none"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(
    browser: Browser, tmp_path: Path, dark: bool, size: tuple[int, int]
) -> None:
    sources = ("lookup", "streaming", "guided")
    shown(browser, tmp_path, Story(TEXT, sources=sources), dark=dark, width=size[0], height=size[1])
    browser.run("document.querySelector('.t.x').focus()")
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") != dark
    contrasts = browser.run(CONTRASTS)
    assert len(contrasts) > 100
    assert contrasts[0][0] >= 4.5, contrasts[:5]


def test_the_picture_of_what_was_read_follows_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, Story(TEXT))
    first = "document.querySelector('.raster canvas').toDataURL()"
    light = browser.run(first)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", features=[scheme])
    until = time.monotonic() + 10  # it is reported with the next frame
    while browser.run(first) == light:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("timed", [False, True])
def test_rounds_without_timed_parts_are_drawn_whole(browser: Browser, tmp_path: Path, timed: bool) -> None:
    shown(browser, tmp_path, Story(TEXT, timed=timed))
    said = browser.run("document.querySelectorAll('.round')[3].getAttribute('aria-label')")
    assert ("verify" in said) == timed
    assert (browser.run("document.querySelectorAll('.reads').length") == 1) == timed
    assert ("CUDA graph" in browser.run("document.body.innerText")) != timed
