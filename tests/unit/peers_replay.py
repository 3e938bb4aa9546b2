"""Run by the Python of .venv-kvpress: do the presses leave the same cache however they are called?

    .venv-kvpress/bin/python tests/unit/peers_replay.py TOKENIZER FOLDER

Makes a tiny Llama with random weights and the tokenizer of the folder TOKENIZER in FOLDER. For each
press, prints as JSON the largest difference between logits after its hooks were replayed on a
recorded prefill and after a prefill under the press; between tokens fed at once and one by one; and
between the first and the second time that the same cache is asked.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import peers_kvpress

TOKENS, QUESTION, KEPT = 1500, 20, 210


def tiny(tokenizer: Path, folder: Path) -> peers_kvpress.Model:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    told = AutoTokenizer.from_pretrained(tokenizer)
    told.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(told),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        attention_bias=True,
        initializer_range=0.3,  # attention worth the name
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        # Masking needs a key that all queries of a head turn away from, as they do in real models.
        layer.self_attn.q_proj.bias.data.normal_(std=8)
    model.save_pretrained(folder)
    return peers_kvpress.Model(folder, folder / "plain")


def differences(model: peers_kvpress.Model, name: str, ids: list[int]) -> dict[str, float]:
    from transformers import DynamicCache

    press, total = peers_kvpress.PRESSES[name], TOKENS + QUESTION
    haystack = model.prefill(ids[:TOKENS])
    prompt = model.prefill(ids[TOKENS:total], haystack)
    replayed = model.compressed(press, prompt, KEPT, 3)
    with model.again(replayed):
        first = model.feed(replayed, ids[total:], total, 6)
    with model.again(replayed):
        second = model.feed(replayed, ids[total:], total, 6)
    rows = [model.feed(replayed, [token], total + i) for i, token in enumerate(ids[total:])]
    single = torch.cat(rows[-6:])

    made = press.make(model.kvpress)
    made.compression_ratio = peers_kvpress.ratio(KEPT, total, press.drops)
    torch.manual_seed(3)
    model.unmask()
    cache: Any = DynamicCache()
    with made(model.model):
        model.model.model(input_ids=torch.tensor([ids[:total]]), past_key_values=cache)
    peers_kvpress.check_kept(press, model.kept(cache), KEPT)
    under = model.feed(cache, ids[total:], total, 6)
    pairs = {"replay": (first, under), "single": (first, single), "again": (first, second)}
    return {key: float((a - b).abs().max()) for key, (a, b) in pairs.items()}


def main() -> None:
    tokenizer, folder = map(Path, sys.argv[1:])
    with torch.inference_mode():
        model = tiny(tokenizer, folder)
        ids = torch.randint(100, 40000, (TOKENS + QUESTION + 12,)).tolist()
        print(json.dumps({name: differences(model, name, ids) for name in peers_kvpress.PRESSES}))


if __name__ == "__main__":
    main()
