"""Suites of `nexus-vllm eval` and the samples they make, with a tokenizer of words."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from nexus_vllm.tools.eval_samples import COMMON, Question, Sample, samples
from nexus_vllm.tools.eval_suite import load, suites

NOUNS = [f"noun{i}" for i in range(40)]


class Words:
    """Each word with the blank before it is a token; token 0 begins a prompt."""

    def __init__(self) -> None:
        self.known = ["<bos>"]
        self.ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        return [self.id(word) for word in re.findall(r" ?[^\s]+|\s", text)]

    def id(self, word: str) -> int:
        if word not in self.ids:
            self.ids[word] = len(self.known)
            self.known.append(word)
        return self.ids[word]

    def decode(self, tokens: tuple[int, ...]) -> str:
        return "".join(self.known[token] for token in tokens if token)


def made(suite: Any, words: Words | None = None) -> list[Sample]:
    return samples(suite, words or Words(), [0])


def suite_file(folder: Path, **changed: Any) -> str:
    """A small suite of one's own, as a file."""
    told = {
        "name": "mine",
        "about": "small",
        "prompt_tokens": 512,
        "groups": [{"haystacks": [{"source": "noise"}], "tasks": [{"task": "passkey"}]}],
        "facts": [
            {"sentence": f"The {x} is {{}}.", "question": f"{x}?", "begin": x, "values": "colors"}
            for x in ("roof", "wall", "door")
        ],
        "words": {"colors": ["red", "blue"], "nouns": NOUNS},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(told | changed))
    return str(path)


COPY = {"task": "copy", "questions": 1}
NEEDLE = {"task": "needle", "label": "x", "questions": 1}


def group(source: str, *tasks: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"haystacks": [{"source": source, **more}], "tasks": list(tasks)}]


def test_the_suites_of_the_documents_are_shipped() -> None:
    assert {"quick", "ruler", "long-decode", "long-text"} <= set(suites())


def test_a_suite_takes_from_another_what_it_does_not_say(tmp_path: Path) -> None:
    mine = tmp_path / "own.yaml"
    mine.write_text("{name: own, about: a text, like: quick, words: {colors: [red], nouns: [a]}}")
    quick = load("quick")
    words = {**quick.words, "colors": ("red",), "nouns": ("a",)}
    changed = {"name": "own", "about": "a text", "words": words}
    assert load(str(mine)) == quick.model_copy(update=changed)
    (tmp_path / "next.yaml").write_text(f"{{name: next, like: {mine}}}")
    for like in (tmp_path / "next.yaml", "[quick]"):
        (tmp_path / "bad.yaml").write_text(f"{{name: bad, like: {like}}}")
        with pytest.raises(ValueError, match=r"like: .* is not a suite that stands by itself"):
            load(str(tmp_path / "bad.yaml"))


def test_a_suite_that_decodes_drops_the_settings_of_another(tmp_path: Path) -> None:
    mine = tmp_path / "own.yaml"
    told = "decode: {tokens: 64, every: 64}, groups: [{haystacks: [{source: noise}]}]"
    mine.write_text(f"{{name: own, about: noise, like: quick, {told}}}")
    assert load(str(mine)).modes == ("decode",)


@pytest.mark.parametrize("name", suites())
def test_every_haystack_has_the_length_asked_for_and_holds_the_answers_where_it_says(
    name: str,
) -> None:
    try:
        words, suite = Words(), load(name)
    except ValueError as error:
        if "is no file" in str(error):
            pytest.skip(f"{error}: run scripts/prepare_texts.py")
        raise
    found = made(suite, words)
    assert len({sample.name for sample in found}) == len(found)
    for sample in found:
        assert len(sample.tokens) == suite.prompt_tokens
        assert sample.tokens[0] == 0
        assert sample.questions or sample.stream
        for question in sample.questions:
            passage = _passage(sample, question, words)
            for item in question.items or (question.answer.strip(),):
                assert item in passage, (sample.name, question)
            assert words.decode(question.answer_tokens) == question.answer
            assert words.decode(question.tokens) == question.text


