"""Contexts and questions for profiling: no download, and the same seed gives the same text.

Synthetic contexts are the Python reference (`pydoc_data.topics`, in every Python) with facts
planted between its paragraphs. Questions are of several kinds, because a head that one kind never
asks for would look worthless.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

_PLACES = ("brush", "bridge", "barrel", "statue", "ladder", "chimney", "anchor", "piano")
_NAMES = ("Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo")
_CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Prague", "Nairobi", "Kyoto", "Quebec")
_COLORS = ("red", "green", "violet", "yellow", "orange", "silver", "black", "white")
_NUMBERS = tuple(str(number) for number in range(10_007, 99_999, 997))

_FACTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    # sentence, question, how its answer begins, values
    ("The treasure is buried under the old {}.", "Where is the treasure buried?",
     "The treasure is buried under the old", _PLACES),
    ("The pass key is {}.", "What is the pass key?", "The pass key is", _NUMBERS),
    ("The winner of the chess game was {}.", "Who won the chess game?",
     "The winner of the chess game was", _NAMES),
    ("The next meeting takes place in {}.", "Where does the next meeting take place?",
     "The next meeting takes place in", _CITIES),
    ("The door of the lighthouse is {}.", "Which color is the door of the lighthouse?",
     "The door of the lighthouse is", _COLORS),
    ("The number of the locker is {}.", "What is the number of the locker?",
     "The number of the locker is", _NUMBERS),
    ("The captain of the ship is called {}.", "What is the captain of the ship called?",
     "The captain of the ship is called", _NAMES),
    ("The spare wheel lies behind the {}.", "Where does the spare wheel lie?",
     "The spare wheel lies behind the", _PLACES),
    ("The train to the coast leaves from {}.", "Where does the train to the coast leave from?",
     "The train to the coast leaves from", _CITIES),
    ("The envelope of the doctor was {}.", "Which color was the envelope of the doctor?",
     "The envelope of the doctor was", _COLORS),
    ("The invoice has the number {}.", "Which number has the invoice?",
     "The invoice has the number", _NUMBERS),
    ("The violin belongs to {}.", "Who does the violin belong to?", "The violin belongs to",
     _NAMES),
)  # fmt: skip

_SUMMARIES = (
    "\n\nIn summary, the text above says that",
    "\n\nQuestion: What is the text above about?\nAnswer: The text above is about",
    "\n\nThe most important points of the text above:\n1.",
    "\n\nQuestion: Which facts does the text mention?\nAnswer:",
)


@dataclass(frozen=True)
class Fact:
    """A planted sentence, and the cue that asks for its last word."""

    sentence: str
    cue: str


def facts(seed: int, index: int) -> tuple[Fact, ...]:
    """One fact of each template, values drawn for context `index`, in random order."""
    draw = random.Random(f"facts {seed} {index}")
    made = [
        Fact(sentence.format(draw.choice(values)), f"\n\nQuestion: {question}\nAnswer: {begin}")
        for sentence, question, begin, values in _FACTS
    ]
    draw.shuffle(made)
    return tuple(made)


def synthetic(seed: int, index: int, characters: int) -> str:
    """At least `characters` characters of the Python reference with `facts(seed, index)` inside.

    The facts are spread over the first 95 % of `characters`, between paragraphs.
    """
    from pydoc_data.topics import topics

    draw = random.Random(f"context {seed} {index}")
    names = sorted(topics)
    draw.shuffle(names)
    paragraphs = iter([part for name in names for part in topics[name].split("\n\n")] * 64)
    planted = list(facts(seed, index))
    step = 0.95 * characters / len(planted)
    pieces: list[str] = []
    length, due = 0, step / 2
    while length < characters or planted:
        piece = next(paragraphs)
        if planted and length >= due:
            piece = f"{piece} {planted.pop().sentence}"
            due += step
        pieces.append(piece)
        length += len(piece) + 2
    return "\n\n".join(pieces)


def questions(text: str, planted: Sequence[Fact], count: int, seed: int, index: int) -> list[str]:
    """`count` different questions about `text`, kinds in turn: fact, quote, next, topic, summary.

    planted: facts that `text` may hold; those it does not are not asked for. When a kind has run
    out of new questions the others go on.
    Raises ValueError if the text is too short to ask `count` different things about it.
    """
    draw = random.Random(f"questions {seed} {index}")
    words = text.split()
    known = [fact.cue for fact in planted if fact.sentence in text]
    draw.shuffle(known)
    summaries = list(_SUMMARIES)
    draw.shuffle(summaries)

    def passage(size: int) -> str:
        start = draw.randrange(max(1, len(words) - size))
        return " ".join(words[start : start + size])

    kinds = (
        lambda: known.pop() if known else None,
        lambda: f'\n\nAs quoted above: "{passage(10)}',
        lambda: f'\n\nQuestion: What comes right after "{passage(8)}"?\nAnswer: "',
        lambda: known.pop() if known else None,
        lambda: f'\n\nQuestion: What does the text say about "{passage(2)}"?\nAnswer:',
        lambda: summaries.pop() if summaries else None,
    )
    asked: dict[str, None] = {}
    for attempt in range(len(kinds) * (count + 16)):
        question = kinds[attempt % len(kinds)]()
        if question:
            asked[question] = None
        if len(asked) == count:
            return list(asked)
    raise ValueError(
        f"only {len(asked)} different questions for a context of {len(words)} words, {count} "
        "wanted; lower --queries or raise --context-tokens"
    )
