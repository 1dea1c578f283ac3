// What the kernels of GatedDelta read of `gates`, whose last columns from gates_at on are z, b and a.
#define GATE_AT(t, column) \
  PANEL_ROW(gates, panel_of(gates_table, gates_count, column), t)[column]
#define GATE_B(t, head) GATE_AT(t, gates_at + v_heads * DV + (head))
#define GATE_A(t, head) GATE_AT(t, gates_at + v_heads * DV + v_heads + (head))

// What is left of a state is nothing below 1e-30: subnormal products take processors 100 cycles each.
#define FORGET(kept) ((kept) < 1e-30f ? 0.0f : (kept))

// e^g = exp(decay · softplus(a)). By the library's exp: what exp2_scalar is off by near 0 would grow
// with the tokens of a state that is hardly forgotten.
INLINE float kept_of(const float a, const float decay) {
  const float positive = a > 0.0f ? a : 0.0f;
  return FORGET(exp(decay * (positive + log1p(exp(a > 0.0f ? -a : a)))));
}
