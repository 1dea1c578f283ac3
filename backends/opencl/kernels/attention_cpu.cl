// Attention for devices whose work-items are CPU threads with wide vectors (LANES == 1).
//
// Prefill: `pack_keys` appends k and v to the caches and writes K transposed, [G][C/KT][D][KT], so
// that one vector holds one dimension of VEC keys; `attend_tile` is then two small matrix products
// around an online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022), with no
// score matrix larger than ROWS × KEYS. Rows are (token, query head) pairs of one key/value head:
// row = token * GROUP + head. Scores are in base 2: SCALE includes log2(e).
// Decode: `attend_few` appends and attends token by token; a vector holds HV dimensions of one key.
//
// Caches are read as they lie (caches.cl), halves and codes widened in registers; scores_cpu.cl makes
// scores. Codes' scales: of keys' channels in q (decode) or in packed keys, of keys' tokens on the
// scores (or in packed keys), of values' tokens on the weights.
// A launch is for the key/value heads from `first` on: work-item 0 has that one. Caches' `capacity`
// and the `window` (0: none) are arguments, so that one program does for all lengths of context.
// TOKENS (per tile) and KEYS (per block) come from tuning. With `parts` > 1 decode cuts the context of
// a head into as many, MAX_PARTS at most, whose sums `combine_few` adds up: heads alone would leave
// cores idle.

#if GROUP == 1
#define FEW 1
#elif GROUP == 2
#define FEW 2
#else
#define FEW 4
#endif
#define PADDED_GROUP ((GROUP + FEW - 1) / FEW * FEW)

// The sums of a row of queries over a part of the context, their maximum and their weight.
#define PARTIAL(part, t, head) \
  (partial + (((size_t)(part) * count + (t)) * HEADS + (head)) * (HEAD_DIM + 2))

#define LINE (64 / (int)sizeof(cache_t))

// With SINKS the softmax of a row begins with a score of its head that has no value, `sinks` [HEADS],
// in base 2.
#ifdef SINKS
#define SINKS_ARGUMENT , __global const float *restrict sinks
#else
#define SINKS_ARGUMENT
#endif

// A token of a head to where it belongs in caches of a head; the values lie `apart` from the keys.
INLINE void append_row(__global const float *from, const int apart, const int key,
                       __global cache_t *k_head, __global cache_t *v_head, const int capacity) {
  __global cache_t *k = k_head + (size_t)key * ROW, *v = v_head + (size_t)key * ROW;
#ifdef CACHE_CODES
  code_row(from, k, true, CHANNELS_OF(k_head, capacity));
  code_row(from + apart, v, false, 0);
#else
  for (int c = 0; c < CHUNKS; c++) {
    CSTORE(HLOAD(from + c * HV), k + c * HV);
    CSTORE(HLOAD(from + apart + c * HV), v + c * HV);
  }
#endif
}

// Work-item (g, block of KT keys). `count` is m.
__kernel void pack_keys(const int count, ARRAY(const float, qkv), ARRAY(const int, position),
                        ARRAY(cache_t, k_cache), ARRAY(cache_t, v_cache),
                        __global float *restrict packed, const int first, const int capacity,
                        const int window) {
  const int g = first + get_global_id(0), block = get_global_id(1);
  if (count == 0) return;
  AT(qkv); AT(position); AT(k_cache); AT(v_cache);
  const int start = position[0], stop = start + count, key0 = block * KT;
  if (key0 >= stop || key0 + KT <= window_start(start + 1, window)) return;
  k_cache = HEAD_OF(k_cache, g, capacity);
  v_cache = HEAD_OF(v_cache, g, capacity);
  packed += (g * BLOCKS_OF(capacity) + block) * KT * HEAD_DIM;
  const int keys = min(KT, stop - key0);
#ifndef READS
  for (int i = 0; i < keys; i++) {
    const int key = key0 + i;
    if (key < start) continue;
    __global const float *from = qkv + (size_t)(key - start) * WIDTH + (HEADS + g) * HEAD_DIM;
    append_row(from, KV_HEADS * HEAD_DIM, key, k_cache, v_cache, capacity);
  }
#endif
  pack_block(k_cache, capacity, key0, keys, packed);
}

