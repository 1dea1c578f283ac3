"""Writes the trained model as a Hugging Face directory, with its held-out perplexity and samples.

The weights are the float ones the 4-bit values are made from: converting them with groups of 32 and
a signed maximum gives the weights the last part of the training ran with.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from corpus import ASSISTANT_PREFIX, USER_PREFIX
from model import Llama, LlamaShape
from prepare import BOS, EOS, SEED, UNK, Rows, token_id
from safetensors.torch import save_file
from tokenizers import Tokenizer

# The turn ends in "Assistant:" without a space: the space belongs to the first token of the answer.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '" + USER_PREFIX + "' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT_PREFIX + "' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT_PREFIX.rstrip() + "' }}{% endif %}"
)
EOS_ID = 1
PROMPTS = (
    "Once upon a time",
    "One day",
    "There was once a",
    "The little fox",
    "Tell me a story about a bear.\n",
    f"{USER_PREFIX}Tell me a story about a dragon and a lantern.\n{ASSISTANT_PREFIX.rstrip()}",
)


def held_out_perplexity(model: Llama, rows: Rows, *, is_first_only: bool) -> float:
    """Perplexity over the rows, or over each row's first document only, in float32."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in torch.split(torch.from_numpy(rows.astype(np.int64)), 4):
            inputs, targets = row[:, :-1], row[:, 1:]
            losses = nnf.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
            # Still in the first document: no end has been read yet.
            is_first = (inputs == EOS_ID).cumsum(1) == 0
            kept = losses[is_first] if is_first_only else losses
            total, count = total + float(kept.sum()), count + kept.numel()
    return math.exp(total / count)


def tokenizer_config(shape: LlamaShape) -> dict[str, Any]:
    """Hugging Face's tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "pad_token": EOS,
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_checkpoint(model: Llama, tokenizer: Tokenizer, out_dir: Path) -> None:
    """config, generation_config, weights and tokenizer, as `transformers` reads them."""
    out_dir.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": token_id(tokenizer, BOS), "eos_token_id": token_id(tokenizer, EOS)}
    generation = {**ends, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    for name, content in (
        ("config.json", {**model.shape.to_json(), **ends}),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config(model.shape)),
    ):
        (out_dir / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(out_dir / "tokenizer.json"))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})


def generate(
    model: Llama, tokenizer: Tokenizer, prompt: str, *, temperature: float, seed: int = SEED
) -> str:
    """The prompt and its continuation up to `</s>`; temperature 0 is greedy."""
    ids = tokenizer.encode(prompt).ids
    generator = torch.Generator().manual_seed(seed)
    eos = token_id(tokenizer, EOS)
    while ids[-1] != eos and len(ids) < model.shape.max_position_embeddings:
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0, -1]
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            odds = torch.softmax(logits / temperature, -1)
            ids.append(int(torch.multinomial(odds, 1, generator=generator)))
    return str(tokenizer.decode(ids))


def write_samples(model: Llama, tokenizer: Tokenizer, path: Path) -> None:
    """Samples of every prompt, float and 4-bit, greedy and sampled, as Markdown."""
    parts = ["# Samples of the demo model\n"]
    for is_quantised in (False, True):
        model.set_quantised(is_quantised)
        for prompt in PROMPTS:
            for temperature in (0.0, 0.8):
                weights = "4-bit" if is_quantised else "float"
                text = generate(model, tokenizer, prompt, temperature=temperature)
                title = f"## {weights} weights, temperature {temperature}, `{json.dumps(prompt)}`"
                parts.append(f"{title}\n\n{text}\n")
    path.write_text("\n".join(parts))


def main() -> None:
    """Command line: export.py WORK_DIR OUT_DIR [--results FILE] [--samples FILE]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--samples", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = Llama(LlamaShape())
    state = torch.load(arguments.work_dir / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    tokenizer = Tokenizer.from_file(str(arguments.work_dir / "tokenizer.json"))
    write_checkpoint(model, tokenizer, arguments.out_dir)
    results: dict[str, float] = {
        "parameters": model.parameter_count(),
        **{key: state[key] for key in ("step", "tokens", "elapsed_s")},
    }
    rows = np.load(arguments.work_dir / "held_out.npy")
    for name, is_quantised in (("float", False), ("int4", True)):
        model.set_quantised(is_quantised)
        for scope, is_first_only in (("rows", False), ("single_story", True)):
            perplexity = held_out_perplexity(model, rows, is_first_only=is_first_only)
            results[f"held_out_perplexity_{scope}_{name}"] = round(perplexity, 4)
    print(json.dumps(results, indent=2))
    if arguments.results:
        arguments.results.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.samples:
        write_samples(model, tokenizer, arguments.samples)


if __name__ == "__main__":
    main()
