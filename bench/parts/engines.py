"""llama.cpp, OpenVINO GenAI, ONNX Runtime GenAI and hetero behind one method: `round`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hetero.generation.llm import LLM

from .genai_models import genai_model

GGML_TYPES = {"f32": 0, "f16": 1, "q8": 8}  # 8 bits: Q8_0, which needs flash attention
KV_PRECISIONS = {"f32": "f32", "f16": "f16", "q8": "u8"}


def tokens_of(prompt: int, decode: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """The same token ids for every engine."""
    drawn = np.random.default_rng(seed).integers(3, 32000, prompt + decode).tolist()
    return drawn[:prompt], drawn[prompt:]


def speeds(
    prompt: int, decode: int, run: Callable[[list[int]], object], step: Callable[[int], object]
) -> dict[str, float]:
    """Tokens/s of a prompt and of the steps behind it."""
    first, others = tokens_of(prompt, decode)
    start_s = time.perf_counter()
    run(first)
    middle_s = time.perf_counter()
    for token in others:
        step(token)
    end_s = time.perf_counter()
    return {"prefill": prompt / (middle_s - start_s), "decode": decode / (end_s - middle_s)}


def paced(decode: int, step: Callable[[int], object]) -> dict[str, float]:
    """Tokens/s of steps."""
    start_s = time.perf_counter()
    for token in tokens_of(0, decode)[1]:
        step(token)
    return {"decode": decode / (time.perf_counter() - start_s)}


class Hetero:
    """hetero on some devices."""

    def __init__(
        self,
        *,
        path: str,
        device: str,
        weights: str,
        profile: str | None,
        length: int,
        kv: str = "f16",
        context: int = 4096,
    ) -> None:
        both = device in ("hetero", "auto")
        self._llm = LLM(
            path,
            device=device,  # type: ignore[arg-type]
            weights=weights,
            profile=profile if both else None,
            prompt_lengths=(length,) if both else (),
            max_seq_len=context,
            kv=kv,
        )
        print(f"{device}: {self._llm.choice.reason or self._llm.plan.plan_id}", file=sys.stderr)

    def round(self, prompt: int, decode: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        engine = self._llm.engine
        context = self._llm.context
        context.truncate(0)
        run = partial(engine.prefill, context), partial(engine.decode, context)
        return speeds(prompt, decode, *run)

    def steps(self, decode: int) -> dict[str, float]:
        """Decoding behind what is there."""
        return paced(decode, partial(self._llm.engine.decode, self._llm.context))


class LlamaCpp:
    """llama.cpp with a number of threads, each on a core of its own."""

    def __init__(self, *, path: str, threads: int, cores: list[int], kv: str, context: int) -> None:
        os.sched_setaffinity(0, cores)
        from llama_cpp import Llama

        sizes = {"n_ctx": context, "n_batch": 512, "n_ubatch": 512}
        sizes |= dict.fromkeys(("type_k", "type_v"), GGML_TYPES[kv]) | {"flash_attn": kv != "f16"}
        count = {"n_threads": threads, "n_threads_batch": threads}
        self._model: Any = Llama(path, verbose=False, **sizes, **count)

    def round(self, prompt: int, decode: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        self._model.reset()
        return speeds(prompt, decode, self._model.eval, lambda token: self._model.eval([token]))

    def steps(self, decode: int) -> dict[str, float]:
        """Decoding behind what is there."""
        return paced(decode, lambda token: self._model.eval([token]))


class OpenVino:
    """OpenVINO GenAI with a number of threads, each on a core of its own.

    It decodes the tokens that it chooses itself, which costs it a search for the largest logit.
    Prompts differ from round to round: it keeps the blocks of earlier ones.
    """

    def __init__(self, *, path: str, threads: int, cores: list[int], kv: str) -> None:
        os.sched_setaffinity(0, cores)
        import openvino_genai

        options = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": KV_PRECISIONS[kv]}
        self._model: Any = openvino_genai.LLMPipeline(path, "CPU", **options)
        self._rounds = 0

    def round(self, prompt: int, decode: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        import openvino
        import openvino_genai

        self._rounds += 1
        ids = np.array([tokens_of(prompt, 0, self._rounds)[0]], np.int64)
        tensors = openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        wanted = openvino_genai.GenerationConfig(
            max_new_tokens=decode + 1, min_new_tokens=decode + 1, ignore_eos=True, do_sample=False
        )
        answer = self._model.generate(openvino_genai.TokenizedInputs(*tensors), wanted)
        measured = answer.perf_metrics
        if measured.get_num_generated_tokens() != decode + 1:
            raise RuntimeError(f"{measured.get_num_generated_tokens()} tokens, not {decode + 1}")
        first_s, step_s = measured.get_ttft().mean / 1e3, measured.get_tpot().mean / 1e3
        return {"prefill": prompt / first_s, "decode": 1 / step_s}


class OnnxGenAi:
    """ONNX Runtime GenAI with a number of threads, each on a core of its own.

    It decodes the tokens that it chooses itself. Prompts differ from round to round.
    """

    def __init__(
        self,
        *,
        model: str,
        layers: int,
        folder: Path,
        threads: int,
        cores: list[int],
        context: int,
    ) -> None:
        os.sched_setaffinity(0, cores)
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(genai_model(model, layers, folder)))
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model: Any = onnxruntime_genai.Model(config)
        self._context, self._rounds = context, 0

    def round(self, prompt: int, decode: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        import onnxruntime_genai

        self._rounds += 1
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        longest = min(self._context, prompt + decode + 1)
        parameters.set_search_options(do_sample=False, max_length=longest, min_length=longest)
        generator = onnxruntime_genai.Generator(self._model, parameters)
        ids = np.array(tokens_of(prompt, 0, self._rounds)[0], np.int32)
        start_s = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()  # of the prompt's logits
        middle_s = time.perf_counter()
        for _ in range(decode):
            generator.generate_next_token()
        end_s = time.perf_counter()
        if generator.token_count() != prompt + decode + 1:
            raise RuntimeError(f"{generator.token_count()} tokens, not {prompt + decode + 1}")
        return {"prefill": prompt / (middle_s - start_s), "decode": decode / (end_s - middle_s)}
