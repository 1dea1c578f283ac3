// What sampled rows of attention give to each column (`SumScores` in ops.py), for devices with
// work-groups (LANES > 1): a group has a key/value head, its queries and its row of `score_sums`, a lane
// every LANES-th column. `weights` has a row of `capacity` floats for each group; `window` 0 is none.
//
// HEADS, KV_HEADS, HEAD_DIM, SCALE (with log2(e)), EVERY come from the record.

#define GROUP (HEADS / KV_HEADS)
#define WIDTH ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
#ifdef CAP
#define CAPPED1(x) activate_scalar(x)
#else
#define CAPPED1(x) (x)
#endif
INLINE float lanes_max(float x, __local float *scratch) {
  barrier(CLK_LOCAL_MEM_FENCE);
  scratch[LANE] = x;
  for (int half_lanes = LANES / 2; half_lanes > 0; half_lanes /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (LANE < half_lanes) scratch[LANE] = larger(scratch[LANE], scratch[LANE + half_lanes]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  return scratch[0];
}

// Work-group (g). `count` is m; with 0 there are no rows (no early return: PoCL 3.0 miscompiles one
// in front of a barrier).
__kernel void sum_scores(const int count, ARRAY(const float, qkv), ARRAY(const int, position),
                          ARRAY(const cache_t, k_cache), ARRAY(float, score_sums),
                          __global float *restrict weights, const int capacity,
                          const int window) {
  __local float scratch[LANES];
  AT(qkv); AT(position); AT(k_cache); AT(score_sums);
  const int g = get_group_id(0);
  const int start = position[0], first = EVERY - 1 - start % EVERY;
  const int rows = first < count ? ((count - 1 - first) / EVERY + 1) * GROUP : 0;
  weights += (size_t)g * capacity;
  score_sums += (size_t)g * capacity;
  k_cache = HEAD_OF(k_cache, g, capacity);
#ifdef CACHE_CODES
  __global const float *channels = CHANNELS_OF(k_cache, capacity);
#endif
  for (int row = 0; row < rows; row++) {
    const int t = first + row / GROUP * EVERY, stop = start + t + 1;
    const int low = window > 0 && stop > window ? stop - window : 0;
    __global const float *q = qkv + (size_t)t * WIDTH + (g * GROUP + row % GROUP) * HEAD_DIM;
    float top = -1e30f, sum = 0;
    for (int key = low + LANE; key < stop; key += LANES) {
      float x = 0;
      __global const cache_t *k = k_cache + (size_t)key * ROW;
#ifdef CACHE_CODES
      for (int d = 0; d < HEAD_DIM; d++) x += q[d] * channels[d] * CLOAD1(k + d);
      x *= STEP_OF(k);
#else
      for (int d = 0; d < HEAD_DIM; d++) x += q[d] * CLOAD1(k + d);
#endif
      weights[key] = CAPPED1(x * SCALE);
      top = larger(top, weights[key]);
    }
    top = lanes_max(top, scratch);
    for (int key = low + LANE; key < stop; key += LANES) {
      weights[key] = exp2_scalar(weights[key] - top);
      sum += weights[key];
    }
    sum = lanes_sum(sum, scratch);
    for (int key = low + LANE; key < stop; key += LANES) score_sums[key] += weights[key] / (HEADS * sum);
  }
}
