// Add, GatedAct, SigmoidGate, GatedInput and Act. Work-item (chunk of columns, token): a whole row on a CPU, a vector on a GPU.
// `count` is m, `width` columns of y. Widths are arguments: one program serves every model.

// Calls BODY(i, stop) for runs of columns [i, stop) in which no panel of a or b ends; column i of a
// goes with column i + SHIFT of b.
#define EACH_RUN(a, b, SHIFT, start, end, BODY)                                          \
  for (int i = start, stop; i < end; i = stop) {                                         \
    const int in_a = panel_of(a##_table, a##_count, i);                                  \
    const int in_b = panel_of(b##_table, b##_count, i + SHIFT);                          \
    stop = min(end, min(PANEL_STOP(a, in_a), PANEL_STOP(b, in_b) - SHIFT));              \
    __global const float *from_a = PANEL_ROW(a, in_a, token);                            \
    __global const float *from_b = PANEL_ROW(b, in_b, token) + SHIFT;                    \
    BODY                                                                                 \
  }

#ifndef ACTIVATION
// y = x + residual
#define ADD_RUN                                                                          \
  int j = i;                                                                             \
  for (; j + VEC <= stop; j += VEC) VSTORE(VLOAD(from_a + j) + VLOAD(from_b + j), y + j); \
  for (; j < stop; j++) y[j] = from_a[j] + from_b[j];

__kernel void add(const int count, PANELS(const float, x), PANELS(const float, residual),
                  ARRAY(float, y), const int width, const int chunk) {
  const int token = get_global_id(1);
  if (token >= count) return;
  y += y_at + (size_t)token * width;
  const int start = (int)get_global_id(0) * chunk;
  const int end = min(width, start + chunk);
  EACH_RUN(x, residual, 0, start, end, ADD_RUN)
}

#define ADD_SCALED_RUN                                                                   \
  int j = i;                                                                             \
  for (; j + VEC <= stop; j += VEC)                                                      \
    VSTORE((VLOAD(from_a + j) + VLOAD(from_b + j)) * factor, y + j);                     \
  for (; j < stop; j++) y[j] = (from_a[j] + from_b[j]) * factor;

// y = (x + residual) · scale[0]
__kernel void add_scaled(const int count, PANELS(const float, x), PANELS(const float, residual),
                         ARRAY(float, y), const int width, const int chunk,
                         __global const float *restrict scale) {
  const int token = get_global_id(1);
  if (token >= count) return;
  y += y_at + (size_t)token * width;
  const float factor = scale[0];
  const int start = (int)get_global_id(0) * chunk;
  const int end = min(width, start + chunk);
  EACH_RUN(x, residual, 0, start, end, ADD_SCALED_RUN)
}
#else
#define GATED_RUN                                                                        \
  int j = i;                                                                             \
  for (; j + VEC <= stop; j += VEC)                                                      \
    VSTORE(activate(VLOAD(from_a + j)) * VLOAD(from_b + j), y + j);                      \
  for (; j < stop; j++) y[j] = activate_scalar(from_a[j]) * from_b[j];

// y = act(x[:width]) · x[width:]
__kernel void gated_act(const int count, PANELS(const float, x), ARRAY(float, y),
                        const int width, const int chunk) {
  const int token = get_global_id(1);
  if (token >= count) return;
  y += y_at + (size_t)token * width;
  const int start = (int)get_global_id(0) * chunk;
  const int end = min(width, start + chunk);
  EACH_RUN(x, x, width, start, end, GATED_RUN)
}

#define GATE_RUN                                                                         \
  int j = i;                                                                             \
  for (; j + VEC <= stop; j += VEC)                                                      \
    VSTORE(VLOAD(from_a + j) * activate(VLOAD(from_b + j)), y + j);                      \
  for (; j < stop; j++) y[j] = from_a[j] * activate_scalar(from_b[j]);

// y = x · act(gates[first : first + width])
__kernel void gate(const int count, PANELS(const float, x), PANELS(const float, gates),
                   ARRAY(float, y), const int width, const int first, const int chunk) {
  const int token = get_global_id(1);
  if (token >= count) return;
  y += y_at + (size_t)token * width;
  const int start = (int)get_global_id(0) * chunk;
  const int end = min(width, start + chunk);
  EACH_RUN(x, gates, first, start, end, GATE_RUN)
}

#define INPUT_RUN                                                                        \
  int j = i;                                                                             \
  for (; j + VEC <= stop; j += VEC)                                                      \
    VSTORE(activate(VLOAD(from_a + j)) * (VLOAD(from_b + j) + VLOAD(inputs + j)), y + j); \
  for (; j < stop; j++) y[j] = activate_scalar(from_a[j]) * (from_b[j] + inputs[j]);

// y = act(x) · (residual + inputs[first : first + width])
__kernel void gated_input(const int count, PANELS(const float, x), PANELS(const float, residual),
                          ARRAY(const float, inputs), ARRAY(float, y), const int width,
                          const int first, const int stride, const int chunk) {
  const int token = get_global_id(1);
  if (token >= count) return;
  inputs += inputs_at + (size_t)token * stride + first;
  y += y_at + (size_t)token * width;
  const int start = (int)get_global_id(0) * chunk;
  const int end = min(width, start + chunk);
  EACH_RUN(x, residual, 0, start, end, INPUT_RUN)
}

#define ACT_RUN                                                                          \
  int j = i;                                                                             \
  for (; j + VEC <= stop; j += VEC) VSTORE(activate(VLOAD(from_a + j)), y + j);          \
  for (; j < stop; j++) y[j] = activate_scalar(from_a[j]);

// y = act(x)
__kernel void act(const int count, PANELS(const float, x), ARRAY(float, y), const int width,
                  const int chunk) {
  const int token = get_global_id(1);
  if (token >= count) return;
  y += y_at + (size_t)token * width;
  const int start = (int)get_global_id(0) * chunk;
  const int end = min(width, start + chunk);
  EACH_RUN(x, x, 0, start, end, ACT_RUN)
}
#endif
