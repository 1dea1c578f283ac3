// RMSNorm and LayerNorm over rows of D floats, with (ADD) or without a fused residual.
// One work-group of LANES work-items per row. `count` is m; with 0 the rows have no floats, because
// PoCL 3.0 miscompiles a return in front of a barrier.
//
// ADD: the row is x + residual, written to `sum` and read back from there (it is in cache).

#if ADD
#define INPUTS ARRAY(const float, x), ARRAY(const float, residual), ARRAY(float, sum)
#define ROW sum
#else
#define INPUTS ARRAY(const float, x)
#define ROW x
#endif

// Four independent sums hide the latency of the additions where one work-item has a whole row.
#define STRIDE (LANES * VEC)

inline float squares(__global const float *row, const int n, const float mean) {
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

inline float plain_sum(__global const float *row, const int n) {
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

#if ADD
inline void add_rows(__global const float *x, __global const float *residual,
                     __global float *sum, const int n) {
  EACH_VECTOR(i, n) VSTORE(VLOAD(x + i) + VLOAD(residual + i), sum + i);
  EACH_REST(i, n) sum[i] = x[i] + residual[i];
}
#define ENTER                                           \
  const int n = count > 0 ? D : 0;                      \
  const size_t at = (size_t)get_group_id(0) * D;        \
  x += x_at + at;                                       \
  residual += residual_at + at;                         \
  sum += sum_at + at;                                   \
  y += y_at + at;                                       \
  add_rows(x, residual, sum, n);
#else
#define ENTER                                           \
  const int n = count > 0 ? D : 0;                      \
  const size_t at = (size_t)get_group_id(0) * D;        \
  x += x_at + at;                                       \
  y += y_at + at;
#endif

__kernel void rms_norm(const int count, INPUTS, ARRAY(float, y),
                       __global const float *restrict weight) {
  LANES_SCRATCH(scratch);
  ENTER
  const float total = lanes_sum(squares(ROW, n, 0.0f), scratch);
  const float factor = 1.0f / sqrt(total * (1.0f / D) + EPS);
  EACH_VECTOR(i, n) VSTORE(factor * VLOAD(ROW + i) * VLOAD(weight + i), y + i);
  EACH_REST(i, n) y[i] = factor * ROW[i] * weight[i];
}

__kernel void layer_norm(const int count, INPUTS, ARRAY(float, y),
                         __global const float *restrict weight,
                         __global const float *restrict bias) {
  LANES_SCRATCH(scratch);
  ENTER
  const float mean = lanes_sum(plain_sum(ROW, n), scratch) * (1.0f / D);
  const float total = lanes_sum(squares(ROW, n, mean), scratch);
  const float factor = 1.0f / sqrt(total * (1.0f / D) + EPS);
  EACH_VECTOR(i, n) {
    VSTORE(factor * (VLOAD(ROW + i) - mean) * VLOAD(weight + i) + VLOAD(bias + i), y + i);
  }
  EACH_REST(i, n) y[i] = factor * (ROW[i] - mean) * weight[i] + bias[i];
}
