"""The HTML page: data, style and program in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{style_hash}'; \
script-src '{script_hash}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main id="page"><noscript><pre>{text}</pre></noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page_of(data: Mapping[str, Any], *, title: str, text: str) -> str:
    """Return the page; names and texts of the data are untrusted.

    Args:
        data: of the picture.
        title: of the page.
        text: shown by a browser without scripts.
    """
    style, script = (_file(name) for name in ("page.css", "page.js"))
    return _PAGE.format(
        data=_json(data),
        script=script,
        script_hash=_hash(script),
        style=style,
        style_hash=_hash(style),
        text=html.escape(text),
        title=html.escape(title),
    )


def in_frame(page: str) -> str:
    """Return a frame for a notebook, which keeps the page's style and program to itself."""
    return (
        '<iframe sandbox="allow-scripts" title="schedule" style="width: 100%; height: 46rem; border: 0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def _json(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the script element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (resources.files("slapo_view") / name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
