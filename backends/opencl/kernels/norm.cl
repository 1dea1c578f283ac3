// RMSNorm and LayerNorm over rows of D floats, with (ADD) or without a fused residual.
// One work-group of LANES work-items per row. `count` is m; with 0 the rows have no floats, because
// PoCL 3.0 miscompiles a return in front of a barrier.
//
// ADD: the row is x + residual, written to `sum` and read back from there (it is in cache).

#if ADD
#define INPUTS ARRAY(const float, x), PANELS(const float, residual), ARRAY(float, sum)
#else
#define INPUTS PANELS(const float, x)
#endif

// Four independent sums hide the latency of the additions where one work-item has a whole row.
#define STRIDE (LANES * VEC)

INLINE float squares(__global const float *row, const int n, const float mean) {
  vfloat a = 0, b = 0, c = 0, d = 0;
  int i = LANE * VEC;
  for (; i + 3 * STRIDE + VEC <= n; i += 4 * STRIDE) {
    const vfloat p = VLOAD(row + i) - mean, q = VLOAD(row + i + STRIDE) - mean;
    const vfloat r = VLOAD(row + i + 2 * STRIDE) - mean, s = VLOAD(row + i + 3 * STRIDE) - mean;
    a = p * p + a;
    b = q * q + b;
    c = r * r + c;
    d = s * s + d;
  }
  for (; i + VEC <= n; i += STRIDE) {
    const vfloat p = VLOAD(row + i) - mean;
    a = p * p + a;
  }
  float total = VSUM((a + b) + (c + d));
  EACH_REST(j, n) total += (row[j] - mean) * (row[j] - mean);
  return total;
}

INLINE float plain_sum(__global const float *row, const int n) {
  vfloat a = 0, b = 0, c = 0, d = 0;
  int i = LANE * VEC;
  for (; i + 3 * STRIDE + VEC <= n; i += 4 * STRIDE) {
    a += VLOAD(row + i);
    b += VLOAD(row + i + STRIDE);
    c += VLOAD(row + i + 2 * STRIDE);
    d += VLOAD(row + i + 3 * STRIDE);
  }
  for (; i + VEC <= n; i += STRIDE) a += VLOAD(row + i);
  float total = VSUM((a + b) + (c + d));
  EACH_REST(j, n) total += row[j];
  return total;
}

// The row that is normed, one panel at a time: `row` is where its column 0 would be.
#if ADD
#define EACH_PANEL(row, start, stop)                                              \
  for (__global const float *row = sum; row; row = 0)                             \
    for (int start = 0, stop = n; start < stop; start = stop)
#else
#define EACH_PANEL(row, start, stop)                                              \
  for (int p = 0, start, stop; p < (n ? x_count : 0); p++)                        \
    for (__global const float *row = (start = PANEL_START(x, p), stop = PANEL_STOP(x, p), \
                                      PANEL_ROW(x, p, token));                    \
         row; row = 0)
#endif

#if ADD
// sum = x + residual
#define ENTER                                                                     \
  const int n = count > 0 ? D : 0;                                                \
  const int token = get_group_id(0);                                              \
  const size_t at = (size_t)token * D;                                            \
  x += x_at + at;                                                                 \
  sum += sum_at + at;                                                             \
  y += y_at + at;                                                                 \
  for (int p = 0; p < (n ? residual_count : 0); p++) {                            \
    const int start = PANEL_START(residual, p), stop = PANEL_STOP(residual, p);   \
    __global const float *from = PANEL_ROW(residual, p, token);                   \
    EACH_VECTOR_OF(i, start, stop) VSTORE(VLOAD(x + i) + VLOAD(from + i), sum + i); \
    EACH_REST_OF(i, start, stop) sum[i] = x[i] + from[i];                         \
  }                                                                               \
  PANELS_DONE
#else
#define ENTER                                                                     \
  const int n = count > 0 ? D : 0;                                                \
  const int token = get_group_id(0);                                              \
  y += y_at + (size_t)token * D;
#endif
// Lanes read what others of them wrote where panels end between vectors.
#if LANES == 1
#define PANELS_DONE
#else
#define PANELS_DONE barrier(CLK_GLOBAL_MEM_FENCE);
#endif

__kernel void rms_norm(const int count, INPUTS, ARRAY(float, y),
                       __global const float *restrict weight) {
  LANES_SCRATCH(scratch);
  ENTER
  float mine = 0;
  EACH_PANEL(row, start, stop) mine += squares(row + start, stop - start, 0.0f);
  const float total = lanes_sum(mine, scratch);
  const float factor = 1.0f / sqrt(total * (1.0f / D) + EPS);
  EACH_PANEL(row, start, stop) {
    EACH_VECTOR_OF(i, start, stop) VSTORE(factor * VLOAD(row + i) * VLOAD(weight + i), y + i);
    EACH_REST_OF(i, start, stop) y[i] = factor * row[i] * weight[i];
  }
}

__kernel void layer_norm(const int count, INPUTS, ARRAY(float, y),
                         __global const float *restrict weight,
                         __global const float *restrict bias) {
  LANES_SCRATCH(scratch);
  ENTER
  float mine = 0;
  EACH_PANEL(row, start, stop) mine += plain_sum(row + start, stop - start);
  const float mean = lanes_sum(mine, scratch) * (1.0f / D);
  mine = 0;
  EACH_PANEL(row, start, stop) mine += squares(row + start, stop - start, mean);
  const float total = lanes_sum(mine, scratch);
  const float factor = 1.0f / sqrt(total * (1.0f / D) + EPS);
  EACH_PANEL(row, start, stop) {
    EACH_VECTOR_OF(i, start, stop) {
      VSTORE(factor * (VLOAD(row + i) - mean) * VLOAD(weight + i) + VLOAD(bias + i), y + i);
    }
    EACH_REST_OF(i, start, stop) y[i] = factor * (row[i] - mean) * weight[i] + bias[i];
  }
}
