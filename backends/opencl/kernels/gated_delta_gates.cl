// What the kernels of GatedDelta read of `gates`, whose last columns from GATES on are z, b and a.
#define GATE_AT(t, column) \
  PANEL_ROW(gates, panel_of(gates_table, gates_count, column), t)[column]
#define GATE_B(t, head) GATE_AT(t, GATES + V_HEADS * DV + (head))
#define GATE_A(t, head) GATE_AT(t, GATES + V_HEADS * DV + V_HEADS + (head))

// e^g = exp(decay · softplus(a)). By the library's exp: what exp2_scalar is off by near 0 would grow
// with the tokens of a state that is hardly forgotten.
INLINE float kept_of(const float a, const float decay) {
  const float positive = a > 0.0f ? a : 0.0f;
  return exp(decay * (positive + log1p(exp(a > 0.0f ? -a : a))));
}