def _passage(sample: Sample, question: Question, words: Words) -> str:
    """What lies between a question's depth and its end; a token more on each side."""
    first, last = (round(at * len(sample.tokens)) for at in (question.depth, question.end))
    return words.decode(sample.tokens[max(0, first - 1) : last + 1])


def test_depths_are_spread_over_the_stretch_asked_for(tmp_path: Path) -> None:
    tasks = {"task": "fact", "questions": 3}
    suite = load(suite_file(tmp_path, depths=[0.3, 0.6], groups=group("noise", tasks)))
    (sample,) = made(suite)
    depths = sorted(question.depth for question in sample.questions)
    for third, depth in enumerate(depths):
        # Each in its own third, a sentence or the needles before it later.
        assert 0.3 + 0.1 * third - 0.01 <= depth <= 0.4 + 0.1 * third + 0.06


def test_the_same_seed_gives_the_same_samples_and_another_does_not(tmp_path: Path) -> None:
    path = suite_file(tmp_path, groups=group("python-reference", {"task": "fact", "questions": 3}))
    assert made(load(path)) == made(load(path))
    assert made(load(path)) != made(load(path, seed=1))


def test_haystacks_of_one_source_differ(tmp_path: Path) -> None:
    groups = group("python-reference", {"task": "passkey"}, count=2)
    first, second = made(load(suite_file(tmp_path, groups=groups)))
    assert first.tokens != second.tokens
    assert first.questions[0].answer != second.questions[0].answer


def test_a_fact_stated_twice_is_in_the_text_twice(tmp_path: Path) -> None:
    for twice in (False, True):
        task = {"task": "fact", "questions": 3, "twice": twice}
        words = Words()
        (sample,) = made(load(suite_file(tmp_path, groups=group("noise", task))), words)
        text = words.decode(sample.tokens)
        for question in sample.questions:
            stated = f"he {question.text.rpartition(' ')[2]} is{question.answer}."
            assert text.count(stated) == 1 + twice


def test_a_quote_goes_on_as_the_text_does(tmp_path: Path) -> None:
    words = Words()
    groups = group("python-reference", {"task": "quote", "questions": 3}, count=2)
    for sample in made(load(suite_file(tmp_path, groups=groups)), words):
        text = words.decode(sample.tokens)
        assert len({question.text for question in sample.questions}) == 3
        for question in sample.questions:
            cue = question.text.partition('"')[2]
            assert len(cue.split()) == 10
            assert len(question.answer.split()) == 10
            assert text.count(cue) == 1
            assert cue + question.answer in text


def test_a_passage_that_comes_twice_is_not_quoted(tmp_path: Path) -> None:
    chorus = " ".join(f"chorus{i}" for i in range(25))
    verses = [" ".join(f"verse{i}-{k}" for k in range(25)) for i in range(40)]
    lines = [f"{line}." for verse in verses for line in (chorus, verse, chorus)]
    (tmp_path / "song.txt").write_text(" ".join(lines))
    groups = [{"haystacks": [{"file": "song.txt"}], "tasks": [{"task": "quote", "questions": 3}]}]
    (sample,) = made(load(suite_file(tmp_path, groups=groups)))
    assert all("verse" in question.text for question in sample.questions)


def test_a_copy_asks_for_the_rest_of_its_own_phrase(tmp_path: Path) -> None:
    words = Words()
    groups = group("noise", {"task": "copy", "questions": 3, "words": 6, "cue": 2})
    path = suite_file(tmp_path, groups=groups, words={"nouns": NOUNS}, facts=[])
    (sample,) = made(load(path), words)
    for question, ordinal in zip(sample.questions, ("first", "second", "third"), strict=True):
        assert question.text.startswith(f"\n\nThe {ordinal} code phrase is: ")
        assert len(question.answer.split()) == 4
        assert f" {question.text.strip()}{question.answer}." in words.decode(sample.tokens)


