"""The table of operations and their kernels."""

from __future__ import annotations

from hetero.backends import ops
from hetero.backends.opencl.attention import prepare_attention, prepare_attention_heads
from hetero.backends.opencl.decode_chunks import accepts_decode_chunks, prepare_decode_chunks
from hetero.backends.opencl.device import KernelEntry
from hetero.backends.opencl.elementwise import (
    prepare_act,
    prepare_add,
    prepare_gated_act,
    prepare_gated_add,
    prepare_gated_input,
    prepare_sigmoid_gate,
)
from hetero.backends.opencl.embed import prepare_embed
from hetero.backends.opencl.experts import accepts_experts, prepare_experts, prepare_router
from hetero.backends.opencl.matmul import accepts_matmul, prepare_matmul
from hetero.backends.opencl.norm import prepare_norm
from hetero.backends.opencl.outliers import prepare_outliers
from hetero.backends.opencl.pointwise import prepare_add_positions
from hetero.backends.opencl.rope import prepare_rope
from hetero.backends.opencl.states import prepare_gated_delta, prepare_short_conv
from hetero.backends.opencl.sum_scores import accepts_sum_scores, prepare_sum_scores
from hetero.backends.ops import Op

TABLE: dict[type[Op], KernelEntry] = {
    ops.MatMul: KernelEntry(prepare_matmul, accepts_matmul),
    ops.Embed: KernelEntry(prepare_embed),
    ops.RMSNorm: KernelEntry(prepare_norm),
    ops.LayerNorm: KernelEntry(prepare_norm),
    ops.Rope: KernelEntry(prepare_rope),
    ops.Attention: KernelEntry(prepare_attention),
    ops.AttentionHeads: KernelEntry(prepare_attention_heads),
    ops.SumScores: KernelEntry(prepare_sum_scores, accepts_sum_scores),
    ops.DecodeChunks: KernelEntry(prepare_decode_chunks, accepts_decode_chunks),
    ops.ShortConv: KernelEntry(prepare_short_conv),
    ops.GatedDelta: KernelEntry(prepare_gated_delta),
    ops.GatedAct: KernelEntry(prepare_gated_act),
    ops.SigmoidGate: KernelEntry(prepare_sigmoid_gate),
    ops.GatedInput: KernelEntry(prepare_gated_input),
    ops.Act: KernelEntry(prepare_act),
    ops.AddPositions: KernelEntry(prepare_add_positions),
    ops.Add: KernelEntry(prepare_add),
    ops.GatedAdd: KernelEntry(prepare_gated_add),
    ops.Outliers: KernelEntry(prepare_outliers),
    ops.Router: KernelEntry(prepare_router),
    ops.Experts: KernelEntry(prepare_experts, accepts_experts),
}
