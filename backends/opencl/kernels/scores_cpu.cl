// Scores of rows of queries on caches, for devices whose work-items are CPU threads with wide vectors
// (LANES == 1). Rows are (token, query head) pairs of one key/value head, ROWS at once; keys are
// packed in blocks of KT, transposed: [KT tokens][HEAD_DIM] becomes [HEAD_DIM][KT]. Scores are in
// base 2: SCALE includes log2(e). Caches are for `capacity` tokens; `window` 0 is none.
//
// HEADS, KV_HEADS, HEAD_DIM, SCALE come from the record; HV divides HEAD_DIM.

#define GROUP (HEADS / KV_HEADS)
#ifdef READS  // queries alone: the caches are another layer's
#define WIDTH (HEADS * HEAD_DIM)
#else
#define WIDTH ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
#endif
// A tile of scores is ROWS × 2 vectors of sums in registers: AVX2 has half of AVX-512's 32.
#if VEC == 16
#define ROWS 8
#define EACH_ROW(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7)
#else
#define ROWS 4
#define EACH_ROW(F) F(0) F(1) F(2) F(3)
#endif
#define KT (2 * VEC)
#define LOWEST -1e30f
#define CHUNKS (HEAD_DIM / HV)

// Blocks of packed keys that a head has.
#define BLOCKS_OF(capacity) (((size_t)(capacity) + KT - 1) / KT)

// The soft cap on scores (activations.cl), if there is one.
#ifdef CAP
#define CAPPED(v) activate(v)
#define CAPPED1(x) activate_scalar(x)
#else
#define CAPPED(v) (v)
#define CAPPED1(x) (x)
#endif

// First position that a token at `last` - 1 sees.
INLINE int window_start(int last, int window) {
  return window > 0 && last > window ? last - window : 0;
}

// The first `keys` of KT keys, transposed; zeros behind them. `head` is where the head's begin.
INLINE void pack_block(__global const cache_t *restrict head, const int capacity, const int first,
                       const int keys, __global float *restrict packed) {
  __global const cache_t *k = head + (size_t)first * ROW;
#if defined(CACHE_CODES)
  __global const float *channels = CHANNELS_OF(head, capacity);
  for (int i = 0; i < KT; i++) {
    const float step = i < keys ? STEP_OF(k + i * ROW) : 0.0f;
    for (int c = 0; c < CHUNKS; c++) {
      float part[HV];
      HSTORE(i < keys ? CLOAD(k + i * ROW + c * HV) * (step * HLOAD(channels + c * HV))
                      : (hfloat)(0.0f), part);
      for (int j = 0; j < HV; j++) packed[(c * HV + j) * KT + i] = part[j];
    }
  }
#elif defined(CACHE_HALF)
  for (int i = 0; i < KT; i++) {
    for (int c = 0; c < CHUNKS; c++) {
      float part[HV];
      HSTORE(i < keys ? CLOAD(k + i * HEAD_DIM + c * HV) : (hfloat)(0.0f), part);
      for (int j = 0; j < HV; j++) packed[(c * HV + j) * KT + i] = part[j];
    }
  }
#else
  if (keys == KT) {
    for (int d = 0; d < HEAD_DIM; d++) {
      for (int i = 0; i < KT; i++) packed[d * KT + i] = k[i * HEAD_DIM + d];
    }
  } else {
    for (int d = 0; d < HEAD_DIM; d++) {
      for (int i = 0; i < KT; i++) packed[d * KT + i] = i < keys ? k[i * HEAD_DIM + d] : 0.0f;
    }
  }
#endif
}

// ROWS × KT scores of one packed block of keys; `stride` lies between two rows of them.
INLINE void scores(const float *restrict q, __global const float *restrict k, float *restrict s,
                   const int stride) {
#define DECLARE(r) vfloat a##r = 0, b##r = 0;
  EACH_ROW(DECLARE)
  for (int d = 0; d < HEAD_DIM; d++) {
    const vfloat k0 = VLOAD(k + d * KT), k1 = VLOAD(k + d * KT + VEC);
#define STEP(r) { const float x = q[d * ROWS + r]; a##r = x * k0 + a##r; b##r = x * k1 + b##r; }
    EACH_ROW(STEP)
  }
#define KEEP(r) VSTORE(a##r, s + r * stride); VSTORE(b##r, s + r * stride + VEC);
  EACH_ROW(KEEP)
#undef DECLARE
#undef STEP
#undef KEEP
}

// The highest of `count` scores, lane by lane; `count` is a multiple of VEC.
INLINE vfloat highest(const float *restrict s, const int count) {
  vfloat high = LOWEST;
  for (int i = 0; i < count; i += VEC) {
    const vfloat x = VLOAD(s + i);
    high = x > high ? x : high;
  }
  return high;
}

// Scores to weights in place; their sum, lane by lane, on top of `total`.
INLINE vfloat weigh(float *restrict s, const int count, const vfloat top, vfloat total) {
  for (int i = 0; i < count; i += VEC) {
    const vfloat weight = exp2_vector(VLOAD(s + i) - top);
    total += weight;
    VSTORE(weight, s + i);
  }
  return total;
}

// -inf for keys outside [low, high) of one row.
INLINE void mask(float *restrict s, const int keys, const int low, const int high) {
  for (int i = 0; i < min(low, keys); i++) s[i] = -INFINITY;
  for (int i = max(high, 0); i < keys; i++) s[i] = -INFINITY;
}
