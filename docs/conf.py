"""Sphinx configuration: `make docs` builds the pages of this folder to build/site.

The pages are Markdown that reads well in a repository, too. So the order of the site comes from the lists of links in
``index.md``, and names of files stand behind the language of a block. Files of the repository that a page links to are
copied into the site; of a folder, its README.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

project = "slapo"
author = "the slapo authors"
root_doc = "index"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]

myst_heading_anchors = 4  # the same anchors as on GitHub
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "slapo"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_use_index = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

_HERE = Path(__file__).parent
_FENCED = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_LINKED = re.compile(r"\]\(([\w/-]+)\.md(?:#[\w-]+)?\)")


def _adapt(app: Sphinx, page: str, source: list[str]) -> None:
    folder = (_HERE / page).parent
    parts = _FENCED.split(source[0])
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = re.sub(
                r"\A```(\w+) file=(\S+)$", r"```{code-block} \1\n:caption: \2\n", part, flags=re.MULTILINE
            )
        else:
            parts[number] = _LINK.sub(lambda link: _shown(link, folder), part)
    source[0] = "".join(parts) + _contents(page, source[0])


def _shown(link: re.Match[str], folder: Path) -> str:
    """Return a link within the site as it is, any other local one as a link to a copy of the file."""
    target = Path(os.path.normpath(folder / link[2]))
    if target.is_relative_to(_HERE):
        return link[0]
    file = target / "README.md" if target.is_dir() else target
    return f"[{link[1]}](path:{os.path.relpath(file, folder)})"


def _contents(page: str, text: str) -> str:
    """Return what an index page adds to the navigation: the pages beside it and below that it links to.

    Sections of the root's are captions, and what the root lists is not listed again.
    """
    if Path(page).name != "index":
        return ""
    is_root = page == root_doc
    root = set() if is_root else set(_LINKED.findall((_HERE / f"{root_doc}.md").read_text("utf-8")))
    tables = []
    for section in re.split(r"^## (?=\w)", text, flags=re.MULTILINE) if is_root else [text]:
        caption = f":caption: {section.partition(chr(10))[0]}\n" if is_root else ""
        linked = dict.fromkeys(_LINKED.findall(section))
        if pages := [each for each in linked if (Path(page).parent / each).as_posix() not in root]:
            tables.append("\n\n```{toctree}\n:hidden:\n" + caption + "\n" + "\n".join(pages) + "\n```\n")
    return "".join(tables)


def setup(app: Sphinx) -> None:
    """Adapt each page before it is parsed."""
    app.connect("source-read", _adapt)
