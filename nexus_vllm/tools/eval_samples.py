"""From a suite to samples: haystacks of tokens and the questions about them.

Pure: the same suite, tokenizer and files give the same samples. A haystack holds all of its group's
needles, so that one prefill serves many questions.
"""

import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nexus_vllm.tools.eval_suite import (
    BLOCK,
    COMMON,
    CommonWordsTask,
    CopyTask,
    Decode,
    FactTask,
    Group,
    Haystack,
    NeedleTask,
    PasskeyTask,
    QuoteTask,
    Suite,
    VariablesTask,
)

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)  # RULER's
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
LONGEST = 40  # words of one sentence of filler

Encode = Callable[[str], list[int]]


def tokenizing(folder: Path) -> tuple[Encode, list[int]]:
    """`encode` and `first` of `samples`, for the model in a folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    first: list[int] = tokenizer("").input_ids[:1]
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids, first


@dataclass(frozen=True)
class Question:
    """One question about a sample. `depth`, `end`: where its first needle begins and its last ends,
    as shares of the haystack. With `items` the reply is scored by the share of them that it holds.
    """

    task: str
    text: str
    answer: str
    items: tuple[str, ...]
    depth: float
    end: float
    tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Asking:
    """A question within a stream.

    step: of its answer's first token. since: tokens from the last one that told the answer, in the
    haystack or in an earlier asking, to that. uses: how often it was asked before.
    """

    question: int
    step: int
    since: int
    uses: int


@dataclass(frozen=True)
class Stream:
    """What is said after a haystack. `text`: first step and end of each passage that goes on with
    the haystack's text; between them is asked."""

    tokens: tuple[int, ...]
    text: tuple[tuple[int, int], ...]
    asked: tuple[Asking, ...]


@dataclass(frozen=True)
class Sample:
    """One haystack. `tokens` are exactly the suite's `prompt_tokens`, the tokenizer's first ones
    (`<bos>`) included. Where there is a stream, the questions are asked within it."""

    name: str
    tokens: tuple[int, ...]
    questions: tuple[Question, ...]
    stream: Stream | None = None

    @property
    def requests(self) -> int:
        """How many requests ask all of it once."""
        return 1 if self.stream else len(self.questions)


@dataclass
class _Asked:
    """A question before its place is known; `needles` in the order in which they are planted."""

    task: str
    needles: list[str]
    text: str = ""  # nothing is asked: the needles distract
    answer: str = ""
    items: tuple[str, ...] = ()
    quote: QuoteTask | None = None


@dataclass(frozen=True)
class _Piece:
    text: str
    start: int  # character
    asked: _Asked | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def samples(suite: Suite, encode: Encode, first: Sequence[int] = ()) -> list[Sample]:
    """All samples of a suite.

    encode: text -> token ids without any special ones. first: ids that begin every prompt.
    Raises ValueError where a haystack is too short or does not hold what was planted.
    """
    made: list[Sample] = []
    for group in suite.groups:
        for haystack in group.haystacks:
            for index in range(haystack.count):
                name = f"{len(made) + 1} {haystack.name}"
                draw = random.Random(f"{suite.seed} {name}")
                made.append(_sample(suite, group, haystack, index, name, draw, encode, first))
    return made


