"""Prompts for engine tests: prose that neither repeats itself nor bores a small model."""

from __future__ import annotations

from pydoc_data.topics import topics

from .harness import Engine

# A few pages of the Python reference, which every Python carries.
_BOOK = " ".join(" ".join(topics[name].split()) for name in ("with", "class", "import", "yield"))


def prose(engine: Engine, tokens: int, start: int = 0) -> list[int]:
    """`tokens` token ids of the text, from the `start`-th on."""
    ids = engine.encode(_BOOK[: 8 * (start + tokens)])[start : start + tokens]
    assert len(ids) == tokens
    return ids
