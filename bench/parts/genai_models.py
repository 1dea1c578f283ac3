"""A model for ONNX Runtime GenAI, which its builder exports from a Hugging Face directory.

Its builder reads no quantised GGUF, so the weights are floats, random or those of `file`, that it
rounds to 4 bits in blocks of 32 itself, with int8 activations (`accuracy_level` 4).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .gguf_models import shallow_config

BUILDER = "onnxruntime_genai.models.builder"
OPTIONS = ("int4_accuracy_level=4", "int4_block_size=32", "int4_algo_config=rtn")
LIMIT_S = 1800.0


def genai_model(model: str, layers: int, file: Path | None, folder: Path) -> Path:
    """The folder of the exported model, made by processes of their own, whose memory is theirs.

    Raises `RuntimeError` with the last line of what one of them said.
    """
    source, made = folder / "genai-floats", folder / "genai"
    name = str(file) if file is not None else model
    floats = [sys.executable, "-P", "-c", _CODE, name, str(layers), str(source)]
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
    """Write a Hugging Face directory of float16: of a GGUF file, or of random weights."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    _, name, layers, folder = arguments
    torch.manual_seed(0)
    if name.endswith(".gguf"):
        path = Path(name)
        found = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float16
        )
    else:
        raw = shallow_config(name, int(layers)).to_dict()
        config = AutoConfig.for_model(**raw)
        found = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    found.save_pretrained(folder)
    words = {f"w{i}": i for i in range(found.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w2", bos_token="w1"
    ).save_pretrained(folder)
