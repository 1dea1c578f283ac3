// Outliers: y = residual + x[:, hot] · Wᵀ + excess(x) · Cᵀ (hetero.backends.ops.Outliers).
// N, K, HOT: sizes; HOT may be 0. EXCESS: whether codes C of 8 bits are given, one scale a row.
// `count` is m. Packed layouts as in `hetero.backends.weights`.
//
// The excess of a token is listed by one group before it is multiplied: in `listed`, 1 + 2·K ints for
// each token, their number, then column and value of each, in the order of columns.

#define BLOCKS ((N + 15) / 16)
#define GROUPS ((K + 31) / 32)
#define LIST (1 + 2 * K)

#if EXCESS
// 0 for hot columns, whose codes are zero.
INLINE float excess_of(const float x, const float scale, const int column,
                       __global const int *restrict hot) {
  for (int i = 0; i < HOT; i++)
    if (hot[i] == column) return 0;
  const float code = rint(x / scale);
  return (code - clamp(code, -128.0f, 127.0f)) * scale;
}

// One group of LANES items a token, each for a run of columns.
__kernel void list_excess(const int count, ARRAY(const float, x), __global int *restrict listed,
                          __global const float *restrict x_scale,
                          __global const int *restrict hot) {
  const int token = get_global_id(1);
  if (token >= count) return;
  x += x_at + (size_t)token * K;
  listed += (size_t)token * LIST;
  const float scale = x_scale[0], most = 127.5f * scale;
  const int lane = get_local_id(0), run = (K + LANES - 1) / LANES;
  const int start = lane * run, stop = min(K, start + run);
  int own = 0;
  for (int i = start; i < stop; i++) own += !(fabs(x[i]) < most) && excess_of(x[i], scale, i, hot) != 0;
#if LANES > 1
  __local int found[LANES];
  found[lane] = own;
  barrier(CLK_LOCAL_MEM_FENCE);
  int at = 0;
  for (int i = 0; i < lane; i++) at += found[i];
#else
  int at = 0;
#endif
  if (lane == LANES - 1) listed[0] = at + own;
  for (int i = start; i < stop && own; i++) {
    const float excess = fabs(x[i]) < most ? 0.0f : excess_of(x[i], scale, i, hot);
    if (excess == 0) continue;
    listed[1 + 2 * at] = i;
    listed[2 + 2 * at] = as_int(excess);
    at++;
    own--;
  }
}

// The code of a row in a block, in a column.
INLINE float code_of(__global const char *data, const int block, const int lane, const int column) {
  const size_t word = ((size_t)block * GROUPS + column / 32) * 8 + column % 32 / 4;
  return data[(word * 16 + lane) * 4 + column % 4];
}
#endif

#define OPERANDS                                                                          \
  ARRAY(const float, x), PANELS(const float, residual), ARRAY(float, y),                  \
      __global const int *restrict hot, __global const half *restrict weight,             \
      __global const int *restrict listed, __global const char *restrict data,            \
      __global const float *restrict scales

#if LANES == 1
// A processor: an item takes TOKENS tokens and all rows, 16 at a time.
__kernel void add_outliers(const int count, OPERANDS) {
  const int first = (int)get_global_id(1) * TOKENS;
  if (first >= count) return;
  const int tokens = min(TOKENS, count - first);
  x += x_at + (size_t)first * K;
  y += y_at + (size_t)first * N;
  for (int block = 0; block < BLOCKS; block++) {
    float16 sum[TOKENS];
    for (int t = 0; t < TOKENS; t++) sum[t] = 0;
    for (int i = 0; i < HOT; i++) {
      const float16 w = vload_half16((size_t)block * HOT + i, weight);
      for (int t = 0; t < TOKENS; t++) sum[t] += w * x[(size_t)min(t, tokens - 1) * K + hot[i]];
    }
    const int rows = min(16, N - block * 16);
    const int panel = panel_of(residual_table, residual_count, block * 16);
    for (int t = 0; t < tokens; t++) {
      float row[16];
      vstore16(sum[t], 0, row);
#if EXCESS
      __global const int *own = listed + (size_t)(first + t) * LIST;
      for (int i = 0; i < own[0]; i++) {
        const float excess = as_float(own[2 + 2 * i]);
        for (int lane = 0; lane < rows; lane++)
          row[lane] += excess * scales[block * 16 + lane] * code_of(data, block, lane, own[1 + 2 * i]);
      }
#endif
      // Panels begin at multiples of 16.
      __global const float *from = PANEL_ROW(residual, panel, first + t) + block * 16;
      __global float *to = y + (size_t)t * N + block * 16;
      for (int lane = 0; lane < rows; lane++) to[lane] = from[lane] + row[lane];
    }
  }
}
#else
// A GPU: an item takes a row of one token.
__kernel void add_outliers(const int count, OPERANDS) {
  const int row = get_global_id(0), token = get_global_id(1);
  if (token >= count || row >= N) return;
  x += x_at + (size_t)token * K;
  const int block = row / 16, lane = row % 16;
  float sum = 0;
  for (int i = 0; i < HOT; i++)
    sum += x[hot[i]] * vload_half(((size_t)block * HOT + i) * 16 + lane, weight);
#if EXCESS
  listed += (size_t)token * LIST;
  for (int i = 0; i < listed[0]; i++)
    sum += as_float(listed[2 + 2 * i]) * scales[row] * code_of(data, block, lane, listed[1 + 2 * i]);
#endif
  const int panel = panel_of(residual_table, residual_count, row);
  y[y_at + (size_t)token * N + row] = PANEL_ROW(residual, panel, token)[row] + sum;
}
#endif
