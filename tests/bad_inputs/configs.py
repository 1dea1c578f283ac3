"""config.json: absent, no JSON, absurd fields, unknown architectures; and what MODEL may name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bad_inputs.case import GENERATE, BadInput, config, json_set, no_config, replaced

FILE = "model/config.json"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
ABSURD: tuple[Any, ...] = (0, -1, "8", 1.5, True, [8])
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def sizes() -> list[BadInput]:
    """Every size with every absurd value."""
    found = [
        BadInput(f"{name}={value!r}", f"{name} must be a positive integer, got {value!r}; correct",
                 change=config(**{name: value}))
        for name in SIZES
        for value in ABSURD
    ]  # fmt: skip
    found += [
        BadInput(f"{name} beyond int32", f"{name} must be at most", change=config(**{name: 2**40}))
        for name in SIZES
    ]
    required = [x for x in SIZES if x not in ("num_key_value_heads", "head_dim",
                                              "max_position_embeddings")]  # fmt: skip
    return found + [
        BadInput(f"no {name}", f"{name} must be a positive integer, but it is missing",
                 change=no_config(name))
        for name in required
    ]  # fmt: skip


def deep(work: Path) -> None:
    (work / FILE).write_text("[" * 200_000, encoding="utf-8")


def linked(work: Path) -> None:
    (work / FILE).unlink()
    (work / FILE).symlink_to(work / "nowhere")


def folder(name: str) -> Any:
    def change(work: Path) -> None:
        (work / name).unlink()
        (work / name).mkdir()

    return change


BAD_FIELDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a positive number"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, got 'small'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, got inf"),
    ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
    ({"rope_theta": float("nan")}, "rope_theta must be a positive number, got nan"),
    ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
    ({"rope_scaling": 5}, "rope_scaling must be a JSON object, got 5"),
    ({"rope_scaling": {"rope_type": "stretch"}}, "rope_type must be one of default, dynamic"),
    ({"rope_scaling": {"rope_type": 5}}, "rope_type must be a string, got 5"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number, but it is"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be a positive number"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor must be greater"),
    ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "factor must be a positive number, got '8'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}},
     "beta_fast must be a positive number, got -1"),
    ({"rope_parameters": {"full_attention": {}}}, "per layer type is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
    ({"hidden_act": "mish"}, "hidden_act must be one of silu, swish, gelu"),
    ({"hidden_act": 7}, "hidden_act must be a string, got 7"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
    ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must be a multiple of num_key_value"),
    ({"head_dim": 5}, "head_dim must be even for rotary embeddings, got 5"),
    ({"head_dim": None, "hidden_size": 9}, "hidden_size must be a multiple of num_attention_heads"),
    ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list of token ids, got '2'"),
    ({"eos_token_id": [2, 2.5]}, "eos_token_id must be a token id or a list of token ids"),
    ({"bos_token_id": {"id": 1}}, "bos_token_id must be a token id or a list of token ids"),
    ({"quantization_config": {"quant_method": "awq"}}, "weights quantised with 'awq' are not"),
    ({"quantization_config": 4}, "weights quantised with 'quantization_config' are not supported"),
    ({"num_hidden_layers": 5000}, "num_hidden_layers must be at most 4096, got 5000"),
    ({"num_hidden_layers": 4096}, "is missing (and 36854 more); download the model again"),
    ({"hidden_size": 2**31 - 1, "head_dim": 4}, "must have the shape"),
    ({"vocab_size": 2**31 - 1}, "must have the shape [2147483647, 8] by config.json, got"),
    ({"intermediate_size": 2**31 - 1}, "must have the shape"),
    ({"head_dim": 2**30}, "must have the shape"),
    ({"num_attention_heads": 2**30, "num_key_value_heads": 2**30}, "must have the shape"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
    ({"architectures": [5]}, "architectures must be a list of names"),
    ({"model_type": 5}, "model_type must be a string, got 5"),
    ({"model_type": "mistral", "architectures": None, "sliding_window": -3},
     "sliding_window must be a positive integer, got -3"),
)  # fmt: skip
UNKNOWN: tuple[tuple[str, str], ...] = (
    ("lama", "the nearest supported one is 'llama'"),
    ("qwen", "the nearest supported one is 'qwen"),
    ("gemma9", "the nearest supported one is 'gemma"),
    ("phi-3", "the nearest supported one is 'phi3'"),
    ("internlm", "the nearest supported one is 'internlm2'"),
    ("", "architecture '' is not supported; choose a model of one of: llama"),
    ("bert" * 500, "is not supported"),
)
NOT_JSON: tuple[tuple[str, bytes, str], ...] = (
    ("empty", b"", "is not valid JSON"),
    ("cut", b'{"model_type": "lla', "is not valid JSON"),
    ("a list", b"[1, 2]", "must hold a JSON object, got list"),
    ("a number", b"7", "must hold a JSON object, got int"),
    ("null", b"null", "must hold a JSON object, got NoneType"),
    ("no text", b"\xff\xfe\x00\x01", "is not UTF-8 text"),
    ("a page", b"<!DOCTYPE html><html>401</html>", "is not valid JSON"),
    ("a number of 5000 digits", b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ("a pointer of git-lfs", b"version https://git-lfs.github.com/spec/v1\n", "is not valid JSON"),
)
MODELS: tuple[tuple[str, str], ...] = (
    ("", "there is no such directory"),
    ("dem", "did you mean 'demo'?"),
    ("{work}/modl", "did you mean"),
    ("{work}/none.gguf", "there is no such file"),
    ("{dir}/config.json", "is a file; give the model's directory, or a .gguf file"),
    ("{work}/empty", "has no config.json; give a Hugging Face model directory"),
    ("random:", "is not a known model; choose one of"),
    ("random:llama-3.2-1", "llama-3.2-1b"),
    ("random:nothing-like-it", "choose one of"),
    ("llama-3-8b", "for benchmarks there is 'random:llama-3-8b', the shapes of that"),
    ("a\x01b", "there is no such directory"),
    ("x" * 5000, "a file's name has at most 255 characters"),
    ("/dev/null", "is a file; give the model's directory"),
)

CASES = [
    *sizes(),
    *(BadInput(f"field {json.dumps(x)[:60]}", sentence, change=config(**x))
      for x, sentence in BAD_FIELDS),
    *(BadInput(f"architecture {name[:20]!r}", sentence,
               change=json_set(FILE, {"model_type": name}, ["architectures"]))
      for name, sentence in UNKNOWN),
    BadInput("another head", "'LlamaForSequenceClassification' is not supported; the nearest",
             change=config(architectures=["LlamaForSequenceClassification"])),
    BadInput("no architecture", "model_type must be a string, but it is missing",
             change=no_config("model_type", "architectures")),
    *(BadInput(f"config: {name}", sentence, change=replaced(FILE, content))
      for name, content, sentence in NOT_JSON),
    BadInput("config: nested 200000 deep", "is not valid JSON", change=deep),
    BadInput("config: a dangling link", "has no config.json", change=linked),
    BadInput("config: a folder", "has no config.json", change=folder(FILE)),
    BadInput("generation_config: a list", "must hold a JSON object, got list",
             change=replaced("model/generation_config.json", b"[]")),
    BadInput("generation_config: a bad id", "eos_token_id must be a token id",
             change=replaced("model/generation_config.json", b'{"eos_token_id": "x"}')),
    *(BadInput(f"MODEL {name[:30]!r}", sentence, ("generate", name, *GENERATE[2:]))
      for name, sentence in MODELS),
]  # fmt: skip
