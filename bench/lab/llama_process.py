"""llama.cpp's logits of texts, computed in a process of its own: it leaves files open there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

GGML_TYPES: Final = {"f32": 0, "f16": 1, "q8": 8, "q4": 2}
# Weights stay as the file has them: llama.cpp's AMX kernels, for which it repacks some, end the
# process where the system does not allow AMX.
_WORKER: Final = """
import json, sys
import llama_cpp, numpy
path, kv, context, threads = sys.argv[1], *map(int, sys.argv[2:])
defaults = llama_cpp.llama_cpp.llama_model_default_params
def plain():
    parameters = defaults()
    parameters.use_extra_bufts = False
    return parameters
llama_cpp.llama_cpp.llama_model_default_params = plain
model = llama_cpp.Llama(path, n_ctx=context, logits_all=True, verbose=False, type_k=kv, type_v=kv,
                        flash_attn=kv > 1, n_threads=threads, n_threads_batch=threads)
print("ready", flush=True)
for line in sys.stdin:
    into, tokens = json.loads(line)
    model.reset()
    model.eval(tokens)
    numpy.save(into, model.scores[: len(tokens)])
    print("saved", flush=True)
"""


class LlamaProcess:
    """A GGUF file open in llama.cpp, with keys and values in a format. A context manager."""

    def __init__(self, path: Path, *, kv: str, context: int, threads: int = 1) -> None:
        self.max_seq_len = context
        self._folder = tempfile.TemporaryDirectory()
        arguments = [str(path), *map(str, (GGML_TYPES[kv], context, threads))]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answered("ready")

    def logits(self, tokens: Sequence[int]) -> Any:
        """Return logits float32 [tokens, vocab] of a text."""
        into = Path(self._folder.name) / "logits.npy"
        assert self._process.stdin is not None
        print(json.dumps([str(into), list(tokens)]), file=self._process.stdin, flush=True)
        self._answered("saved")
        return np.load(into)

    def _answered(self, word: str) -> None:
        """Wait for an answer. Raises `RuntimeError` where llama.cpp has ended."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != word:
            raise RuntimeError(f"llama.cpp ended with {self._process.wait()}")

    def __enter__(self) -> LlamaProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._folder.cleanup()
