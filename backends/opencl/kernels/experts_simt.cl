// Products of experts' rows on GPUs, behind matmul_simt.cl (whose defines apply).
//
// Local size (16, SPLITS); group (tile of TOKENS sorted rows, block of rows of an expert). y[row, n],
// `stride` apart; `starts` and `experts` (of tiles) are those of experts.cl, `count` tiles at most.
__kernel __attribute__((reqd_work_group_size(ROWS, SPLITS, 1))) void expert_rows(
    const int count, ARRAY(const weight_t, weights), ARRAY(const scale_t, scales),
    ARRAY(const float, bias), ARRAY(const float, x), ARRAY(float, y), ARRAY(const int, starts),
    ARRAY(const int, experts), const int all, const int n, const int stride, const int k,
    const int has_bias) {
  __local float sums[SPLITS][TOKENS][ROWS];
  AT(weights);
  AT(scales);
  AT(bias);
  AT(x);
  AT(y);
  AT(starts);
  AT(experts);
  const int tile = get_group_id(0), lane = get_local_id(0), split = get_local_id(1);
  if (tile >= count || tile * TOKENS >= starts[all]) return;
  const int row = get_group_id(1) * ROWS + lane, e = experts[tile];
  const int block = (e * n + row) / ROWS;
  float sum[TOKENS];
  split_sums(sum, weights, scales, x + (size_t)tile * TOKENS * k, block, lane, split, TOKENS, k);
  EACH_TOKEN sums[split][t][lane] = sum[t];
  barrier(CLK_LOCAL_MEM_FENCE);
  EACH_TOKEN if (t % SPLITS == split) {
    float total = has_bias ? bias[(size_t)e * n + row] : 0.0f;
    for (int s = 0; s < SPLITS; s++) total += sums[s][t][lane];
    y[(size_t)(tile * TOKENS + t) * stride + row] = total;
  }
}
