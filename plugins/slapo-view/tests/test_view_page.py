"""The page: one file that loads nothing, whose data no name or note can leave; and the frame of a notebook."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_view
from slapo_core.errors import ArgumentError
from slapo_testing import FakeEnvironment
from tests.messages import Messages

from .pictured import EVIL, batch, scheduled


class Parsed(HTMLParser):
    """A page's elements with their attributes, and the text in each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = f"{tag} {dict(attrs).get('type') or ''}".strip()

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, text: str) -> None:
        if self._inside:
            self.texts[self._inside] = self.texts.get(self._inside, "") + text


def hostile() -> slapo.Schedule:
    """A schedule whose class, attribute and note are markup."""
    kind = type(EVIL, (nn.Module,), {"forward": lambda self, x: x})
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module(EVIL.replace(".", ""), kind())
    schedule = slapo.create_schedule(model)
    schedule["0"].annotate("weight", "note", EVIL)
    return schedule


def test_the_page_is_one_file_with_the_pictures_data() -> None:
    shown = scheduled({"pp": 2, "tp": 2}, stages=2).picture(title="a <b> & c")
    page = Parsed(shown.html())
    assert json.loads(page.texts["script application/json"]) == json.loads(json.dumps(shown.to_json()))
    assert page.texts["title"] == "a <b> & c"
    assert page.texts["pre"] == str(shown)
    assert [tag for tag, _ in page.tags] == [
        *("html", "head", "meta", "meta", "meta", "title", "link", "style", "body", "main", "noscript", "pre"),
        *("script", "script"),
    ]
    attributes = [one for _, each in page.tags for one in each.items()]
    assert [one for one in attributes if one[0] in ("src", "href")] == [("href", "data:,")]
    program = page.texts["script"] + page.texts["style"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg\")|@import|url\(", program)


def test_the_policy_of_the_page_allows_its_own_program_and_style_only() -> None:
    page = Parsed(scheduled().picture().html())
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes) or ""
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[name].encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"


def test_no_name_or_note_leaves_the_data() -> None:
    schedule = hostile()
    shown = schedule.picture(title=EVIL).beside(schedule.picture())
    page = Parsed(shown.html())
    assert json.loads(page.texts["script application/json"]) == json.loads(json.dumps(shown.to_json()))
    assert not re.search("[<>&]", page.texts["script application/json"])  # nothing that a browser may read as an end
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not any(tag == "img" for tag, _ in page.tags)
    assert page.texts["title"] == f"{EVIL} and Sequential"


def test_the_program_makes_no_markup_of_texts() -> None:
    program = (Path(slapo_view.__file__).parent / "page.js").read_text("utf-8")
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|document\.write|eval\(|Function\(|\"on[a-z]+\"", program)


def test_a_notebook_shows_the_page_in_a_frame(fake_distributions: FakeEnvironment) -> None:
    schedule = scheduled({"tp": 2})
    shown = schedule._repr_html_()
    assert shown is not None
    (frame,) = Parsed(shown).tags
    assert frame[0] == "iframe"
    assert frame[1]["sandbox"] == "allow-scripts"
    assert frame[1]["srcdoc"] == schedule.picture().html()
    assert html.escape("<script>") in shown
    bare = slapo.Schedule(nn.Linear(2, 2), registry=fake_distributions.registry())
    assert bare._repr_html_() is None  # slapo-view is not there


def test_a_page_is_saved_or_says_why_not(tmp_path: Path, message: Messages) -> None:
    shown = scheduled().picture(batch())
    shown.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text("utf-8") == shown.html()
    with pytest.raises(ArgumentError) as refused:
        shown.save(tmp_path / "nothing" / "page.html")
    message(str(refused.value).replace(str(tmp_path), "DIRECTORY"), "No such file")


def test_repeated_blocks_make_the_page_no_larger() -> None:
    def page(blocks: int) -> str:
        with torch.device("meta"):
            schedule = slapo.create_schedule(nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks)), mesh={"tp": 2})
        schedule["*"].shard("weight", axis=0)
        return schedule.picture().html()

    assert len(page(200)) < len(page(2)) + 200