// o[r][0 .. 2 HV) = alpha[r] * o + p · v
INLINE void values2(const float *restrict p, __global const cache_t *restrict v, const int keys,
                    const float *restrict alpha, float *restrict o) {
#define DECLARE(r) hfloat a##r = alpha[r] * HLOAD(o + r * HEAD_DIM), \
                          b##r = alpha[r] * HLOAD(o + r * HEAD_DIM + HV);
  EACH_ROW(DECLARE)
  for (int key = 0; key < keys; key++) {
    const hfloat v0 = CLOAD(v + key * ROW), v1 = CLOAD(v + key * ROW + HV);
#define STEP(r) { const float x = p[r * KEYS + key]; a##r = x * v0 + a##r; b##r = x * v1 + b##r; }
    EACH_ROW(STEP)
  }
#define KEEP(r) HSTORE(a##r, o + r * HEAD_DIM); HSTORE(b##r, o + r * HEAD_DIM + HV);
  EACH_ROW(KEEP)
#undef DECLARE
#undef STEP
#undef KEEP
}

INLINE void values1(const float *restrict p, __global const cache_t *restrict v, const int keys,
                    const float *restrict alpha, float *restrict o) {
#define DECLARE(r) hfloat a##r = alpha[r] * HLOAD(o + r * HEAD_DIM);
  EACH_ROW(DECLARE)
  for (int key = 0; key < keys; key++) {
    const hfloat v0 = CLOAD(v + key * ROW);
#define STEP(r) a##r = p[r * KEYS + key] * v0 + a##r;
    EACH_ROW(STEP)
  }
#define KEEP(r) HSTORE(a##r, o + r * HEAD_DIM);
  EACH_ROW(KEEP)
#undef DECLARE
#undef STEP
#undef KEEP
}

// Scores of ROWS rows to weights in place, over `keys` keys rounded up to VEC (the rest of s is -inf
// here); `alpha` [VEC]: the factors on what was accumulated before, of all rows by one exponential.
INLINE void soften(float *restrict s, const int keys, float *restrict top, vfloat *restrict sum,
                   float *restrict alpha) {
  float now[VEC], before[VEC];
  for (int r = 0; r < VEC; r++) now[r] = before[r] = 0;
  for (int r = 0; r < ROWS; r++) {
    before[r] = top[r];
    now[r] = larger(top[r], VMAX(highest(s + r * KEYS, keys)));
  }
  VSTORE(exp2_vector(VLOAD(before) - VLOAD(now)), alpha);
  for (int r = 0; r < ROWS; r++) {
    sum[r] = weigh(s + r * KEYS, keys, (vfloat)(now[r]), alpha[r] * sum[r]);
    top[r] = now[r];
  }
}

