"""A model for ONNX Runtime GenAI, which its builder exports from a Hugging Face directory.

Its builder reads no quantised GGUF, so the weights are random floats, which it rounds to 4 bits in
blocks of 32 itself, with int8 activations (`accuracy_level` 4).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .gguf_models import shallow_config

BUILDER = "onnxruntime_genai.models.builder"
OPTIONS = ("int4_accuracy_level=4", "int4_block_size=32", "int4_algo_config=rtn")
LIMIT_S = 1800.0


def genai_model(model: str, layers: int, folder: Path) -> Path:
    """The folder of the exported model, made by processes of their own, whose memory is theirs.

    Raises `RuntimeError` with the last line of what one of them said.
    """
    source, made = folder / "genai-floats", folder / "genai"
    floats = [sys.executable, "-P", "-c", _CODE, model, str(layers), str(source)]
    export = [sys.executable, "-P", "-m", BUILDER, "-i", str(source), "-o", str(made)]
    export += ["-p", "int4", "-e", "cpu", "-c", str(folder / "genai-cache")]
    for command in (floats, [*export, "--extra_options", *OPTIONS]):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            cwd=Path(__file__).parents[1],
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise RuntimeError(said[-1] if said else f"{command[3]} ended with {done.returncode}")
    return made


_CODE = "import sys; sys.path.insert(0, ''); from parts.genai_models import write; write(sys.argv)"


def write(arguments: list[str]) -> None:
    """Write a Hugging Face directory of random weights in float16."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    _, name, layers, folder = arguments
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shallow_config(name, int(layers)).to_dict())
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w2", bos_token="w1"
    ).save_pretrained(folder)
