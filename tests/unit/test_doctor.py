"""`nexus-vllm doctor`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nexus_vllm.tools import cli, doctor
from nexus_vllm.tools.doctor import Finding, render

# The report

FINDINGS = [
    Finding("versions", "vllm", "0.32.0", True),
    Finding("versions", "torch", "2.13.0"),
    Finding("engine", "block size", "16 tokens", False, "blocks of 32", "drop --block-size"),
]


def test_the_report_is_aligned_and_says_what_to_do() -> None:
    assert render(FINDINGS).splitlines() == [
        "versions",
        "  ok       vllm        0.32.0",
        "           torch       2.13.0",
        "",
        "engine",
        "  REFUSED  block size  16 tokens",
        "                       needed: blocks of 32",
        "                       remedy: drop --block-size",
        "",
        "1 REFUSED: --kv-eviction would not start",
    ]
    assert render(FINDINGS[:2]).endswith("\nall is well")


def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def examine(model: str | None, options: list[str]) -> list[Finding]:
        print("noise on stdout")
        asked.append((model, options))
        return FINDINGS[: 2 if model is None else 3]

    monkeypatch.setattr(doctor, "examine", examine)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("versions")
    assert cli.main(["doctor", "--json", "m", "--", "--dtype", "float32"]) == 1
    assert cli.main(["doctor", "m", "--json"]) == 1
    assert asked == [(None, []), ("m", ["--dtype", "float32"]), ("m", [])]
    report = json.loads(capsys.readouterr().out.split("\n}\n")[0] + "}")
    assert report["ok"] is False
    assert report["findings"][2]["remedy"] == "drop --block-size"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_wrong_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(argv)
    assert refused.value.code == 2


# For real: three processes, as a user starts them


def examined(*argv: str, **env: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of the console script."""
    stock = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("nexus-vllm")), "doctor", "--json", *argv],
        env={**stock, "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", **env},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return done.returncode, report["findings"]


def model(folder: Path, **config: Any) -> str:
    """A model without weights."""
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(llama | config))
    return str(folder)


def refused(findings: list[dict[str, Any]]) -> list[list[str]]:
    keys = ("name", "found", "needed", "remedy")
    return [[finding[key] for key in keys] for finding in findings if finding["ok"] is False]


def test_a_sound_installation_and_model(tmp_path: Path) -> None:
    code, findings = examined(model(tmp_path), "--", "--dtype", "float32", "--kv-budget", "512")
    assert (code, refused(findings)) == (0, [])
    told = {finding["name"]: finding["found"] for finding in findings}
    assert told["model"] == "LlamaForCausalLM"
    assert told["model runner"] == "V1"
    assert told["scheduling"] in ("synchronous", "asynchronous")
    assert told["attention backend"]
    assert told["KV layout"]
    assert told["block size"] == "32 tokens"
    assert told["entry point"] == "nexus_vllm.plugin:register"
    assert told["StatLoggerManager.__init__"] == "wrapped"
    assert "checked at start" in told["layers"]


def test_a_model_and_options_that_would_be_refused(tmp_path: Path) -> None:
    config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    path = model(tmp_path, **config, sliding_window=64)
    options = ["--kv-cache-dtype", "fp8", "--kv-allocator", "lu"]
    code, findings = examined(path, "--", *options)
    assert code == 1
    assert refused(findings) == [
        [
            "support",
            "the model has layers with a sliding window of 64 tokens",
            "every layer must be plain full attention",
            "pass --disable-sliding-window, for contexts no longer than that, or serve this model "
            "without --kv-eviction",
        ],
        [
            "support",
            "--kv-cache-dtype fp8",
            "scoring reads keys in the model's own dtype, bfloat16",
            "drop --kv-cache-dtype",
        ],
        [
            "support",
            "--kv-allocator lu without a profile",
            f"none is shipped for {tmp_path.name} with this score and block size",
            "make one with `nexus-vllm profile MODEL` and pass it as --kv-profile FILE",
        ],
    ]


def test_a_plugin_that_vllm_may_not_load() -> None:
    code, findings = examined(VLLM_PLUGINS="other")
    told = {name: (found, remedy) for name, found, _, remedy in refused(findings)}
    assert code == 1
    assert list(told) == [
        "VLLM_PLUGINS",
        "EngineArgs.add_cli_args",
        "vllm serve",
        "EngineArgs.create_engine_config",
    ]
    assert told["VLLM_PLUGINS"] == (
        "VLLM_PLUGINS='other' leaves out nexus_vllm",
        "add nexus_vllm to it, or unset it",
    )
    assert "unrecognized arguments: --kv-eviction" in told["vllm serve"][0]