// Work-item (g, tile of TOKENS tokens). `count` is m.
__kernel void attend_tile(const int count, ARRAY(const float, qkv), ARRAY(const int, position),
                          ARRAY(const cache_t, v_cache), ARRAY(float, out),
                          __global const float *restrict packed, const int first,
                          const int capacity, const int window SINKS_ARGUMENT) {
#define SLABS ((TOKENS * GROUP + ROWS - 1) / ROWS)
  const int g = first + get_global_id(0), t0 = get_global_id(1) * TOKENS;
  if (t0 >= count) return;
  AT(qkv); AT(position); AT(v_cache); AT(out);
  const int start = position[0];
  const int rows = min(TOKENS, count - t0) * GROUP;
  const int slabs = (rows + ROWS - 1) / ROWS;
  packed += g * BLOCKS_OF(capacity) * KT * HEAD_DIM;
  v_cache = HEAD_OF(v_cache, g, capacity);

  float q[SLABS * HEAD_DIM * ROWS], o[SLABS * ROWS * HEAD_DIM], p[ROWS * KEYS];
  float top[SLABS * ROWS];
  vfloat sum[SLABS * ROWS];
  for (int r = 0; r < slabs * ROWS; r++) {
    const int row = min(r, rows - 1);
    __global const float *from =
        qkv + (size_t)(t0 + row / GROUP) * WIDTH + (g * GROUP + row % GROUP) * HEAD_DIM;
    float *to = q + (r / ROWS) * HEAD_DIM * ROWS + r % ROWS;
    for (int d = 0; d < HEAD_DIM; d++) to[d * ROWS] = from[d] * SCALE;
    for (int c = 0; c < CHUNKS; c++) HSTORE((hfloat)0, o + r * HEAD_DIM + c * HV);
#ifdef SINKS
    float lanes[VEC];
    for (int i = 0; i < VEC; i++) lanes[i] = i == 0;
    top[r] = sinks[g * GROUP + row % GROUP];
    sum[r] = VLOAD(lanes);
#else
    top[r] = LOWEST;
    sum[r] = 0;
#endif
  }

  const int begin = window_start(start + t0 + 1, window) / KT * KT;
  const int end = start + t0 + (rows - 1) / GROUP + 1;
  for (int key0 = begin; key0 < end; key0 += KEYS) {
    __global const cache_t *v = v_cache + (size_t)key0 * ROW;
#ifdef CACHE_CODES
    float steps[KEYS];
    for (int i = 0; i < KEYS; i++) steps[i] = key0 + i < end ? STEP_OF(v + i * ROW) : 0.0f;
#endif
    for (int slab = 0; slab < slabs; slab++) {
      const int row0 = slab * ROWS, row1 = min(row0 + ROWS, rows) - 1;
      const int early = start + t0 + row0 / GROUP + 1, late = start + t0 + row1 / GROUP + 1;
      const int keys = min(KEYS, late - key0);
      if (keys <= 0 || key0 + KEYS <= window_start(early, window)) continue;
      const int padded = (keys + VEC - 1) / VEC * VEC;
      for (int i = 0; i < keys; i += KT) {
        scores(q + slab * HEAD_DIM * ROWS, packed + (size_t)(key0 + i) * HEAD_DIM, p + i, KEYS);
      }
#ifdef CAP
      for (int r = 0; r < ROWS; r++) {
        for (int i = r * KEYS; i < r * KEYS + padded; i += VEC) VSTORE(CAPPED(VLOAD(p + i)), p + i);
      }
#endif
      const bool inside = key0 + padded <= early && key0 >= window_start(late, window);
      float alpha[VEC];
      for (int r = 0; r < (inside ? 0 : ROWS); r++) {
        const int limit = start + t0 + min(row0 + r, rows - 1) / GROUP + 1;
        mask(p + r * KEYS, padded, window_start(limit, window) - key0, limit - key0);
      }
      soften(p, padded, top + row0, sum + row0, alpha);
#ifdef CACHE_CODES
      for (int r = 0; r < ROWS; r++) {
        for (int i = r * KEYS; i < r * KEYS + padded; i += VEC) {
          VSTORE(VLOAD(p + i) * VLOAD(steps + i - r * KEYS), p + i);
        }
      }
#endif
      float *acc = o + row0 * HEAD_DIM;
      int c = 0;
      for (; c + 2 <= CHUNKS; c += 2) values2(p, v + c * HV, keys, alpha, acc + c * HV);
      if (c < CHUNKS) values1(p, v + c * HV, keys, alpha, acc + c * HV);
    }
  }

  for (int r = 0; r < rows; r++) {
    const float inverse = 1.0f / VSUM(sum[r]);
    __global float *to =
        out + (size_t)(t0 + r / GROUP) * HEADS * HEAD_DIM + (g * GROUP + r % GROUP) * HEAD_DIM;
    for (int c = 0; c < CHUNKS; c++) {
      HSTORE(inverse * HLOAD(o + r * HEAD_DIM + c * HV), to + c * HV);
    }
  }
}

