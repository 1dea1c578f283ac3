"""The supported architectures, one module each, by what differs from the decoder that all share."""

from __future__ import annotations

from hetero.models.architectures.base import Architecture, TensorNames
from hetero.models.architectures.cohere2 import COHERE2
from hetero.models.architectures.ernie4_5 import ERNIE4_5
from hetero.models.architectures.exaone4 import EXAONE4
from hetero.models.architectures.gemma import GEMMA
from hetero.models.architectures.gemma2 import GEMMA2
from hetero.models.architectures.gemma3 import GEMMA3
from hetero.models.architectures.gemma4 import GEMMA4, GEMMA4_UNIFIED
from hetero.models.architectures.glm4 import GLM4
from hetero.models.architectures.gpt_oss import GPT_OSS
from hetero.models.architectures.granite import GRANITE, GRANITE_HYBRID, MINICPM
from hetero.models.architectures.hunyuan import HUNYUAN
from hetero.models.architectures.internlm2 import INTERNLM2
from hetero.models.architectures.lfm2 import LFM2
from hetero.models.architectures.lfm2_moe import LFM2_MOE
from hetero.models.architectures.llama import LLAMA
from hetero.models.architectures.ministral3 import MINISTRAL3
from hetero.models.architectures.mistral import MISTRAL
from hetero.models.architectures.olmo import OLMO2, OLMO3
from hetero.models.architectures.opt import OPT
from hetero.models.architectures.phi import PHI
from hetero.models.architectures.phi3 import PHI3
from hetero.models.architectures.qwen2 import QWEN2
from hetero.models.architectures.qwen3 import QWEN3
from hetero.models.architectures.qwen3_5 import QWEN3_5
from hetero.models.architectures.qwen3_5_moe import QWEN3_5_MOE
from hetero.models.architectures.qwen3_moe import QWEN3_MOE
from hetero.models.architectures.smollm3 import SMOLLM3

__all__ = ["ARCHITECTURES", "Architecture", "TensorNames"]

_ALL = (
    LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, INTERNLM2, GEMMA, GEMMA2, GEMMA3, GEMMA4,
    GEMMA4_UNIFIED, PHI, PHI3, OPT, GRANITE, GRANITE_HYBRID, MINICPM, SMOLLM3, MINISTRAL3, OLMO2,
    OLMO3, EXAONE4, GLM4, ERNIE4_5, HUNYUAN, COHERE2, LFM2, LFM2_MOE, QWEN3_5, QWEN3_5_MOE, GPT_OSS,
)  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {x.name: x for x in _ALL}
