// Experts (hetero.backends.ops), everything but the products; behind activations.cl. Pairs of a token
// and an expert that it chose are rows, sorted by expert; each expert begins at a multiple of TILE.
// E experts, K of them chosen; SHIFTED: up is clamped and 1 is added to it (swiglu_oai).
//
// Pairs of experts for which `is_own` [E] is 0 have no row.
//
// `plan` holds starts[E + 1] (first row of each expert), next[E], place[m * K] (row of each pair, -1:
// none),
// source[rows] (token of each row, -1: none), experts[tiles] (of each run of TILE rows).
#define STARTS(plan) (plan)
#define NEXT(plan) ((plan) + E + 1)
#define PLACE(plan) ((plan) + 2 * E + 1)
#define SOURCE(plan, m) (PLACE(plan) + (m) * K)

#if LANES == 1
#define TAKE(p) ((*(p))++)
#define MEET
#else
#define TAKE(p) atomic_inc(p)
#define MEET barrier(CLK_GLOBAL_MEM_FENCE)
#endif
#define EACH_ITEM(i, n) for (int i = LANE; i < (n); i += LANES)

INLINE int expert_of(__global const float *routes, const int pair) {
  return clamp((int)routes[pair / K * 2 * K + pair % K], 0, E - 1);
}

// One work-group for all `count` tokens.
__kernel void sort_routes(const int count, ARRAY(const float, routes), ARRAY(int, plan),
                          const int rows, __global const int *is_own) {
  AT(routes);
  AT(plan);
  __global int *next = NEXT(plan), *source = SOURCE(plan, count), *experts = source + rows;
  if (count == 0) return;
  EACH_ITEM(e, E) next[e] = 0;
  MEET;
  EACH_ITEM(p, count * K) {
    const int e = expert_of(routes, p);
    if (is_own[e]) TAKE(next + e);
  }
  MEET;
  if (LANE == 0) {
    int at = 0;
    for (int e = 0; e < E; e++) {
      const int taken = at + next[e], stop = at + (next[e] + TILE - 1) / TILE * TILE;
      STARTS(plan)[e] = next[e] = at;
      for (int row = taken; row < stop; row++) source[row] = -1;
      for (; at < stop; at += TILE) experts[at / TILE] = e;
    }
    STARTS(plan)[E] = at;
  }
  MEET;
  EACH_ITEM(p, count * K) {
    const int e = expert_of(routes, p), row = is_own[e] ? TAKE(next + e) : -1;
    PLACE(plan)[p] = row;
    if (row >= 0) source[row] = p / K;
  }
}

// sorted[row] = x[token of the row], zeros where there is none. `m` tokens.
__kernel void gather(const int count, ARRAY(const float, x), ARRAY(const int, plan),
                     ARRAY(float, sorted), const int m, const int width) {
  AT(plan);
  const int row = get_global_id(1);
  if (row >= count || row >= STARTS(plan)[E]) return;
  const int token = SOURCE(plan, m)[row];
  x += x_at + (size_t)max(token, 0) * width;
  sorted += sorted_at + (size_t)row * width;
  const float keep = token < 0 ? 0.0f : 1.0f;
  EACH_VECTOR(i, width) VSTORE(VLOAD(x + i) * keep, sorted + i);
  EACH_REST(i, width) sorted[i] = x[i] * keep;
}

#if SHIFTED
#define UP(u, real) ((u < -LIMIT ? (real)(-LIMIT) : u > LIMIT ? (real)(LIMIT) : u) + 1.0f)
#else
#define UP(u, real) u
#endif

// hidden[row] = act(gate) · up of both [rows, 2 width].
__kernel void activate_rows(const int count, ARRAY(const float, both), ARRAY(const int, plan),
                            ARRAY(float, hidden), const int width) {
  AT(plan);
  const int row = get_global_id(1);
  if (row >= count || row >= STARTS(plan)[E]) return;
  both += both_at + (size_t)row * 2 * width;
  hidden += hidden_at + (size_t)row * width;
  EACH_VECTOR(i, width) {
    const vfloat up = VLOAD(both + width + i);
    VSTORE(activate(VLOAD(both + i)) * UP(up, vfloat), hidden + i);
  }
  EACH_REST(i, width) {
    const float up = both[width + i];
    hidden[i] = activate_scalar(both[i]) * UP(up, float);
  }
}

// y[token] = the sum of its experts' rows by their weights.
__kernel void combine(const int count, ARRAY(const float, products), ARRAY(const float, routes),
                      ARRAY(const int, plan), ARRAY(float, y), const int width) {
  const int token = get_global_id(1);
  if (token >= count) return;
  AT(products);
  AT(plan);
  routes += routes_at + (size_t)token * 2 * K;
  y += y_at + (size_t)token * width;
  __global const int *place = PLACE(plan) + token * K;
  EACH_VECTOR(i, width) {
    vfloat sum = 0.0f;
    for (int j = 0; j < K; j++)
      if (place[j] >= 0) sum += VLOAD(products + (size_t)place[j] * width + i) * routes[K + j];
    VSTORE(sum, y + i);
  }
  EACH_REST(i, width) {
    float sum = 0.0f;
    for (int j = 0; j < K; j++)
      if (place[j] >= 0) sum += products[(size_t)place[j] * width + i] * routes[K + j];
    y[i] = sum;
  }
}