INLINE float dot1(const float *restrict q, __global const cache_t *restrict k) {
  hfloat x = HLOAD(q) * CLOAD(k);
  for (int c = 1; c < CHUNKS; c++) x = HLOAD(q + c * HV) * CLOAD(k + c * HV) + x;
  return HSUM(x);
}

// Number i of a decode step's VEC scores at once: row i % FEW of key i / FEW.
#define Q_OF(i) (q + (i) % FEW * HEAD_DIM)
#define K_OF(i) (k + (i) / FEW * ROW)
#define START(i) hfloat d##i = HLOAD(Q_OF(i)) * CODES_OF(K_OF(i)) HALVES_OF(i);
#define DIMENSIONS(i) d##i = HLOAD(Q_OF(i) + c * HV) * CODES_OF(K_OF(i) + c * HV) + d##i;
#ifdef CACHE_CODES
#define HALVES_OF(i) + HLOAD(halves + (i) % FEW * HV)
#else
#define HALVES_OF(i)
#endif
// The sums over a vector's lanes are a tree that keeps vectors full, halving the lanes per score while
// joining scores: a join is two shuffles and a sum. The last two joins stay within 128 bits, where
// four vectors end as a score each; which vectors meet is such that score i ends in lane i.
#define SUM_OF(a, b, pick, x, y) (pick(a, b, x) + pick(a, b, y))
#if HV == 16
#define HALF(a, b, i)                                                                          \
  __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7, i + 16,    \
                          i + 17, i + 18, i + 19, i + 20, i + 21, i + 22, i + 23)
#define QUARTER(a, b, i)                                                                       \
  __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, i + 8, i + 9, i + 10, i + 11, i + 16,  \
                          i + 17, i + 18, i + 19, i + 24, i + 25, i + 26, i + 27)
#define PAIR(a, b, i)                                                                          \
  __builtin_shufflevector(a, b, i, i + 1, i + 16, i + 17, i + 4, i + 5, i + 20, i + 21, i + 8, \
                          i + 9, i + 24, i + 25, i + 12, i + 13, i + 28, i + 29)
#define SINGLE(a, b, i)                                                                        \
  __builtin_shufflevector(a, b, i, i + 2, i + 16, i + 18, i + 4, i + 6, i + 20, i + 22, i + 8, \
                          i + 10, i + 24, i + 26, i + 12, i + 14, i + 28, i + 30)
#elif HV == 8
#define HALF(a, b, i) \
  __builtin_shufflevector(a, b, i, i + 1, i + 2, i + 3, i + 8, i + 9, i + 10, i + 11)
#define PAIR(a, b, i) \
  __builtin_shufflevector(a, b, i, i + 1, i + 8, i + 9, i + 4, i + 5, i + 12, i + 13)
#define SINGLE(a, b, i) \
  __builtin_shufflevector(a, b, i, i + 2, i + 8, i + 10, i + 4, i + 6, i + 12, i + 14)
#endif
#define HALVES(a, b) SUM_OF(a, b, HALF, 0, HV / 2)
#define QUARTERS(a, b) SUM_OF(a, b, QUARTER, 0, 4)
#define PAIRS(a, b) SUM_OF(a, b, PAIR, 0, 2)
#define SINGLES(a, b) SUM_OF(a, b, SINGLE, 0, 1)

