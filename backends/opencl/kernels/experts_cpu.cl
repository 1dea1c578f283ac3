// Products of experts' rows on a CPU's vector unit, behind matmul_cpu.cl (whose defines apply).
//
// Of weights of n rows an expert, y[row, n] for the sorted rows of each expert (experts.cl), `stride`
// apart. Row tiles [group * per_group, ...) of `count`, for one expert after the other: its rows of x
// are in cache for the next tile.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void expert_rows(
    const int count, ARRAY(const weight_t, weights), ARRAY(const scale_t, all_scales),
    ARRAY(const float, bias), ARRAY(const x_t, inputs), ARRAY(float, y), ARRAY(const int, starts),
    const int experts, const int n, const int stride, const int k, const int k_panel,
    const int per_group, const int has_bias) {
  AT(weights);
  AT(all_scales);
  AT(bias);
  AT(inputs);
  AT(y);
  AT(starts);
  const int first = get_global_id(0) * per_group, last = min(first + per_group, count);
  if (first >= last) return;
  for (int e = 0; e < experts; e++) {
    const int start = starts[e], stop = starts[e + 1];
    if (start == stop) continue;
    for (int k0 = 0; k0 < k; k0 += k_panel)
      for (int tile = first; tile < last; tile++)
        row_tile(weights, all_scales, bias + (size_t)e * n, inputs, y, tile, e * n, n, stride, k,
                 stop, start, stop, k0, k_panel, has_bias);
  }
}

#if PLANES
// x [m, width] into tiles of sorted rows, as `gather` and `pack` make them; `source` is the token of
// each row (experts.cl).
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack_routed(
    const int count, ARRAY(const float, x), ARRAY(const int, starts), ARRAY(const int, source),
    __global x_t *packed, const int experts, const int width, const int k) {
  AT(x);
  AT(starts);
  AT(source);
  const int tile = get_global_id(0);
  if (tile >= count || tile * TOKENS >= starts[experts]) return;
  packed += tile * X_STRIDE(k);
  for (int t = 0; t < TOKENS; t++) {
    const int token = source[tile * TOKENS + t];
    __global const float *row = x + (size_t)max(token, 0) * width;
    for (int g = 0; g < k / GROUP; g++)
      quantize_group(row + g * GROUP, (token < 0 ? 0 : width) - g * GROUP,
                     packed + g * X_WORDS * TOKENS + t);
  }
}
#endif