def _sample(
    suite: Suite,
    group: Group,
    haystack: Haystack,
    index: int,
    name: str,
    draw: random.Random,
    encode: Encode,
    first: Sequence[int],
) -> Sample:
    limit = suite.prompt_tokens
    length = functools.cache(lambda text: len(encode(text)))
    filler, common = _filler(suite, haystack, index, draw)
    asked = _asked(suite, group, common, draw)
    places = _places(asked, suite.depths, draw)
    whole = suite.whole_tokens
    pieces, quotes = _assemble(filler, places, limit, whole, length)
    text = " ".join(piece.text for piece in pieces)
    tokens = (*first, *encode(text))
    if len(tokens) < whole:
        raise ValueError(f"{name}: {len(tokens)} tokens, {whole} wanted; use a longer text")

    def place(offset: int) -> float:
        return (len(first) + len(encode(text[:offset]))) / limit

    questions = []
    for item in asked:
        if item.quote:
            start, end = _quote(item, item.quote, pieces, text, quotes[id(item)], name)
        else:
            own = [piece for piece in pieces if piece.asked is item]
            assert len(own) == len(item.needles)
            start, end = (own[0].start, own[-1].end) if own else (0, -1)  # all of it
        if not item.text:
            continue
        where = (place(start), place(end)) if end >= 0 else (0.0, 1.0)
        if where[1] > 1:
            raise ValueError(
                f"{name}: {item.task!r} ends at {where[1]:.2f} of the haystack; plant less, or "
                f"earlier than depths={list(suite.depths)}"
            )
        question, answer = _split(encode, item.text, item.answer)
        made = Question(item.task, item.text, item.answer, item.items, *where, question, answer)
        questions.append(made)
    if common:
        _check_common(text, place, common, name)
    sample = Sample(name, tokens[:limit], tuple(questions))
    if suite.decode is None:
        return sample
    stream = _stream(suite.decode, sample, tokens[limit:], encode, draw)
    return replace(sample, stream=stream)


def _stream(
    decode: Decode, sample: Sample, flow: Sequence[int], encode: Encode, draw: random.Random
) -> Stream:
    """The text that goes on, `flow`, each stretch cut short for the questions that end it."""
    order = list(range(len(sample.questions)))
    draw.shuffle(order)
    often, once = order[: decode.often], order[decode.often :]
    told = [round(question.end * len(sample.tokens)) for question in sample.questions]
    uses = Counter[int]()
    said: list[int] = []
    text: list[tuple[int, int]] = []
    asked: list[Asking] = []
    following = iter(flow)
    for stretch in range(decode.stretches if order else 0):
        turn = [once[stretch], *(often[stretch % len(often)] for _ in often[:1])]
        parts = {
            index: _asked_for(sample.questions[index], encode, index == turn[-1]) for index in turn
        }
        room = decode.every - sum(map(len, parts.values()))
        if room < BLOCK:
            raise ValueError(
                f"{sample.name}: a stretch of {decode.every} tokens has {room} beside its "
                f"questions; use every={decode.every - room + BLOCK} or more"
            )
        text.append((len(said), len(said) + room))
        said += itertools.islice(following, room)
        for index, part in parts.items():
            step = len(said) + len(sample.questions[index].tokens)
            at = len(sample.tokens) + step
            asked.append(Asking(index, step, at - told[index], uses[index]))
            uses[index] += 1
            told[index] = at + len(sample.questions[index].answer_tokens)
            said += part
    if not order:
        text = [(at, at + decode.every) for at in range(0, decode.tokens, decode.every)]
        said = list(flow[: decode.tokens])
    return Stream(tuple(said), tuple(text), tuple(asked))


def _asked_for(question: Question, encode: Encode, last: bool) -> tuple[int, ...]:
    """A question with its answer, and what leads back to the text where it is the last."""
    _, end = _split(encode, question.text + question.answer, ".\n\n" if last else ".")
    return (*question.tokens, *question.answer_tokens, *end)


