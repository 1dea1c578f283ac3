// What sampled rows of attention give to each column (`SumScores` in ops.py), behind scores_cpu.cl:
// all scores of ROWS rows, then their softmax, added to the columns. A work-item has a key/value
// head, its queries and its row of `score_sums`. A cache has at most LONGEST tokens.

// Work-item (g, block of KT keys). `count` is m.
__kernel void pack_columns(const int count, ARRAY(const int, position),
                           ARRAY(const cache_t, k_cache), __global float *restrict packed,
                           const int capacity, const int window) {
  const int g = get_global_id(0), block = get_global_id(1);
  if (count == 0) return;
  AT(position); AT(k_cache);
  const int start = position[0], stop = start + count, key0 = block * KT;
  if (key0 >= stop || key0 + KT <= window_start(start + 1, window)) return;
  k_cache = HEAD_OF(k_cache, g, capacity);
  packed += (g * BLOCKS_OF(capacity) + block) * KT * HEAD_DIM;
  pack_block(k_cache, capacity, key0, min(KT, stop - key0), packed);
}

// Work-item (g). `count` is m.
__kernel void sum_scores(const int count, ARRAY(const float, qkv), ARRAY(const int, position),
                          ARRAY(float, score_sums), __global const float *restrict packed,
                          const int capacity, const int window) {
  const int g = get_global_id(0);
  if (count == 0) return;
  AT(qkv); AT(position); AT(score_sums);
  score_sums += (size_t)g * capacity;
  packed += g * BLOCKS_OF(capacity) * KT * HEAD_DIM;
  const int start = position[0], first = EVERY - 1 - start % EVERY;
  const int rows = first < count ? ((count - 1 - first) / EVERY + 1) * GROUP : 0;
  const int stride = (int)BLOCKS_OF(capacity) * KT;
  float q[HEAD_DIM * ROWS], s[ROWS * LONGEST], left[LONGEST];
  for (int row0 = 0; row0 < rows; row0 += ROWS) {
    const int used = min(ROWS, rows - row0);
    for (int r = 0; r < ROWS; r++) {
      const int row = row0 + min(r, used - 1);
      __global const float *from = qkv + (size_t)(first + row / GROUP * EVERY) * WIDTH +
                                   (g * GROUP + row % GROUP) * HEAD_DIM;
      for (int d = 0; d < HEAD_DIM; d++) q[d * ROWS + r] = from[d] * SCALE;
    }
    const int early = start + first + row0 / GROUP * EVERY + 1;
    const int late = start + first + (row0 + used - 1) / GROUP * EVERY + 1;
    const int low = window_start(early, window) / KT * KT;
    const int keys = (late - low + VEC - 1) / VEC * VEC;
    for (int i = 0; i < keys; i += KT) {
      scores(q, packed + (size_t)(low + i) * HEAD_DIM, s + i, stride);
    }
    for (int i = 0; i < keys; i += VEC) VSTORE((vfloat)(0.0f), left + i);
    for (int r = 0; r < used; r++) {
      float *p = s + r * stride;
      const int limit = start + first + (row0 + r) / GROUP * EVERY + 1;
#ifdef CAP
      for (int i = 0; i < keys; i += VEC) VSTORE(CAPPED(VLOAD(p + i)), p + i);
#endif
      mask(p, keys, window_start(limit, window) - low, limit - low);
      const float top = VMAX(highest(p, keys));
      const vfloat sum = weigh(p, keys, (vfloat)(top), (vfloat)(0.0f));
      const float share = 1.0f / (HEADS * VSUM(sum));
      for (int i = 0; i < keys; i += VEC) {
        VSTORE(share * VLOAD(p + i) + VLOAD(left + i), left + i);
      }
    }
    for (int i = 0; i < min(keys, late - low); i++) score_sums[low + i] += left[i];
  }
}
