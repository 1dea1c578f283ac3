// Router (hetero.backends.ops): logits of all experts, then a choice for each token.
// D is the width of x, E the number of experts, K how many are chosen. SOFTMAX, SOFTMAX_CHOSEN or
// SIGMOID say what scores are; CHOICE_BIAS, RENORMALISED and EXPERT_SCALE are 0 or 1, EPS and SCALE floats.

// Products of T tokens from the item's first on with experts e to e + TILE_EXPERTS, the last of which
// may be beyond the item's.
#define LOGITS(T)                                                                       \
  {                                                                                     \
    vfloat sum[T][TILE_EXPERTS];                                                        \
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < TILE_EXPERTS; r++)    \
      sum[t][r] = 0.0f;                                                                 \
    EACH_VECTOR(i, D) {                                                                 \
      vfloat features[T];                                                               \
      UNROLL for (int t = 0; t < T; t++) features[t] = VLOAD(x + (size_t)t * D + i);    \
      UNROLL for (int r = 0; r < TILE_EXPERTS; r++) {                                   \
        const vfloat w = VLOAD(weight + (size_t)min(e + r, E - 1) * D + i);             \
        UNROLL for (int t = 0; t < T; t++) sum[t][r] += features[t] * w;                \
      }                                                                                 \
    }                                                                                   \
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int r = 0; r < TILE_EXPERTS; r++) {  \
      float total = VSUM(sum[t][r]);                                                    \
      __global const float *row = weight + (size_t)min(e + r, E - 1) * D;               \
      EACH_REST(i, D) total += x[(size_t)t * D + i] * row[i];                           \
      total = lanes_sum(total, scratch);                                                \
      if (LANE == 0 && e + r < last)                                                    \
        logits[(size_t)t * E + e + r] = total + (has_bias ? bias[e + r] : 0.0f);        \
    }                                                                                   \
  }
#define UNROLL _Pragma("unroll")

// logits[token, e] for TILE_TOKENS tokens and experts [item * each, ...); on a GPU LANES items share
// the features of one.
__kernel void router_logits(const int count, ARRAY(const float, x), ARRAY(float, logits),
                            __global const float *restrict weight,
                            __global const float *restrict bias, const int each,
                            const int has_bias) {
  const int token = (int)get_global_id(1) * TILE_TOKENS;
  if (token >= count) return;
  x += x_at + (size_t)token * D;
  logits += logits_at + (size_t)token * E;
  LANES_SCRATCH(scratch);
  const int first = (int)get_group_id(0) * each, last = min(first + each, E);
  if (token + TILE_TOKENS <= count) {
    for (int e = first; e < last; e += TILE_EXPERTS) LOGITS(TILE_TOKENS)
  } else {
    for (int t = token; t < count; t++, x += D, logits += E)
      for (int e = first; e < last; e += TILE_EXPERTS) LOGITS(1)
  }
}

// y[token] = numbers of the chosen experts, then their weights. Logits become scores in place.
__kernel void router_choose(const int count, ARRAY(float, logits), ARRAY(float, y),
                            __global const float *restrict choice_bias,
                            __global const float *restrict expert_scale) {
  const int token = get_global_id(0);
  if (token >= count) return;
  __global float *s = logits + logits_at + (size_t)token * E;
  y += y_at + (size_t)token * 2 * K;
  float largest = s[0], total = 0.0f;
  for (int e = 1; e < E; e++) largest = larger(largest, s[e]);
#if defined(SIGMOID)
  for (int e = 0; e < E; e++) s[e] = 1.0f / (1.0f + exp2_scalar(-LOG2E * s[e]));
#elif defined(SOFTMAX)
  for (int e = 0; e < E; e++) total += s[e] = exp2_scalar((s[e] - largest) * LOG2E);
  for (int e = 0; e < E; e++) s[e] /= total;
#endif
  uint taken[(E + 31) / 32];
  for (int i = 0; i < (E + 31) / 32; i++) taken[i] = 0;
  total = 0.0f;
  for (int j = 0; j < K; j++) {
    int best = -1;
    float most = 0.0f;
    for (int e = 0; e < E; e++) {
      if (taken[e / 32] >> (e % 32) & 1) continue;
      const float preferred = CHOICE_BIAS ? s[e] + choice_bias[e] : s[e];
      if (best >= 0 && !(preferred > most)) continue;
      best = e;
      most = preferred;
    }
    taken[best / 32] |= 1u << (best % 32);
#if defined(SOFTMAX_CHOSEN)
    const float weight = exp2_scalar((s[best] - largest) * LOG2E);
#else
    const float weight = s[best];
#endif
    y[j] = (float)best;
    y[K + j] = weight;
    total += weight;
  }
#if RENORMALISED
  for (int j = 0; j < K; j++) y[K + j] /= total + EPS;
#endif
  for (int j = 0; j < K; j++) y[K + j] *= EXPERT_SCALE ? SCALE * expert_scale[(int)y[j]] : SCALE;
}
