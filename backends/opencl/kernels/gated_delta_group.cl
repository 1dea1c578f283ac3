// GatedDelta on a GPU. Work-group: COLUMNS columns of the state of a value head, which stay in
// registers while all tokens pass: a lane has ROWS rows of one column. `count` is m.
//
// Keys and queries of TOKENS tokens are in local memory. With kᵣ and qᵣ as they come,
// k = kᵣ / |kᵣ|, q = qᵣ / (|qᵣ| sqrt(DK)), and S before the token:
//   u = β (v - e^g Sᵀk);  o = (e^g S + k uᵀ)ᵀ q = e^g Sᵀq + (k·q) u
#define COLUMNS (LANES / PARTS)
#define PADDED (PARTS * ROWS)
#define SHARE 8 // lanes that multiply one token's keys and queries
#define TOKENS (LANES / SHARE)
#define KEYS (k_heads * DK)
#define WIDTH (2 * KEYS + v_heads * DV)

__kernel void gated_delta(const int count, ARRAY(const float, x), PANELS(const float, gates),
                          ARRAY(const int, position), ARRAY(float, state), ARRAY(float, y),
                          __global const float *restrict decay,
                          __global const float *restrict dt_bias, const int k_heads,
                          const int v_heads, const int gates_at, const float by_dim) {
  __local float keys[TOKENS * PADDED], queries[TOKENS * PADDED], products[3 * LANES];
  __local float kept[TOKENS], beta[TOKENS], by_key[TOKENS], by_query[TOKENS], both[TOKENS];
#if PARTS > 1 // PoCL 6 fails on local memory that nothing uses
  __local float sums[2 * 2 * LANES];
#endif
  if (count == 0) return;
  AT(x);
  AT(state);
  AT(y);
  const int head = get_group_id(1);
  const int column = (int)get_group_id(0) * COLUMNS + LANE % COLUMNS, own = column < DV;
  const int row = LANE / COLUMNS * ROWS;
  __global const float *q = x + head % k_heads * DK;
  __global const float *v = x + 2 * KEYS + head * DV + column;
  state += (size_t)head * DK * DV + column;
  y += head * DV + column;
  const int known = own && position[position_at] > 0;
  float s[ROWS];
  for (int i = 0; i < ROWS; i++) s[i] = known && row + i < DK ? state[(row + i) * DV] : 0.0f;
  for (int start = 0; start < count; start += TOKENS) {
    const int tokens = min(TOKENS, count - start);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int at = LANE; at < TOKENS * PADDED; at += LANES) {
      const int t = at / PADDED, i = at % PADDED;
      __global const float *from = q + (size_t)(start + t) * WIDTH + i;
      const int there = t < tokens && i < DK;
      queries[at] = there ? from[0] : 0.0f;
      keys[at] = there ? from[KEYS] : 0.0f;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float kk = 0.0f, qq = 0.0f, kq = 0.0f;
    for (int i = LANE % SHARE; i < PADDED; i += SHARE) {
      const float key = keys[LANE / SHARE * PADDED + i], query = queries[LANE / SHARE * PADDED + i];
      kk += key * key;
      qq += query * query;
      kq += key * query;
    }
    products[LANE] = kk;
    products[LANES + LANE] = qq;
    products[2 * LANES + LANE] = kq;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (LANE < tokens) {
      kk = qq = kq = 0.0f;
      for (int i = LANE * SHARE; i < (LANE + 1) * SHARE; i++) {
        kk += products[i];
        qq += products[LANES + i];
        kq += products[2 * LANES + i];
      }
      kept[LANE] = kept_of(GATE_A(start + LANE, head) + dt_bias[head], decay[head]);
      beta[LANE] = SIGMOID(exp2_scalar, GATE_B(start + LANE, head));
      by_key[LANE] = 1.0f / sqrt(kk + L2_EPS);
      by_query[LANE] = by_dim / sqrt(qq + L2_EPS);
      both[LANE] = kq * by_key[LANE] * by_query[LANE];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int t = 0; t < tokens; t++) {
      __local const float *key = keys + t * PADDED + row, *query = queries + t * PADDED + row;
      float by_k = 0.0f, by_q = 0.0f;
      for (int i = 0; i < ROWS; i++) {
        by_k += s[i] * key[i];
        by_q += s[i] * query[i];
      }
#if PARTS > 1
      __local float *shared = sums + t % 2 * 2 * LANES; // the other half may still be read
      shared[LANE] = by_k;
      shared[LANES + LANE] = by_q;
      barrier(CLK_LOCAL_MEM_FENCE);
      by_k = by_q = 0.0f;
      for (int i = LANE % COLUMNS; i < LANES; i += COLUMNS) {
        by_k += shared[i];
        by_q += shared[LANES + i];
      }
#endif
      const float value = own ? v[(size_t)(start + t) * WIDTH] : 0.0f;
      float u = (value - by_k * (kept[t] * by_key[t])) * beta[t];
      if (own && row == 0)
        y[(size_t)(start + t) * (v_heads * DV)] =
            by_q * (kept[t] * by_query[t]) + u * both[t];
      u *= by_key[t];
      for (int i = 0; i < ROWS; i++) s[i] = s[i] * kept[t] + u * key[i];
    }
  }
  if (own)
    for (int i = 0; i < ROWS; i++)
      if (row + i < DK) state[(row + i) * DV] = s[i];
}

// y = o / sqrt(mean(o²) + eps) · norm · silu(z), in place. Work-group: a head of a token.
__kernel void gated_norm(const int count, PANELS(const float, gates), ARRAY(float, y),
                         __global const float *restrict norm, const int v_heads,
                         const int gates_at, const float eps) {
  LANES_SCRATCH(scratch);
  const int token = get_group_id(1), head = get_group_id(0);
  if (token >= count) return;
  AT(y);
  y += ((size_t)token * v_heads + head) * DV;
  float squares = 0.0f;
  for (int j = LANE; j < DV; j += LANES) squares += y[j] * y[j];
  const float scale = 1.0f / sqrt(lanes_sum(squares, scratch) / DV + eps);
  for (int j = LANE; j < DV; j += LANES)
    y[j] = y[j] * scale * norm[j] * activate_scalar(GATE_AT(token, gates_at + head * DV + j));
}
