"""What `nexus-vllm eval` asks: suites are YAML files, shipped in configs/suites or a user's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nexus_vllm.config import PRESET_SUFFIX, config_folder, nearest, shown

BLOCK = 32
COMMON = 10  # words that are ten times as common as the others
SETTINGS = ("in-window", "later")
DECODE = "decode"  # the only one of a suite that decodes


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fact(_Part):
    """A sentence to plant, with `{}` for the value, and what asks for it."""

    sentence: str
    question: str
    begin: str
    """How the answer begins; the model goes on with the value."""
    values: str
    """A list of `words`, or `digits`."""

    @model_validator(mode="after")
    def _one_value(self) -> "Fact":
        if "{}" not in self.sentence:
            raise ValueError(f"sentence {shown(self.sentence)} has no {{}} for the value")
        return self


class Haystack(_Part):
    """Where texts come from: one of the sources below, or a UTF-8 file."""

    source: Literal["noise", "python-reference", "common-words"] | None = None
    file: Path | None = None
    count: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> "Haystack":
        if (self.source is None) == (self.file is None):
            raise ValueError("a haystack has a source or a file")
        return self

    @property
    def name(self) -> str:
        return self.source or self.file.stem  # type: ignore[union-attr]


class FactTask(_Part):
    """Facts of the suite's templates, each asked for by its own question."""

    task: Literal["fact"]
    questions: int = Field(ge=1)
    twice: bool = False

    @property
    def name(self) -> str:
        return "fact twice" if self.twice else "fact"


class PasskeyTask(_Part):
    task: Literal["passkey"]
    digits: int = Field(default=5, ge=1)
    questions: Literal[1] = 1

    @property
    def name(self) -> str:
        return self.task


class CopyTask(_Part):
    """Phrases of random words; the first `cue` of them are given."""

    task: Literal["copy"]
    questions: int = Field(ge=1, le=8)
    words: int = Field(default=12, ge=2)
    cue: int = Field(default=4, ge=1)
    values: str = "nouns"

    @model_validator(mode="after")
    def _something_asked(self) -> "CopyTask":
        if self.cue >= self.words:
            raise ValueError(
                f"cue={self.cue} leaves nothing to ask for: use at most {self.words - 1}"
            )
        return self

    @property
    def name(self) -> str:
        return self.task


class QuoteTask(_Part):
    """Passages of the haystack itself, so for haystacks of real text only."""

    task: Literal["quote"]
    questions: int = Field(ge=1)
    cue: int = Field(default=10, ge=1)
    words: int = Field(default=10, ge=1)

    @property
    def name(self) -> str:
        return self.task


class NeedleTask(_Part):
    """RULER's needles: `keys` of them with `values` numbers each, `questions` keys asked for.

    More than one value is scored by the share that the reply holds, in any order.
    """

    task: Literal["needle"]
    label: str
    questions: int = Field(ge=1)
    keys: int = Field(default=1, ge=1)
    values: int = Field(default=1, ge=1)
    digits: int = Field(default=7, ge=1)
    sentence: str = "One of the special magic numbers for {key} is: {value}."
    ask: str = (
        "\n\nWhat is the special magic number for {key} mentioned in the provided text?"
        " The special magic number for {key} mentioned in the provided text is"
    )

    @model_validator(mode="after")
    def _enough_keys(self) -> "NeedleTask":
        if self.questions > self.keys:
            raise ValueError(f"questions={self.questions} is not allowed: use keys={self.keys}")
        return self

    @model_validator(mode="after")
    def _fillable(self) -> "NeedleTask":
        marks = {"key": "<key>", "value": "<value>"}
        several = ["key"] if self.keys > 1 else []
        for field, known, needed in (
            ("sentence", ["key", "value"], [*several, "value"]),
            ("ask", ["key"], several),
        ):
            text = getattr(self, field)
            try:
                filled = text.format(**{name: marks[name] for name in known})
            except (ValueError, LookupError, AttributeError):
                raise ValueError(
                    f"{field} {shown(text)} may have no braces but {_holes(known)}"
                ) from None
            if not all(marks[name] in filled for name in needed):
                raise ValueError(f"{field} {shown(text)} must have {_holes(needed)}")
        return self

    @property
    def name(self) -> str:
        return self.label


def _holes(names: Sequence[str]) -> str:
    return " and ".join(f"{{{name}}}" for name in names)


