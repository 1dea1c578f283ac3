// Router (hetero.backends.ops): logits of all experts, then a choice for each token.
// D is the width of x, E the number of experts, K how many are chosen. SOFTMAX, SOFTMAX_CHOSEN or
// SIGMOID say what scores are; CHOICE_BIAS and RENORMALISED are 0 or 1, EPS and SCALE floats.

// logits[token, e] for experts [item * each, ...); on a GPU LANES items share the features of one.
__kernel void router_logits(const int count, ARRAY(const float, x), ARRAY(float, logits),
                            __global const float *restrict weight,
                            __global const float *restrict bias, const int each,
                            const int has_bias) {
  const int token = get_global_id(1);
  if (token >= count) return;
  AT(logits);
  x += x_at + (size_t)token * D;
  LANES_SCRATCH(scratch);
  const int first = (int)get_group_id(0) * each;
  for (int e = first; e < min(first + each, E); e++) {
    __global const float *row = weight + (size_t)e * D;
    vfloat sum = 0.0f;
    EACH_VECTOR(i, D) sum += VLOAD(x + i) * VLOAD(row + i);
    float total = VSUM(sum);
    EACH_REST(i, D) total += x[i] * row[i];
    total = lanes_sum(total, scratch);
    if (LANE == 0) logits[(size_t)token * E + e] = total + (has_bias ? bias[e] : 0.0f);
  }
}

// y[token] = numbers of the chosen experts, then their weights. Logits become scores in place.
__kernel void router_choose(const int count, ARRAY(float, logits), ARRAY(float, y),
                            __global const float *restrict choice_bias) {
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
  for (int j = 0; j < K; j++) y[K + j] *= SCALE;
}
