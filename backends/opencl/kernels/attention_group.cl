// Attention for devices with work-groups (LANES > 1). A work-group takes ROWS (token, query head)
// rows of one key/value head and one of `splits` pieces of their context: a lane is one key while
// scores are made and one dimension while values are summed, with the online softmax of
// attention_cpu.cl in between. With more than one split, `combine` merges the partial results, so
// that decode with few heads still fills the device ("flash decoding").
//
// HEADS, KV_HEADS, HEAD_DIM, SCALE (with log2(e)) come from the record; HV divides HEAD_DIM. Caches'
// `capacity` and the `window` (0: none) are arguments. `partial` holds per split and output row
// HEAD_DIM sums, the maximum and the weight.

#define GROUP (HEADS / KV_HEADS)
#ifdef READS  // queries alone: the caches are another layer's
#define WIDTH (HEADS * HEAD_DIM)
#else
#define WIDTH ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
#endif
#define LOWEST -1e30f
#define DIMS ((HEAD_DIM + LANES - 1) / LANES)
#define RECORD (HEAD_DIM + 2)

// With SINKS the softmax of a row begins with a score of its head that has no value, `sinks` [HEADS],
// in base 2.
#ifdef SINKS
#define SINKS_ARGUMENT , __global const float *restrict sinks
#else
#define SINKS_ARGUMENT
#endif

inline int window_start(int last, int window) {
  return window > 0 && last > window ? last - window : 0;
}

// `count` is m · heads · HEAD_DIM: one float of k and of v per work-item; with codes m · heads, a row
// of each. Of `heads` key/value heads, the first of them `first`.
__kernel void append(const int count, ARRAY(const float, qkv), ARRAY(const int, position),
                     ARRAY(cache_t, k_cache), ARRAY(cache_t, v_cache), const int first,
                     const int heads, const int capacity) {
  const int i = get_global_id(0);
  if (i >= count) return;
  AT(qkv); AT(position); AT(k_cache); AT(v_cache);
#ifdef CACHE_CODES
  const int token = i / heads, g = first + i % heads, d = 0;
#else
  const int token = i / (heads * HEAD_DIM), g = first + i / HEAD_DIM % heads, d = i % HEAD_DIM;
#endif
  __global cache_t *k_head = HEAD_OF(k_cache, g, capacity);
  __global cache_t *v_head = HEAD_OF(v_cache, g, capacity);
  const size_t to = (size_t)(position[0] + token) * ROW + d;
  qkv += (size_t)token * WIDTH + (HEADS + g) * HEAD_DIM + d;
#ifdef CACHE_CODES
  code_row(qkv, k_head + to, true, CHANNELS_OF(k_head, capacity));
  code_row(qkv + KV_HEADS * HEAD_DIM, v_head + to, false, 0);
#else
  CSTORE1(qkv[0], k_head + to);
  CSTORE1(qkv[KV_HEADS * HEAD_DIM], v_head + to);
#endif
}

