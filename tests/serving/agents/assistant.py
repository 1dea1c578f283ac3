"""A tiny model with Qwen3's template and special tokens, served with a script of its answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.models.gguf_files import write
from tests.serving.servers import KEYS, Server, serving
from tests.support.tiny_files import ALPHABET, GGUF_ENTRIES, gguf_tensors

ROOT = Path(__file__).parents[3]
TEMPLATE = Path(__file__).with_name("qwen3.jinja")
END = "<|im_end|>"
MARKERS = ("<|im_start|>", END, "<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = [*ALPHABET, *MARKERS]
CONTEXT = 1 << 16


def write_assistant(path: Path, template: str | None = None) -> Path:
    """A GGUF file whose tokens are bytes and Qwen3's markers."""
    control = {word: 3 if word.startswith("<|") else 4 for word in MARKERS}  # 4: not special
    entries = GGUF_ENTRIES | {
        "llama.context_length": CONTEXT,
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [control.get(word, 1) for word in WORDS],
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.eos_token_id": WORDS.index(END),
        "tokenizer.chat_template": template or TEMPLATE.read_text(),
    }
    entries["tokenizer.ggml.tokens"] = [*WORDS, "aa"]
    entries["tokenizer.ggml.token_type"] = [*entries["tokenizer.ggml.token_type"], 1]
    del entries["tokenizer.ggml.bos_token_id"]
    write(path, "llama", entries, gguf_tensors(len(WORDS) + 1))
    return path


@dataclass
class Assistant:
    """A server whose model says what it is given."""

    server: Server
    folder: Path

    @property
    def key(self) -> str:
        return KEYS["notes"]

    def script(self, answers: Sequence[str] | Mapping[str, str]) -> None:
        """The texts of the next answers, or of prompts that have given words, the first of which
        count. Forgets the prompts of those before.
        """
        texts = dict(answers) if isinstance(answers, Mapping) else list(answers)
        (self.folder / "answers.json").write_text(json.dumps(texts))
        (self.folder / "prompts.jsonl").write_text("")

    @property
    def prompts(self) -> list[str]:
        """The prompts of the answers since `script`."""
        lines = (self.folder / "prompts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def unsaid(self) -> list[str]:
        found: list[str] = json.loads((self.folder / "answers.json").read_text())
        return found


@contextmanager
def assistant(
    folder: Path, *, template: str | None = None, most: int = 16384
) -> Iterator[Assistant]:
    model = write_assistant(folder / "assistant.gguf", template)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"HETERO_SCRIPT": str(folder), "PYTHONPATH": path}
    module = f"{__package__}.scripted_server"
    options = ("--alias", "*", "--max-seq-len", str(most))
    with serving(folder / "server", *options, model=str(model), module=module, env=env) as server:
        yield Assistant(server, folder)
