"""What a folder of `nexus-vllm eval` holds: results.jsonl, one line per job, and what they are of;
passes.jsonl, one line for each haystack of each start of a server.

A run goes on where it stopped. It is refused where the lines that are there are not comparable.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nexus_vllm.tools.eval_plan import Job
from nexus_vllm.tools.eval_samples import Sample
from nexus_vllm.tools.eval_suite import Suite

FIELDS = ("sample", "question", "setting", "policy", "allocator", "budget", "seed")


class Results:
    """Lines of earlier runs and of this one, in DIR/results.jsonl; DIR/run.json: their identity.

    identity: what must be the same for all lines, text by name. Raises ValueError, naming what
    differs, where the folder has lines of another.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.path, mark = folder / "results.jsonl", folder / "run.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.lines = _whole_lines(self.path, FIELDS)
        if self.lines:
            known = _identity(mark)
            if changed := sorted(k for k in {*known, *identity} if known.get(k) != identity.get(k)):
                was = "; ".join(f"{key} was {known.get(key)}" for key in changed)
                raise ValueError(
                    f"{self.path} holds {len(self.lines)} results of another run: {was}, now "
                    f"{'; '.join(str(identity.get(key)) for key in changed)}. Name another --out, "
                    "or remove the file"
                )
        mark.write_text(json.dumps(dict(identity), indent=1) + "\n")
        self.passes_path = folder / "passes.jsonl"
        if not self.lines:
            self.passes_path.unlink(missing_ok=True)
        self.passes = _whole_lines(self.passes_path)
        self._known = set(map(key_of, self.lines))

    def has(self, job: Job) -> bool:
        return job.key in self._known

    def add(self, job: Job, told: Mapping[str, Any]) -> None:
        """Append one line, so that a run that is stopped loses none."""
        line = {**dict(zip(FIELDS, job.key, strict=True)), **told}
        _append(self.path, line)
        self.lines.append(line)
        self._known.add(job.key)

    def passed(self, told: dict[str, Any]) -> None:
        """Append what became of one haystack on one server."""
        _append(self.passes_path, told)
        self.passes.append(told)


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """As `Job.key`."""
    return tuple(line[field] for field in FIELDS)


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _identity(mark: Path) -> dict[str, str]:
    """What run.json says, nothing where there is none."""
    try:
        known = json.loads(mark.read_text()) if mark.exists() else {}
    except ValueError as error:
        raise ValueError(f"{mark} is not of nexus-vllm eval: {error}") from None
    if not isinstance(known, dict):
        raise ValueError(f"{mark} is not of nexus-vllm eval: it holds no mapping")
    return known


def _whole_lines(path: Path, fields: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The lines of the file; a last one that was cut off is taken out of it."""
    if not path.exists():
        return []
    whole, newline, cut = path.read_text(encoding="utf-8").rpartition("\n")
    lines = _parsed(path, whole, fields)
    if cut:
        path.write_text(whole + newline, encoding="utf-8")
    return lines


def lines_so_far(path: Path) -> list[dict[str, Any]]:
    """The results in the file of a run that may be going on: it is left alone, and a line that is
    being written is left out."""
    return _parsed(path, path.read_text(encoding="utf-8").rpartition("\n")[0], FIELDS)


def _parsed(path: Path, text: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """A mapping from each line, with these fields at least."""
    try:
        lines = [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is not of nexus-vllm eval: {error}") from None
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not line.keys() >= {*fields}:
            raise ValueError(
                f"{path} is not of nexus-vllm eval: line {number} lacks {', '.join(fields)}"
            )
    return lines


def samples_identity(suite: Suite, samples: Sequence[Sample]) -> str:
    """Name of the suite and digest of all that is asked: of texts, tokenizer and generator, too."""
    return f"{suite.name} {hashlib.sha256(repr(samples).encode()).hexdigest()[:16]}"


def model_identity(folder: Path) -> str:
    """Name, digest of config.json, and sizes of the files with weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return f"{folder.name} {digest.hexdigest()[:16]}"


def code_identity(package: Path) -> str:
    """Digest of the package's own code, without its tools: what it serves with."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if "tools" not in path.relative_to(package).parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