// Work-group (block of rows, g, split). `count` is m; with 0 there are no rows (no early return:
// PoCL 3.0 miscompiles one in front of a barrier).
__kernel void attend_group(const int count, ARRAY(const float, qkv), ARRAY(const int, position),
                           ARRAY(const cache_t, k_cache), ARRAY(const cache_t, v_cache),
                           ARRAY(float, out), __global float *restrict partial,
                           const int splits, const int first, const int capacity,
                           const int window SINKS_ARGUMENT) {
  __local float q[ROWS * HEAD_DIM], p[ROWS * LANES], red[ROWS * LANES];
  AT(qkv); AT(position); AT(k_cache); AT(v_cache); AT(out);
  const int g = first + get_group_id(1), row0 = get_group_id(0) * ROWS, split = get_group_id(2);
  const int rows = clamp(count * GROUP - row0, 0, ROWS);
  const int start = position[0];
  k_cache = HEAD_OF(k_cache, g, capacity);
  v_cache = HEAD_OF(v_cache, g, capacity);
  for (int i = LANE; i < (rows > 0 ? ROWS * HEAD_DIM : 0); i += LANES) {
    const int row = row0 + min(i / HEAD_DIM, rows - 1);
    q[i] = SCALE * qkv[(size_t)(row / GROUP) * WIDTH + (g * GROUP + row % GROUP) * HEAD_DIM +
                       i % HEAD_DIM];
#ifdef CACHE_CODES
    q[i] *= CHANNELS_OF(k_cache, capacity)[i % HEAD_DIM];
#endif
  }
  float acc[ROWS][DIMS], top[ROWS], sum[ROWS];
  for (int r = 0; r < ROWS; r++) {
    top[r] = LOWEST;
    sum[r] = 0;
#ifdef SINKS
    if (split == 0 && rows > 0) {
      top[r] = sinks[g * GROUP + (row0 + min(r, rows - 1)) % GROUP];
      sum[r] = LANE == 0;
    }
#endif
    for (int c = 0; c < DIMS; c++) acc[r][c] = 0;
  }

  const int begin = window_start(start + row0 / GROUP + 1, window);
  const int end = start + (row0 + rows - 1) / GROUP + 1;
  const int span = ((end - begin + splits - 1) / splits + LANES - 1) / LANES * LANES;
  const int low = begin + split * span, high = rows > 0 ? min(end, low + span) : low;
  for (int key0 = low; key0 < high; key0 += LANES) {
    const int key = key0 + LANE;
    barrier(CLK_LOCAL_MEM_FENCE);
    float s[ROWS];
    for (int r = 0; r < ROWS; r++) s[r] = 0;
    if (key < high) {
      __global const cache_t *k = k_cache + (size_t)key * ROW;
      for (int d = 0; d < HEAD_DIM; d += HV) {
        for (int r = 0; r < ROWS; r++) s[r] += dot(CLOAD(k + d), HLOAD(q + r * HEAD_DIM + d));
      }
#ifdef CACHE_CODES
      for (int r = 0; r < ROWS; r++) s[r] *= STEP_OF(k);
#endif
    }
    for (int r = 0; r < ROWS; r++) {
      const int limit = start + (row0 + min(r, rows - 1)) / GROUP + 1;
#ifdef CAP
      s[r] = activate_scalar(s[r]);
#endif
      if (key >= high || key >= limit || key < window_start(limit, window)) s[r] = -INFINITY;
      red[r * LANES + LANE] = s[r];
    }
    for (int n = LANES / 2; n > 0; n /= 2) {
      barrier(CLK_LOCAL_MEM_FENCE);
      if (LANE < n) {
        for (int r = 0; r < ROWS; r++) {
          red[r * LANES + LANE] = larger(red[r * LANES + LANE], red[r * LANES + LANE + n]);
        }
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int r = 0; r < ROWS; r++) {
      const float now = larger(top[r], red[r * LANES]);
      const float alpha = exp2_scalar(top[r] - now);
      const float weight = exp2_scalar(s[r] - now);
      p[r * LANES + LANE] = weight;
      sum[r] = sum[r] * alpha + weight;
      top[r] = now;
      for (int c = 0; c < DIMS; c++) acc[r][c] *= alpha;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const int keys = min(LANES, high - key0);
    for (int c = 0; c < DIMS; c++) {
      const int d = c * LANES + LANE;
      if (d < HEAD_DIM) {
        for (int i = 0; i < keys; i++) {
          __global const cache_t *row = v_cache + (size_t)(key0 + i) * ROW;
#ifdef CACHE_CODES
          const float v = CLOAD1(row + d) * STEP_OF(row);
#else
          const float v = CLOAD1(row + d);
#endif
          for (int r = 0; r < ROWS; r++) acc[r][c] += p[r * LANES + i] * v;
        }
      }
    }
  }

  barrier(CLK_LOCAL_MEM_FENCE);
  for (int r = 0; r < ROWS; r++) red[r * LANES + LANE] = sum[r];
  for (int n = LANES / 2; n > 0; n /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (LANE < n) {
      for (int r = 0; r < ROWS; r++) red[r * LANES + LANE] += red[r * LANES + LANE + n];
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int r = 0; r < rows; r++) {
    const int row = row0 + r;
    const size_t at = (size_t)(row / GROUP) * HEADS + g * GROUP + row % GROUP;
    __global float *to = partial + ((size_t)split * count * HEADS + at) * RECORD;
    const float total = red[r * LANES];
    const float factor = splits == 1 ? 1.0f / total : 1.0f;
    if (splits == 1) to = out + at * HEAD_DIM;
    for (int c = 0; c < DIMS; c++) {
      const int d = c * LANES + LANE;
      if (d < HEAD_DIM) to[d] = factor * acc[r][c];
    }
    if (splits > 1 && LANE == 0) {
      to[HEAD_DIM] = top[r];
      to[HEAD_DIM + 1] = total;
    }
  }
}

// Merges the splits of one output float per work-item. `count` is m · HEADS · HEAD_DIM.
__kernel void combine(const int count, __global const float *restrict partial, ARRAY(float, out),
                      const int splits) {
  const int i = get_global_id(0);
  if (i >= count) return;
  const int row = i / HEAD_DIM, d = i % HEAD_DIM;
  const size_t stride = (size_t)(count / HEAD_DIM) * RECORD;
  partial += (size_t)row * RECORD;
  float top = LOWEST, total = 0, value = 0;
  for (int s = 0; s < splits; s++) top = larger(top, partial[s * stride + HEAD_DIM]);
  for (int s = 0; s < splits; s++) {
    const float factor = exp2_scalar(partial[s * stride + HEAD_DIM] - top);
    total += factor * partial[s * stride + HEAD_DIM + 1];
    value += factor * partial[s * stride + d];
  }
  AT(out);
  out[i] = value / total;
}