def test_needles_without_a_question_distract(tmp_path: Path) -> None:
    words = Words()
    task = {"task": "needle", "label": "multi-value", "keys": 3, "values": 2, "questions": 1}
    (sample,) = made(load(suite_file(tmp_path, groups=group("noise", task))), words)
    (question,) = sample.questions
    text = words.decode(sample.tokens)
    assert text.count("One of the special magic numbers for") == 6
    assert len(question.items) == 2
    assert question.answer == f" {question.items[0]}, {question.items[1]}"
    assert text.index(question.items[0]) < text.index(question.items[1])
    assert question.task == "multi-value"


def test_variables_are_assigned_in_a_chain(tmp_path: Path) -> None:
    words = Words()
    (sample,) = made(
        load(suite_file(tmp_path, groups=group("noise", {"task": "variables", "hops": 2}))), words
    )
    (question,) = sample.questions
    a, b, c = question.items
    text = words.decode(sample.tokens)
    value = re.findall(rf"VAR {a} = (\d+)\.", text)[0]
    places = [
        text.index(f"VAR {x}.") for x in (f"{a} = {value}", f"{b} = VAR {a}", f"{c} = VAR {b}")
    ]
    assert places == sorted(places)
    assert f"the value {value}" in question.text


def test_common_words_are_the_most_common_in_what_is_kept(tmp_path: Path) -> None:
    words = Words()
    groups = group("common-words", {"task": "common-words"})
    path = suite_file(tmp_path, groups=groups, prompt_tokens=1024)
    (sample,) = made(load(path), words)
    listed = re.findall(r"\d+\. (\S+)", words.decode(sample.tokens))
    most = {word for word, _ in Counter(listed).most_common(COMMON)}
    assert most == set(sample.questions[0].items)
    assert (sample.questions[0].depth, sample.questions[0].end) == (0, 1)
    with pytest.raises(ValueError, match="use more tokens"):
        made(load(path, prompt_tokens=256))


DECODE = {"tokens": 800, "every": 200, "often": 1}


def decoding(folder: Path, **changed: Any) -> Any:
    """A suite of three streams, each with four stretches and five facts."""
    facts = [
        {
            "sentence": f"The {x} is {{}}.",
            "question": f"{x}?",
            "begin": f"The {x} is",
            "values": "red",
        }
        for x in ("roof", "wall", "door", "gate", "car")
    ]
    words = {"red": [f"red{i}" for i in range(90)]}
    tasks = {"task": "fact", "questions": 5, "twice": True}
    groups = group("python-reference", tasks, count=3)
    given = {"facts": facts, "words": words, "groups": groups, "decode": DECODE}
    return load(suite_file(folder, **given | changed))