// VEC scores of FEW rows and VEC / FEW neighbouring keys: a vector of keys is loaded once for all
// rows. `halves` [FEW][HV]: of rows by the halves of codes, the same for every key.
INLINE vfloat dots(const float *restrict q, __global const cache_t *restrict k,
                   const float *restrict halves) {
#if HV == 16 && VEC == 16
#define FOUR(a, b, c, d) QUARTERS(HALVES(a, b), HALVES(c, d))
#define EACH_SCORE(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) \
                      F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15)
  EACH_SCORE(START)
  for (int c = 1; c < CHUNKS; c++) { EACH_SCORE(DIMENSIONS) }
  const float16 e0 = FOUR(d0, d4, d8, d12), e1 = FOUR(d1, d5, d9, d13);
  const float16 e2 = FOUR(d2, d6, d10, d14), e3 = FOUR(d3, d7, d11, d15);
  const float16 f0 = PAIRS(e0, e1), f1 = PAIRS(e2, e3);
  return SINGLES(f0, f1);
#elif HV == 8 && VEC == 8
#define EACH_SCORE(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7)
  EACH_SCORE(START)
  for (int c = 1; c < CHUNKS; c++) { EACH_SCORE(DIMENSIONS) }
  const float8 e0 = HALVES(d0, d4), e1 = HALVES(d1, d5);
  const float8 e2 = HALVES(d2, d6), e3 = HALVES(d3, d7);
  const float8 f0 = PAIRS(e0, e1), f1 = PAIRS(e2, e3);
  return SINGLES(f0, f1);
#else
  float s[VEC];
  for (int i = 0; i < VEC; i++) s[i] = dot1(Q_OF(i), K_OF(i));
  return VLOAD(s);
#endif
}

#ifdef CACHE_CODES
// The steps of VEC / FEW tokens, each as often as there are rows. As a loop it would become gathers
// that are stored in parts and loaded as a whole: half of the kernel's time.
#if FEW == 1
#define STEPS(i) STEP_OF(rows + (i) * ROW)
#else
#define STEPS(i) ((CAT(float, FEW))(STEP_OF(rows + (i) * ROW)))
#endif
#define STEPS2(i) STEPS(i), STEPS(i + 1)
#define STEPS4(i) STEPS2(i), STEPS2(i + 2)
#define STEPS8(i) STEPS4(i), STEPS4(i + 4)
#define STEPS16(i) STEPS8(i), STEPS8(i + 8)
INLINE vfloat few_steps(__global const cache_t *rows) {
#if VEC == FEW
  return STEPS(0);
#elif VEC == 2 * FEW
  return (vfloat)(STEPS2(0));
#elif VEC == 4 * FEW
  return (vfloat)(STEPS4(0));
#elif VEC == 8 * FEW
  return (vfloat)(STEPS8(0));
#elif VEC == 16 * FEW
  return (vfloat)(STEPS16(0));
#endif
}
#define SCALED_BY(rows, x) (few_steps(rows) * (x))
#define SCALED_BY1(row, x) (STEP_OF(row) * (x))
#else
#define SCALED_BY(rows, x) (x)
#define SCALED_BY1(row, x) (x)
#endif

// The caches come from memory, in runs of KEYS: while scores are made, keys are fetched that follow
// AHEAD later, and values that follow AHEAD - 32 later, so that fetches of both are spread evenly
// and none waits for the other's. Codes take longer to compute than to come.
#ifdef CACHE_CODES
#define AHEAD 32
#else
#define AHEAD 64
#endif
#define EACH_FEW(F) F(0) F(1) F(2) F(3)
#define LIVE(r) if (r < FEW)

// As values2 and values1, for FEW rows whose weights lie side by side, key by key; of codes without
// their halves.
INLINE void few_values2(const float *restrict p, __global const cache_t *restrict v, const int keys,
                        const float *restrict alpha, float *restrict o) {
#define DECLARE(r) hfloat a##r = 0, b##r = 0; LIVE(r) { a##r = alpha[r] * HLOAD(o + r * HEAD_DIM); \
                                                b##r = alpha[r] * HLOAD(o + r * HEAD_DIM + HV); }
  EACH_FEW(DECLARE)
  for (int key = 0; key < keys; key++) {
    const hfloat v0 = CODES_OF(v + key * ROW), v1 = CODES_OF(v + key * ROW + HV);
#define STEP(r) LIVE(r) { const float x = p[key * FEW + r]; \
                          a##r = x * v0 + a##r; b##r = x * v1 + b##r; }
    EACH_FEW(STEP)
  }
#define KEEP(r) LIVE(r) { HSTORE(a##r, o + r * HEAD_DIM); HSTORE(b##r, o + r * HEAD_DIM + HV); }
  EACH_FEW(KEEP)
#undef DECLARE
#undef STEP
#undef KEEP
}

