"""The page in a real browser: on a desk and on a phone, light and dark, by mouse and by keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .browser import PROGRAM, Browser
from .pictured import EVIL, scheduled
from .test_view_page import hostile

pytestmark = [
    pytest.mark.breadth,
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs chromium: apt-get install chromium"),
]

WINDOWS = {"desk": (1280, 900), "phone": (360, 740)}
CHOSEN = "document.querySelector('[role=treeitem][aria-selected=true]').title"
FOCUSED = "document.activeElement.title"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pages") / "page.html"
    scheduled({"pp": 2, "tp": 2}, stages=2, checkpoints=1).picture(memory=True, optimizer=torch.optim.AdamW).save(file)
    return file


_ROWS = "[...document.querySelectorAll('[role=treeitem]')]"


def visible(browser: Browser) -> list[str]:
    return browser.run(f"{_ROWS}.filter((row) => row.checkVisibility()).map((row) => row.title)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_page_fits_its_window_and_logs_nothing(browser: Browser, page: Path, window: str, scheme: str) -> None:
    width, height = WINDOWS[window]
    browser.open(page, width=width, height=height, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.run("document.querySelectorAll('h2').length") == 3  # stages, time, memory
    charts = "[...document.querySelectorAll('svg')].map((each) => each.getBoundingClientRect().width)"
    assert min(browser.run(charts)) > 200
    background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    assert (sum(browser.run(background)) < 300) is (scheme == "dark")
    browser.run("document.querySelector('.bar button').click()")
    assert (sum(browser.run(background)) < 300) is (scheme == "light")
    assert browser.errors == []
    assert browser.run(_CONTRAST) == []


_CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d");
  const parts = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((one) => one / 255); };
  const light = (rgb) => rgb.slice(0, 3).map((one) => (one <= 0.04 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    if (!element) return [1, 1, 1];
    const [r, g, b, a] = parts(getComputedStyle(element).backgroundColor);
    if (a > 0.99) return [r, g, b];
    const below = behind(element.parentElement);
    return [r, g, b].map((one, at) => (a ? one : 0) * a + below[at] * (1 - a));
  };
  const found = [];
  for (const element of document.querySelectorAll("body *:not(script):not(svg *)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    const [one, two] = [light(parts(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) found.push(`${element.className}: ${element.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()
"""
"""Texts whose contrast with what is behind them is below 4.5."""


@pytest.mark.parametrize("window", WINDOWS)
def test_the_tree_is_walked_by_keys(browser: Browser, page: Path, window: str) -> None:
    width, height = WINDOWS[window]
    browser.open(page, width=width, height=height, scheme="light")
    browser.run("document.querySelector('[role=treeitem]').focus()")
    everything = visible(browser)
    browser.press("ArrowLeft")
    assert visible(browser) == everything[:1]
    browser.press("ArrowRight")
    assert visible(browser) == everything
    browser.press("ArrowRight", "ArrowDown", "ArrowRight")
    assert browser.run(FOCUSED) == "blocks.0"
    assert browser.run(CHOSEN) == "Blocks"
    browser.press("Enter")
    assert browser.run(CHOSEN) == "blocks.0"
    assert "checkpoint()" in browser.run("document.querySelector('.detail').textContent")
    browser.press("ArrowDown", "ArrowDown", "ArrowDown", " ")
    assert browser.run(CHOSEN) == "blocks.0.feed.up"
    text = browser.run("document.querySelector('.detail').textContent")
    for said in (
        "64 \u00d7 16",
        "32 \u00d7 16",
        "tp: S(0)",
        "shard(('weight', 'bias'), axis=0)",
        "pictured.py",
        "all_reduce over tp",
    ):
        assert said in text
    browser.press("ArrowLeft")
    assert browser.run(FOCUSED) == "blocks.0.feed"
    browser.press("End")
    assert browser.run(FOCUSED) == everything[-1]
    browser.press("ArrowDown", "Home", "ArrowUp")
    assert browser.run(FOCUSED) == everything[0]
    covered = (
        "(() => { const box = document.activeElement.getBoundingClientRect(); const top = document.elementFromPoint("
        "box.left + 40, box.top + 8); return top?.closest('[role=treeitem]')?.title })()"
    )
    for _ in everything[1:]:
        browser.press("ArrowDown")
        assert browser.run(covered) == browser.run(FOCUSED)  # nothing hides the row in focus
    assert browser.errors == []


def test_a_screen_reader_gets_a_tree(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, height=900, scheme="light")
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]]
    assert ("tree", "Modules of Blocks") in named
    items = [node for node in nodes if node["role"]["value"] == "treeitem"]
    levels = [next(one["value"]["value"] for one in node["properties"] if one["name"] == "level") for node in items]
    assert levels[:3] == [1, 2, 2]
    assert not [role for role, name in named if role in ("button", "img", "region", "group") and not name]


def test_stages_memory_and_steps_answer_to_clicks(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, height=900, scheme="light")
    browser.run("document.querySelector('.crossing').click()")
    assert browser.run("document.querySelector('.crossing').getAttribute('aria-expanded')") == "true"
    assert "4 \u00d7 6 \u00d7 16" in browser.run("document.querySelector('.crossing').closest('section').textContent")
    points = "document.querySelector('polygon.part').getAttribute('points')"
    before = browser.run(points)
    others = "document.querySelector('[aria-label=\"Kinds of ranks\"] button[aria-pressed=false]')"
    browser.run(f"{others}.click()")
    assert browser.run(points) != before
    status = "document.querySelector('[role=status]').textContent"
    assert browser.run("document.querySelector('input[type=range]').ariaValueText") == browser.run(status)
    at_the_peak = browser.run(status)
    browser.run("document.querySelector('input[type=range]').focus()")
    browser.press("End")
    assert browser.run(status) != at_the_peak
    assert " in the optimizer" in browser.run(status)
    steps = "[...document.querySelectorAll('[aria-label=Steps] button')]"
    browser.run(f"{steps}.find((one) => one.textContent.startsWith('core.checkpoint')).click()")
    dimmed = browser.run("[...document.querySelectorAll('.row:not(.dim)')].map((row) => row.title)")
    assert dimmed == ["Blocks", "blocks", "blocks.0"]
    browser.run("document.querySelector('.turn').click()")
    assert len(visible(browser)) == 1
    assert browser.errors == []


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    shown = hostile().picture(title=EVIL)
    shown.beside(shown).save(file)
    browser.open(file, width=1280, height=900, scheme="dark")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == EVIL
    browser.run("[...document.querySelectorAll('.row')].forEach((row) => row.click())")
    assert browser.errors == []


def test_a_notebook_frame_runs_the_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "notebook.html"
    head = '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">'
    file.write_text(f"{head}{scheduled()._repr_html_()}", "utf-8")
    browser.open(file, width=1000, height=800, scheme="light")
    with browser.frame():
        assert browser.run("document.querySelector('h1').textContent") == "Blocks"
        assert "blocks" in visible(browser)
    assert browser.errors == []


def test_the_page_without_scripts_has_the_text(browser: Browser, page: Path) -> None:
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page, width=1280, height=900, scheme="light")
        document: Any = browser.send("DOM.getDocument", depth=-1)
        assert "blocks.3-5 x 3: Block" in json.dumps(document)
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
