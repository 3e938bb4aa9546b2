"""Tiny models with random weights: an engine of one takes milliseconds a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 256
# Weights so large that attention is peaked and replies depend on all of the context.
SPREAD = 1.7  # over the square root of what a weight's row sums up


def save(
    folder: Path,
    model_type: str = "llama",
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    hidden_size: int = 128,
    tokenizer_of: Path | None = None,
    **changes: Any,
) -> Path:
    """Write a model of two layers, with the tokenizer of another one if its text matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        **{
            "hidden_size": hidden_size,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_size,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 2048,
            "initializer_range": SPREAD / hidden_size**0.5,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    if tokenizer_of is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).symlink_to(tokenizer_of / name)
    return folder


def tokens(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    """A random prompt without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


def save_adapter(folder: Path, model: Path, seed: int, rank: int = 4) -> dict[str, Tensor]:
    """Write a LoRA adapter of queries and values; what it adds to the weights, by their names."""
    config = json.loads((model / "config.json").read_text())
    size, scale = config["head_dim"], 2.0
    outputs = {"q": config["num_attention_heads"] * size, "v": config["num_key_value_heads"] * size}
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for layer in range(config["num_hidden_layers"]):
        for name, output in outputs.items():
            module = f"model.layers.{layer}.self_attn.{name}_proj"
            a = 0.15 * torch.randn(rank, config["hidden_size"], generator=generator)
            b = 0.15 * torch.randn(output, rank, generator=generator)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
            added[f"{module}.weight"] = scale * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": [f"{name}_proj" for name in outputs],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added