INLINE void few_values1(const float *restrict p, __global const cache_t *restrict v, const int keys,
                        const float *restrict alpha, float *restrict o) {
#define DECLARE(r) hfloat a##r = 0; LIVE(r) a##r = alpha[r] * HLOAD(o + r * HEAD_DIM);
  EACH_FEW(DECLARE)
  for (int key = 0; key < keys; key++) {
    const hfloat v0 = CODES_OF(v + key * ROW);
#define STEP(r) LIVE(r) a##r = p[key * FEW + r] * v0 + a##r;
    EACH_FEW(STEP)
  }
#define KEEP(r) LIVE(r) HSTORE(a##r, o + r * HEAD_DIM);
  EACH_FEW(KEEP)
#undef DECLARE
#undef STEP
#undef KEEP
}

// As soften, for the scores of FEW rows side by side: `count` of them, a multiple of VEC. A lane
// of `sum`, and of the `steps` that follow it, is row lane % FEW's.
INLINE void few_soften(float *restrict s, const int count, float *restrict top,
                       vfloat *restrict sum, vfloat *restrict steps, float *restrict alpha) {
  float lanes[VEC], now[VEC], factor[VEC];
  VSTORE(highest(s, count), lanes);
  for (int r = 0; r < FEW; r++) {
    float most = top[r];
    for (int i = r; i < VEC; i += FEW) most = larger(most, lanes[i]);
    alpha[r] = exp2_scalar(top[r] - most);
    top[r] = most;
    for (int i = r; i < VEC; i += FEW) {
      now[i] = most;
      factor[i] = alpha[r];
    }
  }
  *steps *= VLOAD(factor);
  *sum = weigh(s, count, VLOAD(now), VLOAD(factor) * *sum);
}

// Row r's of a vector whose lanes are rows side by side.
INLINE float lanes_of(const vfloat x, const int r) {
  float lanes[VEC], total = 0;
  VSTORE(x, lanes);
  for (int i = r; i < VEC; i += FEW) total += lanes[i];
  return total;
}

// What a token of decode has so far: GROUP rows of queries and outputs, side by side FEW at a time.
typedef struct {
  float q[PADDED_GROUP * HEAD_DIM], o[PADDED_GROUP * HEAD_DIM];
  float top[PADDED_GROUP], halves[PADDED_GROUP * HV];
  vfloat sum[PADDED_GROUP / FEW], steps[PADDED_GROUP / FEW];
} few_t;

INLINE void few_begin(few_t *restrict few, __global const float *restrict from,
                      __global const cache_t *restrict k_head, const int capacity) {
  for (int i = 0; i < PADDED_GROUP * HEAD_DIM; i++) {
    few->q[i] = i < GROUP * HEAD_DIM ? from[i] * SCALE : 0.0f;
    few->o[i] = 0;
  }
#ifdef CACHE_CODES
  for (int i = 0; i < GROUP * HEAD_DIM; i++) few->q[i] *= CHANNELS_OF(k_head, capacity)[i % HEAD_DIM];
  for (int r = 0; r < PADDED_GROUP; r++) {
    for (int i = 0; i < HV; i++) {
      float x = 0;
      for (int c = 0; c < CHUNKS; c++) x += 0.5f * few->q[r * HEAD_DIM + c * HV + i];
      few->halves[r * HV + i] = x;
    }
  }
#endif
  for (int r = 0; r < PADDED_GROUP; r++) few->top[r] = LOWEST;
  for (int b = 0; b < PADDED_GROUP / FEW; b++) few->sum[b] = few->steps[b] = 0;
}