class VariablesTask(_Part):
    """RULER's variable tracking: a chain of `hops` assignments after a first one."""

    task: Literal["variables"]
    questions: int = Field(default=1, ge=1)
    hops: int = Field(default=4, ge=1)

    @property
    def name(self) -> str:
        return self.task


class CommonWordsTask(_Part):
    """RULER's word extraction; the haystack must be `common-words`."""

    task: Literal["common-words"]
    questions: Literal[1] = 1

    @property
    def name(self) -> str:
        return self.task


Task = Annotated[
    FactTask | PasskeyTask | CopyTask | QuoteTask | NeedleTask | VariablesTask | CommonWordsTask,
    Field(discriminator="task"),
]


class Group(_Part):
    """Tasks that share haystacks: each of these texts holds and answers all of them."""

    haystacks: tuple[Haystack, ...] = Field(min_length=1)
    tasks: tuple[Task, ...] = ()

    @model_validator(mode="after")
    def _fitting(self) -> "Group":
        made = [h.name for h in self.haystacks if h.source in ("noise", "common-words")]
        for task in self.tasks:
            if task.task == "quote" and made:
                raise ValueError(f"nothing is worth quoting in a haystack of {made[0]}")
            if task.task == "common-words" and {h.source for h in self.haystacks} != {task.task}:
                raise ValueError("the task common-words needs haystacks of source common-words")
        for once in ("passkey", "copy", "common-words"):
            if sum(task.task == once for task in self.tasks) > 1:
                raise ValueError(f"two tasks {once} in a group ask the same of a haystack: use one")
        return self


class Decode(_Part):
    """What is said after each haystack, token by token: the text goes on, in stretches of `every`.

    A stretch ends with a question that was not asked before and, in turn, with one of `often`
    others, which are so asked again and again. Without tasks there are none, only the text.
    """

    tokens: int = Field(ge=1)
    every: int = Field(ge=1)
    often: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _whole(self) -> "Decode":
        if self.tokens % self.every:
            raise ValueError(f"tokens={self.tokens} is no multiple of every={self.every}")
        return self

    @property
    def stretches(self) -> int:
        return self.tokens // self.every


class Suite(_Part):
    """One file. `prompt_tokens`: of each haystack, in whole blocks; the question comes after it.

    With `decode` the questions come while it decodes.
    """

    name: str
    about: str
    seed: int = 0
    prompt_tokens: int = Field(ge=8 * BLOCK, multiple_of=BLOCK)
    settings: tuple[Literal["in-window", "later"], ...] = Field(
        default=("in-window", "later"), min_length=1
    )
    budgets: tuple[str, ...] = Field(default=("50%", "20%", "10%"), min_length=1)
    depths: tuple[float, float] = (0.05, 0.85)
    """First and last place of what is planted, as shares of the haystack."""
    decode: Decode | None = None
    groups: tuple[Group, ...] = Field(min_length=1)
    facts: tuple[Fact, ...] = ()
    words: dict[str, tuple[str, ...]] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "Suite":
        if not 0 <= self.depths[0] < self.depths[1] <= 0.95:
            raise ValueError(f"depths={list(self.depths)} must rise within 0 to 0.95")
        for field in ("settings", "budgets"):
            given = getattr(self, field)
            if twice := [name for name in given if given.count(name) > 1]:
                raise ValueError(f"{field} has {twice[0]} twice; keep one of them")
        for name, words in self.words.items():
            if not all(word.strip() for word in words):
                raise ValueError(f"words.{name} has one that is empty; take it out")
        for fact in self.facts:
            self._list(fact.values)
        for group in self.groups:
            self._askable(group)
            asked = sum(task.questions for task in group.tasks if task.task == "fact")
            if asked > len(self.facts):
                raise ValueError(f"{asked} facts are asked for and {len(self.facts)} given")
            for task in group.tasks:
                if task.task == "copy":
                    self._list(task.values, task.words)
                if task.task == "needle":
                    self._list("nouns", 2)
                    self._names(task.keys)
                if task.task == "common-words":
                    self._list("nouns", COMMON)
        return self

    def _names(self, keys: int) -> None:
        """Keys are ordered pairs of nouns."""
        nouns = len(set(self.words["nouns"]))
        most = nouns * (nouns - 1)
        if keys > most:
            raise ValueError(f"keys={keys} is not allowed: {nouns} nouns name {most}; give more")

    def _askable(self, group: Group) -> None:
        if self.decode is None:
            if not group.tasks:
                raise ValueError("a group has no tasks; only a suite with decode may do without")
            return
        if "settings" in self.model_fields_set:
            raise ValueError("a suite with decode has no settings: its questions come later")
        listed = [
            task.name
            for task in group.tasks
            if task.task in ("variables", "common-words")
            or (task.task == "needle" and task.values > 1)
        ]
        if listed:
            raise ValueError(f"{listed[0]} is answered by a list, which decode cannot ask for")
        asked = sum(task.questions for task in group.tasks)
        wanted = self.decode.stretches + self.decode.often
        if asked not in (0, wanted):
            raise ValueError(
                f"a group has {asked} questions and {self.decode.stretches} stretches of decode: "
                f"use {wanted} questions, one for each and {self.decode.often} that are asked often"
            )

    @property
    def modes(self) -> tuple[str, ...]:
        """The settings that jobs have."""
        return (DECODE,) if self.decode else self.settings

    @property
    def whole_tokens(self) -> int:
        """What budgets are shares of: a haystack, and what is decoded after it."""
        return self.prompt_tokens + (self.decode.tokens if self.decode else 0)

    def _list(self, name: str, least: int = 0) -> None:
        """There must be a list of this name; where `least` words are drawn from it, with so many
        different ones."""
        if not self.words.get(name) and (least or name != "digits"):
            known = ", ".join([*([] if least else ["digits"]), *self.words])
            raise ValueError(f"values {shown(name)} is no list of words; known: {known}")
        if least and len(set(self.words[name])) < least:
            raise ValueError(
                f"words.{name} has {len(set(self.words[name]))} different words, {least} are drawn"
            )