def _split(encode: Encode, question: str, answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of a question and of the answer that goes on with it.

    Some tokenizers put a blank before a text, so the answer's ids are those that it adds.
    """
    asked, whole = encode(question), encode(question + answer)
    if whole[: len(asked)] == asked:
        return tuple(asked), tuple(whole[len(asked) :])
    return tuple(asked), tuple(encode(answer))


def _filler(
    suite: Suite, haystack: Haystack, index: int, draw: random.Random
) -> tuple[Iterator[str], tuple[str, ...]]:
    """Sentences without end or until the text ends; the common words, for that source only."""
    if haystack.source == "noise":
        return (NOISE[i % len(NOISE)] for i in itertools.count()), ()
    if haystack.source == "common-words":
        words = list(suite.words["nouns"])
        draw.shuffle(words)
        weights = [10 if i < COMMON else 1 for i in range(len(words))]
        stream = (f"{i + 1}. {draw.choices(words, weights)[0]}" for i in itertools.count())
        return stream, tuple(words[:COMMON])
    if haystack.source == "python-reference":
        from pydoc_data.topics import topics

        names = sorted(topics)
        draw.shuffle(names)
        return _sentences(" ".join(topics[name] for name in names)), ()
    assert haystack.file is not None
    text = haystack.file.read_text(encoding="utf-8")
    start = int(len(text) * (index + 0.8 * draw.random()) / haystack.count)
    return _sentences(text[start:].partition(" ")[2]), ()


def _sentences(text: str) -> Iterator[str]:
    """One blank between words; sentences longer than LONGEST words come in parts."""
    for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text).strip()):
        words = sentence.split()
        for start in range(0, len(words), LONGEST):
            yield " ".join(words[start : start + LONGEST])


def _asked(suite: Suite, group: Group, common: Sequence[str], draw: random.Random) -> list[_Asked]:
    """What a haystack of this group is asked, values drawn."""
    facts = list(suite.facts)
    draw.shuffle(facts)
    made: list[_Asked] = []
    for task in group.tasks:
        match task:
            case FactTask():
                for _ in range(task.questions):
                    fact = facts.pop()
                    value = _value(suite, fact.values, draw)
                    sentence = fact.sentence.replace("{}", value)
                    if task.twice:
                        sentence += f" Remember it: {_continued(sentence)}"
                    text = f"\n\nQuestion: {fact.question}\nAnswer: {fact.begin}"
                    made.append(_Asked(task.name, [sentence], text, f" {value}"))
            case PasskeyTask():
                key = _digits(task.digits, draw)
                sentence = f"The pass key is {key}. Remember it. {key} is the pass key."
                text = " What is the pass key? The pass key is"
                made.append(_Asked(task.name, [sentence], text, f" {key}"))
            case CopyTask():
                for number in range(task.questions):
                    words = draw.sample(suite.words[task.values], task.words)
                    begin = f"The {ORDINALS[number]} code phrase is:"
                    text = f"\n\n{begin} {' '.join(words[: task.cue])}"
                    answer = f" {' '.join(words[task.cue :])}"
                    made.append(_Asked(task.name, [f"{begin} {' '.join(words)}."], text, answer))
            case QuoteTask():
                made += [_Asked(task.name, [], quote=task) for _ in range(task.questions)]
            case NeedleTask():
                made += _needles(suite, task, draw)
            case VariablesTask():
                made += [_variables(task, draw) for _ in range(task.questions)]
            case CommonWordsTask():
                text = (
                    f"\n\nQuestion: What are the {COMMON} most common words in the above list?"
                    f"\nAnswer: The {COMMON} most common words in the list are:"
                )
                made.append(_Asked(task.name, [], text, _listed(common), tuple(common)))
    return made


def _needles(suite: Suite, task: NeedleTask, draw: random.Random) -> list[_Asked]:
    """Every key with its values; the first `questions` keys are asked for."""
    keys: dict[str, None] = {}
    while len(keys) < task.keys:
        keys["-".join(draw.sample(suite.words["nouns"], 2))] = None
    made = []
    for index, key in enumerate(keys):
        values = [_digits(task.digits, draw) for _ in range(task.values)]
        needles = [task.sentence.format(key=key, value=value) for value in values]
        item = _Asked(task.name, needles)
        if index < task.questions:
            item.text = task.ask.format(key=key)
            item.answer = _listed(values)
            item.items = tuple(values) if task.values > 1 else ()
        made.append(item)
    return made


def _variables(task: VariablesTask, draw: random.Random) -> _Asked:
    names: dict[str, None] = {}
    while len(names) < task.hops + 1:
        names["".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))] = None
    value, chain = _digits(5, draw), list(names)
    needles = [f"VAR {chain[0]} = {value}."]
    needles += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(chain)]
    text = (
        f"\n\nQuestion: Find all variables that are assigned the value {value} in the text above."
        f"\nAnswer: According to the chain of variable assignment in the text above, {len(chain)} "
        f"variables are assigned the value {value}, they are:"
    )
    return _Asked(task.name, needles, text, _listed(chain), tuple(chain))


def _value(suite: Suite, values: str, draw: random.Random) -> str:
    return _digits(5, draw) if values == "digits" else draw.choice(suite.words[values])


def _digits(count: int, draw: random.Random) -> str:
    return str(draw.randrange(10 ** (count - 1), 10**count))


def _listed(items: Sequence[str]) -> str:
    return f" {', '.join(items)}"


def _continued(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:] if sentence.startswith("The ") else sentence


def _places(
    asked: Sequence[_Asked], depths: tuple[float, float], draw: random.Random
) -> list[tuple[float, str, _Asked]]:
    """(depth, needle, whose) by depth: one in each stretch of `depths`, whose is drawn.

    The needles of one question keep their order. A quote gets a place too, with no needle in it.
    """
    low, high = depths
    order = [item for item in asked for _ in range(len(item.needles) or bool(item.quote))]
    draw.shuffle(order)
    left = {id(item): iter(item.needles or [""]) for item in asked}
    return [
        (low + (high - low) * (k + draw.random()) / len(order), next(left[id(item)]), item)
        for k, item in enumerate(order)
    ]


def _assemble(
    filler: Iterator[str],
    places: Sequence[tuple[float, str, _Asked]],
    limit: int,
    whole: int,
    length: Callable[[str], int],
) -> tuple[list[_Piece], dict[int, int]]:
    """Filler with the needles at their places within `limit` tokens, a little more than `whole`
    tokens; and the characters from which on each quote may begin."""
    pieces: list[_Piece] = []
    quotes: dict[int, int] = {}
    waiting = list(places)
    tokens = characters = 0

    def add(text: str, item: _Asked | None = None) -> None:
        nonlocal tokens, characters
        pieces.append(_Piece(text, characters, item))
        # After a full stop, since some tokenizers put a blank before a text.
        tokens += length(f". {text}") - length(".")
        characters += len(text) + 1

    # Sentences counted one by one may come to a few tokens more than all of them together.
    while tokens < 1.05 * whole + 64:
        while waiting and tokens >= waiting[0][0] * limit:
            _, needle, item = waiting.pop(0)
            if item.quote:
                quotes[id(item)] = characters
            else:
                add(needle, item)
        sentence = next(filler, None)
        if sentence is None:
            break
        if sentence:
            add(sentence)
    return pieces, quotes


def _quote(
    item: _Asked,
    task: QuoteTask,
    pieces: Sequence[_Piece],
    text: str,
    start: int,
    name: str,
) -> tuple[int, int]:
    """Fill in a quote from the first passage at or after `start` that occurs once.

    Returns where it begins and ends, in characters.
    """
    for piece in pieces:
        words = piece.text.split(" ")
        if piece.start < start or piece.asked or len(words) < task.cue + task.words:
            continue
        cue = " ".join(words[: task.cue])
        answer = " " + " ".join(words[task.cue : task.cue + task.words])
        if text.count(cue) == 1:
            item.text, item.answer = f'\n\nAs quoted above: "{cue}', answer
            return piece.start, piece.start + len(cue) + len(answer)
    raise ValueError(f"{name}: no sentence to quote; use another text, or a shorter quote")


def _check_common(
    text: str, place: Callable[[int], float], common: Sequence[str], name: str
) -> None:
    """The common words must be that in the part of the list that is kept."""
    whole = place(len(text))
    counts = Counter(re.findall(r"\d+\. (\S+)", text[: int(len(text) / whole)]))
    fewest = min(counts[word] for word in common)
    most = max((n for word, n in counts.items() if word not in common), default=0)
    if fewest <= most:
        raise ValueError(
            f"{name}: another word occurs {most} times, a common one {fewest}; use more tokens"
        )