#ifdef SINKS
// The softmax begins with the sinks of GROUP rows.
INLINE void few_sinks(few_t *restrict few, __global const float *restrict sinks) {
  for (int r = 0; r < GROUP; r++) few->top[r] = sinks[r];
  for (int b = 0; b < PADDED_GROUP / FEW; b++) {
    float lanes[VEC];
    for (int i = 0; i < VEC; i++) lanes[i] = i < FEW && b * FEW + i < GROUP;
    few->sum[b] = VLOAD(lanes);
  }
}
#endif

// A run of at most KEYS keys; who is the first to read it has what follows fetched.
INLINE void few_run(few_t *restrict few, __global const cache_t *restrict k,
                    __global const cache_t *restrict v, const int keys, const bool fetch) {
  const int padded = (keys * FEW + VEC - 1) / VEC * VEC;
  float p[FEW * KEYS], alpha[FEW];
  for (int r = 0; r < PADDED_GROUP; r += FEW) {
    int key = 0;
    for (; key + VEC / FEW <= keys; key += VEC / FEW) {
      if (r == 0 && fetch) {
        for (int i = 0; i < VEC / FEW * ROW; i += LINE) {
          __builtin_prefetch(k + (key + AHEAD) * ROW + i);
          __builtin_prefetch(v + (key + AHEAD - 32) * ROW + i);
        }
      }
      const vfloat dot = dots(few->q + r * HEAD_DIM, k + key * ROW, few->halves + r * HV);
      VSTORE(CAPPED(SCALED_BY(k + key * ROW, dot)), p + key * FEW);
    }
    int i = key * FEW;
    for (; i < keys * FEW; i++) {
      const float dot = dot1(few->q + (r + i % FEW) * HEAD_DIM, k + i / FEW * ROW);
      p[i] = CAPPED1(SCALED_BY1(k + i / FEW * ROW, dot));
    }
    for (; i < padded; i++) p[i] = -INFINITY;
    few_soften(p, padded, few->top + r, few->sum + r / FEW, few->steps + r / FEW, alpha);
#ifdef CACHE_CODES
    for (i = 0; i + VEC <= keys * FEW; i += VEC) {
      const vfloat x = VLOAD(p + i) * few_steps(v + i / FEW * ROW);
      few->steps[r / FEW] += x;
      VSTORE(x, p + i);
    }
    if (i < keys * FEW) {
      for (int j = i; j < padded; j++) p[j] *= j < keys * FEW ? STEP_OF(v + j / FEW * ROW) : 0.0f;
      few->steps[r / FEW] += VLOAD(p + i);
    }
#endif
    float *acc = few->o + r * HEAD_DIM;
    int c = 0;
    for (; c + 2 <= CHUNKS; c += 2) few_values2(p, v + c * HV, keys, alpha, acc + c * HV);
    if (c < CHUNKS) few_values1(p, v + c * HV, keys, alpha, acc + c * HV);
  }
}

