"""Names, docstrings, comments and messages use the project's terms: one word per meaning, American spelling."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("slapo_core", "plugins")

TEXT = {
    r"untouched (model|one)s?": "reference model",
    r"stand[- ]ins?(?! for)": "placeholder, or trial process group",
    r"dry mesh(es)?|plays? (a|one|another) rank|plays one of": "abstract mesh",
    r"mend(s|ed|ing)? (it|them|this)": "fix",
    r"parcels?": "P2P message",
    r"summands?|sums? up": "partial, to be reduced",
    r"masters": "main weights",
    r"computed again": "recomputed",
    r"closed calls?": "opaque call, call_module",
    r"nothing came of|nothing comes of": "unused",
    r"taken for granted": "assumption",
    r"do(es)? not divide into": "not divisible by",
    r"has no such thing": "ignored: unknown to ...",
    r"nearest to it|nothing there matches": "no match; closest candidate: ...",
    r"must be JSON, and": "must be JSON-serializable",
    r"lies? as": "has layout ...",
    r"(this|the|each|its) (rank|ranks|rank's|ranks'|own) (pieces?|halves|half)": "shard",
    r"pieces? of (a|the) (parameter|tensor|weight|model)s?": "shard",
    r"form of (a|the) batch": "input signature",
    r"(copies|replicas) (that )?part": "replicas diverge",
    r"draws? (random|alike|anew|differently)|random numbers? stands?": "uses the RNG; RNG state",
    r"seeded anew|made anew|begins? anew": "again",
    r"what replicas hold|keeps elsewhere": "the replicas' copies; main weights",
    r"(?<!there )is no (?!longer\b|more\b|less\b|other\b|need\b|point\b|way\b)[a-z]+": "is not a ...",
    r"wholes?(?! numbers?)": "full, unsharded; entire model; all of ...",
    r"forms? of (a|an|the|its|this|that|these|each) (batch|batches|inputs?|arguments?|call|calls|values?)": (
        "input signature"
    ),
    r"those of|what (is|are)": "a noun",
    r"(is|are) (held|said|told)": "a noun, or an active verb",
    r"he|his|him|himself|somebody|nobody|everybody": "you, or no person",
    r"(optim|initial|material|normal|serial|synchron|quant|general|special|recogn)is(e|ed|es|ing|ation|er|ers)": "-ize",
    r"parallelis(e|ed|es|ing|ation)|behaviours?|colours?|honours?|favours?|neighbours?|centres?": "American spelling",
}  # fmt: skip
"""Phrase, as a regular expression of whole words -> the term to use."""

NAMES = {
    r"is_here": "is_local",
    r"stands?_for": "correspondence, mapping",
    r"stand_ins?": "placeholder, trial_groups",
    r"untouched": "reference",
    r"parcels?": "message",
    r"summands?": "partial",
    r"legs?": "chunk, stage",
    r"pieces?": "shard",
    r"closed_calls?": "opaque_calls",
    r"spoil(ed|t)?": "abort, invalidate",
    r"masters": "main_weights",
    r"wholes?": "full",
    r"forms?": "signature (of inputs), alternative (of a pattern)",
}
"""Part of an identifier between underscores -> the term to use."""

ALLOWED: dict[tuple[str, str], str] = {
    ("auto/report.py", "left_whole"): "the opposite of split, a public name",
    ("auto/report.py", "whole"): "as a report says it",
}
"""(End of the path, phrase) -> why it may stay."""

_TEXT = {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): term for phrase, term in TEXT.items()}
_NAMES = {re.compile(rf"(?:^|_)(?:{part})(?:_|$)", re.IGNORECASE): term for part, term in NAMES.items()}


def findings(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and term of every phrase in names, docstrings, comments and other strings."""
    texts = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string))
        elif token.type == tokenize.NAME:
            for pattern, term in _NAMES.items():
                if pattern.search(token.string):
                    yield token.start[0], token.string, term
    for line, text in texts:
        flat = " ".join(text.split())  # a phrase may go over the end of a line
        for pattern, term in _TEXT.items():
            for match in pattern.finditer(flat):
                yield line, match.group(0), term


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ('"""The untouched\n    model."""\n', "untouched model"),
        ('raise ValueError("the loss is no tensor")\n', "is no tensor"),
        ("x = 1  # somebody may read it\n", "somebody"),
        ('hint = f"{x}: the masters of {y}"\n', "masters"),
        ("def take(own_pieces): ...\n", "own_pieces"),
        ('"""Optimisers."""\n', "Optimisers"),
        ('"""Gather the whole\n    tensor."""\n', "whole"),
        ("x = 1  # those of the root\n", "those of"),
        ('"""What is kept."""\n', "What is"),
        ("def take(batch_form): ...\n", "batch_form"),
    ],
)
def test_a_phrase_is_found_in_any_text_and_name(source: str, phrase: str) -> None:
    assert [found for _, found, _ in findings(source)] == [phrase]


def test_standard_words_are_no_finding() -> None:
    source = (
        '"""Shard this; there is no GPU, and it is no longer used: parallelism."""\nelegant = showpiece = "history"\n'
    )
    assert list(findings(source)) == []


def test_the_project_uses_its_terms() -> None:
    wrong, used = [], set()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if "/tests/" in name:
                continue
            for line, phrase, term in findings(path.read_text("utf-8")):
                reason = {key for key in ALLOWED if name.endswith(key[0]) and phrase == key[1]}
                used |= reason
                if not reason:
                    wrong.append(f"{name}:{line}: '{phrase}': {term}")
    assert not wrong, "\n".join(wrong)
    assert used == set(ALLOWED), "exceptions without a use"