def suites() -> list[str]:
    """Names of the shipped suites."""
    found = (config_folder() / "suites").glob(f"*{PRESET_SUFFIX}")
    return sorted(path.name.removesuffix(PRESET_SUFFIX) for path in found)


def load(source: str, **overrides: object) -> Suite:
    """A shipped suite by name, or a file; `overrides` that are not None win over it.

    Files of haystacks are looked for beside the suite's. Raises ValueError with key and reason.
    """
    path, told = _read(source)
    if "like" in told:
        like = told.pop("like")
        _, whole = _read(like) if isinstance(like, str) else (None, {"like": like})
        if "like" in whole:
            raise ValueError(f"{path}: like: {shown(like)} is not a suite that stands by itself")
        if "decode" in told:
            whole.pop("settings", None)  # it has none
        words, more = (part.get("words", {}) for part in (whole, told))
        told = whole | told
        if isinstance(words, dict) and isinstance(more, dict):
            told["words"] = words | more
    told |= {key: value for key, value in overrides.items() if value is not None}
    try:
        suite = Suite.model_validate(told)
    except ValidationError as error:
        raise ValueError(f"{path}: " + "; ".join(map(_told, error.errors()))) from None
    groups = tuple(
        group.model_copy(update={"haystacks": _placed(group.haystacks, path.parent)})
        for group in suite.groups
    )
    return suite.model_copy(update={"groups": groups})


def _read(source: str) -> tuple[Path, dict[str, Any]]:
    """A suite's file, and what it says."""
    path = config_folder() / "suites" / (source + PRESET_SUFFIX) if source in suites() else None
    path = path or Path(source)
    if not path.is_file():
        raise ValueError(f"{source!r} is no file and no suite. {nearest(source, suites())}")
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    except Exception as error:  # PyYAML lets through what fails in it: KeyError, AttributeError
        raise ValueError(f"cannot read {path}: {error!r}") from None
    if not isinstance(told, dict) or not all(isinstance(key, str) for key in told):
        raise ValueError(f"{path} must be a mapping, not {shown(told)}")
    return path, told


def _placed(haystacks: Sequence[Haystack], folder: Path) -> tuple[Haystack, ...]:
    placed = []
    for haystack in haystacks:
        if haystack.file is not None:
            file = folder / haystack.file.expanduser()
            if not file.is_file():
                raise ValueError(f"haystack {file} is no file")
            try:
                file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"haystack {file} is not UTF-8: {error}") from None
            haystack = haystack.model_copy(update={"file": file})
        placed.append(haystack)
    return tuple(placed)


def _told(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    if isinstance(error["input"], dict):  # of a whole part of the suite, not of one value
        return f"{place}: {error['msg']}" if place else str(error["msg"])
    return f"{place}={shown(error['input'])}: {error['msg']}"
