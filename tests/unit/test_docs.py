"""The documents name tests that exist."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from nexus_vllm.config import Settings
from nexus_vllm.engine.hooks import SUPPORTED_TOLD

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(?:tests/)?((?:engine|scheduler|server|unit)/\w+\.py)?::(test_\w+\*?)")
FILE = re.compile(r"`(?:tests/)?((?:engine|scheduler|server|unit)/\w+\.py)")


def named(text: str) -> list[tuple[str, str]]:
    """Each (file, test or pattern) that a text names; `::test` belongs to the file before it."""
    found, file = [], ""
    for match in re.finditer(f"{NAMED.pattern}|{FILE.pattern}", text):
        file = match[1] or match[3] or file
        found.append((file, match[2] or "*"))
    return found


def test_names_are_found() -> None:
    text = "`unit/test_a.py::test_x`, `::test_y_*`, `engine/test_b.py` (`[z]`)"
    assert named(text) == [
        ("unit/test_a.py", "test_x"),
        ("unit/test_a.py", "test_y_*"),
        ("engine/test_b.py", "*"),
    ]


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    for file, name in named(document.read_text()):
        path = ROOT / "tests" / file
        assert path.is_file(), f"{document.name} names {file}"
        tests = re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        assert any(fnmatchcase(test, name) for test in tests), f"{document.name}: {file}::{name}"


@pytest.mark.parametrize(
    "document", ["README.md", "docs/support-matrix.md", "docs/vllm-versions.md"]
)
def test_the_supported_versions_are_told(document: str) -> None:
    assert f"vLLM {SUPPORTED_TOLD}" in (ROOT / document).read_text()


DEFAULT = re.compile(r"`(\w+): ([^`]+)`,?\s\(?the\s+default\b")


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_what_a_document_calls_the_default_is_it(document: Path) -> None:
    usual = Settings().to_json()
    for name, value in DEFAULT.findall(document.read_text()):
        assert str(usual[name]) == value, f"{document.name}: {name}: {value}"


def test_a_default_is_found() -> None:
    assert DEFAULT.findall("`prior: knorm`, the default) and `n: 5` (the\ndefault, or 1)") == [
        ("prior", "knorm"),
        ("n", "5"),
    ]