// Work-item (g, part): appends all tokens of the call, then attends on a part of the tokens before
// the call; the last part has the call's own. Every token goes through the same runs of keys as it
// would alone, all tokens through one before the next, so that a run is read once. `count` is m.
__kernel void attend_few(const int count, ARRAY(const float, qkv), ARRAY(const int, position),
                         ARRAY(cache_t, k_cache), ARRAY(cache_t, v_cache), ARRAY(float, out),
                         const int first, __global float *restrict partial, const int parts,
                         const int capacity, const int window SINKS_ARGUMENT) {
  const int g = first + get_global_id(0), part = get_global_id(1);
  const bool is_last = part == parts - 1;
  if (count == 0) return;
  AT(qkv); AT(position); AT(k_cache); AT(v_cache); AT(out);
  const int start = position[0];
  k_cache = HEAD_OF(k_cache, g, capacity);
  v_cache = HEAD_OF(v_cache, g, capacity);
#ifndef READS
  for (int t = 0; t < (is_last ? count : 0); t++) {
    __global const float *from = qkv + (size_t)t * WIDTH + (HEADS + g) * HEAD_DIM;
    append_row(from, KV_HEADS * HEAD_DIM, start + t, k_cache, v_cache, capacity);
  }
#endif
  few_t few[FEW_TOKENS];
  int low[FEW_TOKENS], end[FEW_TOKENS], longest = 0;
  for (int t = 0; t < count; t++) {
    few_begin(few + t, qkv + (size_t)t * WIDTH + g * GROUP * HEAD_DIM, k_cache, capacity);
#ifdef SINKS
    if (is_last) few_sinks(few + t, sinks + g * GROUP);
#endif
    const int begin = window_start(start + t + 1, window), before = max(start - begin, 0);
    const int each = ((before + parts - 1) / parts + KEYS - 1) / KEYS * KEYS;
    low[t] = begin + min(part * each, before);
    end[t] = is_last ? start + t + 1 : begin + min((part + 1) * each, before);
    longest = max(longest, end[t] - low[t]);
  }
  for (int run = 0; run < longest; run += KEYS) {
    for (int t = 0; t < count; t++) {
      const int key0 = low[t] + run, keys = min(KEYS, end[t] - key0);
      if (keys <= 0) continue;
      few_run(few + t, k_cache + (size_t)key0 * ROW, v_cache + (size_t)key0 * ROW, keys, t == 0);
    }
  }
  for (int t = 0; t < count; t++) {
    float *o = few[t].o;
    __global float *to = out + ((size_t)t * HEADS + g * GROUP) * HEAD_DIM;
    for (int r = 0; r < GROUP; r++) {
      const float total = lanes_of(few[t].sum[r / FEW], r % FEW);
#ifdef CACHE_CODES
      const float half_step = 0.5f * lanes_of(few[t].steps[r / FEW], r % FEW);
      for (int d = 0; d < HEAD_DIM; d++) o[r * HEAD_DIM + d] += half_step;
#endif
      if (parts == 1) {
        const float inverse = 1.0f / total;
        for (int d = 0; d < HEAD_DIM; d++) to[r * HEAD_DIM + d] = inverse * o[r * HEAD_DIM + d];
        continue;
      }
      __global float *mine = PARTIAL(part, t, g * GROUP + r);
      for (int d = 0; d < HEAD_DIM; d++) mine[d] = o[r * HEAD_DIM + d];
      mine[HEAD_DIM] = few[t].top[r];
      mine[HEAD_DIM + 1] = total;
    }
  }
}

// Work-item (g): every row of its queries out of its parts. `count` is m.
__kernel void combine_few(const int count, __global const float *restrict partial,
                          ARRAY(float, out), const int first, const int parts) {
  const int g = first + get_global_id(0);
  if (count == 0) return;
  AT(out);
  for (int row = 0; row < count * GROUP; row++) {
    const int t = row / GROUP, head = g * GROUP + row % GROUP;
    float top = LOWEST, total = 0, factors[MAX_PARTS];
    for (int s = 0; s < parts; s++) top = larger(top, PARTIAL(s, t, head)[HEAD_DIM]);
    for (int s = 0; s < parts; s++) {
      factors[s] = exp2_scalar(PARTIAL(s, t, head)[HEAD_DIM] - top);
      total += factors[s] * PARTIAL(s, t, head)[HEAD_DIM + 1];
    }
    __global float *to = out + ((size_t)t * HEADS + head) * HEAD_DIM;
    for (int d = 0; d < HEAD_DIM; d++) {
      float x = 0;
      for (int s = 0; s < parts; s++) x += factors[s] * PARTIAL(s, t, head)[d];
      to[d] = x / total;
    }
  }
}