def test_a_stream_asks_in_each_stretch_a_new_question_and_one_again(tmp_path: Path) -> None:
    for sample in made(decoding(tmp_path)):
        assert sample.stream is not None
        asked = sample.stream.asked
        assert [asking.step // 200 for asking in asked] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [asking.uses for asking in asked] == [0, 0, 0, 1, 0, 2, 0, 3]
        assert len({asking.question for asking in asked}) == 5
        assert len({asking.question for asking in asked[1::2]}) == 1


def test_a_stream_says_question_and_answer_where_it_says_and_else_goes_on_with_the_text(
    tmp_path: Path,
) -> None:
    words = Words()
    suite = decoding(tmp_path)
    for sample in made(suite, words):
        stream = sample.stream
        assert stream is not None
        assert len(stream.tokens) == 800
        for asking in stream.asked:
            question = sample.questions[asking.question]
            asked = stream.tokens[asking.step - len(question.tokens) :]
            said = (*question.tokens, *question.answer_tokens)
            assert asked[: len(said)] == said
        said = [token for start, end in stream.text for token in stream.tokens[start:end]]
        text = words.decode((*sample.tokens, *said))
        reference = re.sub(r"The (\w+) is red\d+\. Remember it: the \1 is red\d+\. ", "", text)
        from pydoc_data.topics import topics

        source = re.sub(r"\s+", " ", " ".join(topics.values()))
        middle = reference[len(reference) // 2 :][:300]
        assert middle in source


def test_a_stream_tells_how_long_ago_an_answer_was_told(tmp_path: Path) -> None:
    words = Words()
    for sample in made(decoding(tmp_path), words):
        stream = sample.stream
        assert stream is not None
        whole = (*sample.tokens, *stream.tokens)
        for asking in stream.asked:
            question = sample.questions[asking.question]
            at = len(sample.tokens) + asking.step
            # Only the last word of a statement ends in a full stop.
            (answer,) = question.answer_tokens
            told = {answer, words.id(words.known[answer] + ".")}
            last = max(i for i in range(at) if whole[i] in told)
            assert at - asking.since == last + 1


def test_without_tasks_the_text_goes_on_as_a_longer_haystack_would(tmp_path: Path) -> None:
    source = {"haystacks": [{"source": "python-reference"}]}
    path = suite_file(tmp_path, groups=[source], decode={"tokens": 256, "every": 64})
    words = Words()
    (sample,) = made(load(path), words)
    assert sample.stream is not None
    assert (sample.questions, sample.stream.asked) == ((), ())
    assert sample.stream.text == ((0, 64), (64, 128), (128, 192), (192, 256))
    (longer,) = made(load(path, prompt_tokens=768), words)
    assert (*sample.tokens, *sample.stream.tokens) == longer.tokens


def test_a_stretch_needs_room_for_its_questions(tmp_path: Path) -> None:
    decode = {"tokens": 160, "every": 40, "often": 1}
    with pytest.raises(ValueError, match=r"a stretch of 40 tokens has \d+ .*use every=\d+ or more"):
        made(decoding(tmp_path, decode=decode))


def test_a_file_beside_the_suite_is_a_haystack(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(f"Line {i} of the book." for i in range(400)))
    groups = [
        {"haystacks": [{"file": "book.txt", "count": 2}], "tasks": [{"task": "passkey"}]},
    ]
    words = Words()
    found = made(load(suite_file(tmp_path, groups=groups)), words)
    assert [sample.name for sample in found] == ["1 book", "2 book"]
    lines = [re.findall(r"Line (\d+)", words.decode(sample.tokens)) for sample in found]
    assert not set(lines[0]) & set(lines[1])
    with pytest.raises(ValueError, match=r"1 book: \d+ tokens, 2048 wanted; use a longer text"):
        made(load(suite_file(tmp_path, groups=groups), prompt_tokens=2048))


def test_a_tokenizer_that_puts_a_blank_before_a_text_adds_none_to_answers(tmp_path: Path) -> None:
    words = Words()

    def blank(text: str) -> list[int]:
        return words(" " + text) if text else []

    (sample,) = samples(load(suite_file(tmp_path)), blank, [0])
    (question,) = sample.questions
    assert words.decode(question.answer_tokens) == question.answer


def test_needles_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    task = {"task": "needle", "label": "many", "keys": 30, "questions": 30}
    with pytest.raises(ValueError, match=r"'many' ends at 1\.\d+ of the haystack; plant less"):
        made(load(suite_file(tmp_path, prompt_tokens=256, groups=group("noise", task))))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"promt_tokens": 64}, "promt_tokens=64: Extra inputs"),
        ({"prompt_tokens": 500}, "prompt_tokens=500: .*multiple of 32"),
        ({"depths": [0.5, 0.2]}, "depths=.* must rise"),
        ({"groups": group("noise", {"task": "fact", "questions": 4})}, "4 facts .* and 3 given"),
        ({"groups": group("noise", {"task": "quote", "questions": 1})}, "worth quoting .* noise"),
        ({"groups": group("noise", {"task": "common-words"})}, "needs haystacks of source"),
        ({"groups": group("noise", {"task": "riddle"})}, "riddle"),
        ({"groups": [{"haystacks": [{"source": "noise"}]}]}, "no tasks"),
        ({"decode": DECODE}, "1 questions and 4 stretches .* use 5 questions"),
        ({"decode": DECODE, "settings": ["later"]}, "a suite with decode has no settings"),
        ({"decode": DECODE | {"every": 300}}, "tokens=800 is no multiple of every=300"),
        (
            {"decode": DECODE, "groups": group("noise", {"task": "variables", "questions": 5})},
            "variables is answered by a list",
        ),
        ({"words": {"nouns": ["a"]}}, "values 'colors' is no list of words; known: digits, nouns"),
        (
            {"groups": [{"haystacks": [{"file": "x.txt"}], "tasks": [{"task": "passkey"}]}]},
            "no file",
        ),
        (
            {"groups": group("noise", {"task": "needle", "label": "x", "questions": 2})},
            "questions=2 is not allowed: use keys=1",
        ),
        ({"budgets": []}, "budgets=.*at least 1 item"),
        ({"budgets": [0.2]}, "budgets.0=0.2: .*valid string"),
        ({"budgets": ["20%", "10%", "20%"]}, "budgets has 20% twice"),
        ({"settings": []}, "settings=.*at least 1 item"),
        ({"settings": ["later", "later"]}, "settings has later twice"),
        ({"words": {"colors": ["red", " "]}}, "words.colors has one that is empty"),
        # An empty answer would be right in every cache.
        ({"groups": group("noise", COPY | {"words": 4})}, "cue=4 leaves nothing .* at most 3"),
        ({"groups": group("noise", COPY | {"words": 41})}, "words.nouns has 40 .*, 41 are drawn"),
        ({"groups": group("noise", COPY | {"values": "digits"})}, "'digits' is no list of words"),
        ({"groups": group("noise", {"task": "passkey"}, {"task": "passkey"})}, "two tasks passkey"),
        ({"groups": group("noise", NEEDLE | {"sentence": "{key}."})}, "must have {value}"),
        ({"groups": group("noise", NEEDLE | {"ask": "{it}"})}, "'{it}' .* no braces but {key}"),
        ({"groups": group("noise", NEEDLE | {"ask": "{key} {"})}, "may have no braces but {key}"),
        ({"groups": group("noise", NEEDLE | {"ask": "It?", "keys": 2})}, "'It.' must have {key}"),
        (
            {
                "groups": group("noise", NEEDLE | {"keys": 7}),
                "words": {"colors": ["red"], "nouns": ["a", "b", "c", "a"]},
            },
            "keys=7 is not allowed: 3 nouns name 6",
        ),
        (
            {
                "groups": group("common-words", {"task": "common-words"}),
                "words": {"colors": ["red"], "nouns": NOUNS[:9]},
            },
            "words.nouns has 9 different words, 10 are drawn",
        ),
    ],
)
def test_a_bad_suite_is_refused_with_the_reason(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        load(suite_file(tmp_path, **changed))


@pytest.mark.parametrize(
    "content",
    [b"a: !!bool x", b"a: !!timestamp x", b"a: 2001-99-99", b"\xff", b"1: 2", b"- a", b"", b"{"],
)
def test_a_file_that_is_no_suite_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load(str(path))


def test_a_haystack_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(b"\xff\xfe")
    groups = [{"haystacks": [{"file": "book.txt"}], "tasks": [{"task": "passkey"}]}]
    with pytest.raises(ValueError, match=r"haystack .*book\.txt is not UTF-8"):
        load(suite_file(tmp_path, groups=groups))


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'quikc' is no file and no suite\. Did you mean 'quick'"):
        load("quikc")
