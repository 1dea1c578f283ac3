// MatMul on a CPU's vector unit: a work-item walks row blocks, a vector holds 16 rows (lane = row).
// A tile of TOKENS x BLOCKS vectors is accumulated in registers; weights are widened on the fly,
// which hides behind the arithmetic from 4 tokens on, so no panel of widened weights is kept.
//
// Defines: TOKENS, BLOCKS; one of W4A16, W4A8, W8A16, F16, F32; DOT (W4A8): 2 AVX512-VNNI,
// 1 AVX512-BW, 0 what the compiler finds. Layout of weights: hetero.backends.weights.
// x is packed by matmul_pack.cl into tiles of TOKENS tokens.

#define UNROLL _Pragma("unroll")
#define EACH_BLOCK UNROLL for (int r = 0; r < BLOCKS; r++)
#define EACH_TOKEN UNROLL for (int t = 0; t < TOKENS; t++)
#define EACH EACH_BLOCK EACH_TOKEN
#define ROWS 16
#define GROUP 32

// PoCL's vload16 is four quarter loads and three inserts, these are one instruction.
typedef float float16_u __attribute__((ext_vector_type(16), aligned(4)));
typedef uint uint16_u __attribute__((ext_vector_type(16), aligned(4)));
typedef ushort ushort16_u __attribute__((ext_vector_type(16), aligned(2)));
#define LOAD_FLOAT(i, p) (*(const __global float16_u *)((p) + 16 * (i)))
#define LOAD_WORDS(i, p) (*(const __global uint16_u *)((p) + 16 * (i)))
#define LOAD_SHORTS(p) (*(const __global ushort16_u *)(p))
#define INLINE __attribute__((always_inline)) inline

// PoCL's vload_half16 is a call; the instruction is not.
INLINE float16 load_half16(__global const ushort *p) {
#if defined(__AVX512F__)
  const short16 bits = as_short16(LOAD_SHORTS(p));
  return __builtin_ia32_vcvtph2ps512_mask(bits, (float16)(0.0f), (ushort)-1, 4);
#elif defined(__F16C__)
  const short16 bits = as_short16(LOAD_SHORTS(p));
  return (float16)(__builtin_ia32_vcvtph2ps256(bits.lo), __builtin_ia32_vcvtph2ps256(bits.hi));
#else
  return vload_half16(0, (__global const half *)p);
#endif
}

#if defined(W4A8)
typedef uint weight_t;
typedef int x_t;
#define BLOCK_STRIDE(k) ((size_t)(k)*2)
#define X_STRIDE(k) ((size_t)(k) / GROUP * 10 * TOKENS)  // 8 words of codes, scale, correction

#if DOT == 2 && defined(__AVX512VNNI__)
typedef int16 dot_t;
#define DOT_ZERO(correction) (dot_t)(correction)
#define DOT_STEP(sum, w, x) __builtin_ia32_vpdpbusd512(sum, w, (int16)(x))
#define DOT_SUM(sum, correction) (sum)
#elif DOT >= 1 && defined(__AVX512BW__)
// 32 products of at most 15 * 127 in pairs of bytes: 8 steps stay below 2^15.
typedef short dot_t __attribute__((ext_vector_type(32)));
typedef char bytes_t __attribute__((ext_vector_type(64)));
#define BYTES(v) __builtin_astype(v, bytes_t)
#define DOT_ZERO(correction) (dot_t)(0)
#define DOT_STEP(sum, w, x) (sum + __builtin_ia32_pmaddubsw512(BYTES(w), BYTES((int16)(x))))
#define DOT_SUM(sum, correction) (__builtin_ia32_pmaddwd512(sum, (dot_t)(1)) + (int16)(correction))
#elif defined(__AVX2__)
typedef short dot_t __attribute__((ext_vector_type(32)));
typedef char bytes_t __attribute__((ext_vector_type(32)));
#define BYTES(v) __builtin_astype(v, bytes_t)
#define DOT_ZERO(correction) (dot_t)(0)
INLINE dot_t dot_step(dot_t sum, int16 w, int8 x) {
  sum.lo += __builtin_ia32_pmaddubsw256(BYTES(w.lo), BYTES(x));
  sum.hi += __builtin_ia32_pmaddubsw256(BYTES(w.hi), BYTES(x));
  return sum;
}
#define DOT_STEP(sum, w, x) dot_step(sum, w, (int8)(x))
#define DOT_SUM(sum, correction)                                             \
  ((int16)(__builtin_ia32_pmaddwd256((sum).lo, (short16)(1)),                \
           __builtin_ia32_pmaddwd256((sum).hi, (short16)(1))) +              \
   (int16)(correction))
#else
typedef int16 dot_t;
#define DOT_ZERO(correction) (dot_t)(correction)
INLINE dot_t dot_step(dot_t sum, int16 w, int x) {
  UNROLL for (int i = 0; i < 4; i++) sum += ((w >> (8 * i)) & 255) * ((x << (24 - 8 * i)) >> 24);
  return sum;
}
#define DOT_STEP(sum, w, x) dot_step(sum, w, x)
#define DOT_SUM(sum, correction) (sum)
#endif

// One group: exact integers, then one scaled addition. Nibbles stay 0..15; the correction that x
// carries is -8 times the sum of its codes. Even nibbles of a word meet x's even features.
INLINE void add_products(float16 sum[BLOCKS][TOKENS], __global const uint *w[BLOCKS],
                         __global const ushort *scales[BLOCKS], __global const int *x,
                         const int features) {
  for (int g = 0; g < features / GROUP; g++) {
    dot_t dot[BLOCKS][TOKENS];
    EACH dot[r][t] = DOT_ZERO(x[9 * TOKENS + t]);
    UNROLL for (int j = 0; j < 4; j++) {
      uint16 word[BLOCKS];
      EACH_BLOCK word[r] = LOAD_WORDS(g * 4 + j, w[r]);
#if PREFETCH
      EACH_BLOCK __builtin_prefetch(w[r] + (g * 4 + j) * 16 + PREFETCH, 0, 3);
#endif
      UNROLL for (int odd = 0; odd < 2; odd++) EACH {
        const int16 codes = as_int16((word[r] >> (4 * odd)) & 0x0f0f0f0fu);
        dot[r][t] = DOT_STEP(dot[r][t], codes, x[(2 * j + odd) * TOKENS + t]);
      }
    }
    EACH_BLOCK {
      const float16 scale = load_half16(scales[r] + g * ROWS);
      EACH_TOKEN sum[r][t] += convert_float16(DOT_SUM(dot[r][t], x[9 * TOKENS + t])) *
                              (scale * as_float(x[8 * TOKENS + t]));
    }
    x += 10 * TOKENS;
  }
}

#else  // floating-point activations
typedef float x_t;
#define X_STRIDE(k) ((size_t)(k)*TOKENS)

#if defined(W4A16)
typedef uint weight_t;
#define BLOCK_STRIDE(k) ((size_t)(k)*2)
#define FEATURES 8  // per vector of words
typedef int16 word_t;
#define LOAD(p, f) as_int16(LOAD_WORDS((f) / 8, p))
#if defined(__AVX512F__)
// The permutation looks at the index's low 4 bits only: no mask, no conversion.
#define NIBBLES (float16)(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)
#define VALUE(word, i) __builtin_ia32_permvarsf512(NIBBLES, (word) >> (4 * (i)))
#else
#define VALUE(word, i) (convert_float16(((word) >> (4 * (i))) & 15) - 8.0f)
#endif
#elif defined(W8A16)
typedef uint weight_t;
#define BLOCK_STRIDE(k) ((size_t)(k)*4)
#define FEATURES 4
typedef int16 word_t;
#define LOAD(p, f) as_int16(LOAD_WORDS((f) / 4, p))
#define VALUE(word, i) convert_float16(((word) << (24 - 8 * (i))) >> 24)
#else
#define BLOCK_STRIDE(k) ((size_t)(k)*ROWS)
#define FEATURES 1
typedef float16 word_t;
#define VALUE(word, i) (word)
#if defined(F16)
typedef ushort weight_t;
#define LOAD(p, f) load_half16((p) + (f)*ROWS)
#else
typedef float weight_t;
#define LOAD(p, f) LOAD_FLOAT(f, p)
#endif
#endif

// An addition takes 4 cycles: a small tile needs several partial sums to keep the unit busy.
#if TOKENS * BLOCKS >= 8
#define CHAINS 1
#elif TOKENS * BLOCKS >= 4
#define CHAINS 2
#else
#define CHAINS 4
#endif
#define EACH_CHAIN UNROLL for (int c = 0; c < CHAINS; c++)

#define STEP 8
#define ADD_STEP(at, step)                                                         \
  UNROLL for (int f = 0; f < step; f += FEATURES) {                                \
    word_t word[BLOCKS];                                                           \
    EACH_BLOCK word[r] = LOAD(w[r], (at) + f);                                     \
    UNROLL for (int i = 0; i < FEATURES; i++) {                                    \
      float16 value[BLOCKS];                                                       \
      EACH_BLOCK value[r] = VALUE(word[r], i);                                     \
      EACH part[(f + i) % CHAINS][r][t] += x[(size_t)((at) + f + i) * TOKENS + t] * value[r]; \
    }                                                                              \
  }

#if defined(W4A16) || defined(W8A16)
#define SCALE(g) load_half16(scales[r] + (g)*ROWS)
#define CHUNK GROUP
#else
#define SCALE(g) 1.0f
#define CHUNK 64
#endif

// Sums of CHUNK products first: what the scale is applied to, and a shorter chain of roundings.
INLINE void add_products(float16 sum[BLOCKS][TOKENS], __global const weight_t *w[BLOCKS],
                         __global const ushort *scales[BLOCKS], __global const float *x,
                         const int features) {
  for (int start = 0; start < features; start += CHUNK) {
    float16 part[CHAINS][BLOCKS][TOKENS];
    EACH_CHAIN EACH part[c][r][t] = 0.0f;
#if FEATURES > 1
    UNROLL for (int at = 0; at < GROUP; at += STEP) ADD_STEP(start + at, STEP)
#else
    const int end = min(start + CHUNK, features);
    int at = start;
    for (; at + STEP <= end; at += STEP) ADD_STEP(at, STEP)
    for (; at < end; at++) ADD_STEP(at, 1)
#endif
    UNROLL for (int c = 1; c < CHAINS; c++) EACH part[0][r][t] += part[c][r][t];
    EACH_BLOCK {
      const float16 scale = SCALE(start / GROUP);
      EACH_TOKEN sum[r][t] += scale * part[0][r][t];
    }
  }
}
#endif

INLINE float16 load_rows(__global const float *p, const int rows) {
  if (rows >= ROWS) return LOAD_FLOAT(0, p);
  float lanes[ROWS];
  for (int i = 0; i < ROWS; i++) lanes[i] = i < rows ? p[i] : 0.0f;
  return vload16(0, lanes);
}

INLINE void store_rows(const float16 value, __global float *p, const int rows) {
  if (rows >= ROWS) {
    *(__global float16_u *)p = value;
    return;
  }
  float lanes[ROWS];
  vstore16(value, 0, lanes);
  for (int i = 0; i < rows; i++) p[i] = lanes[i];
}

// y[m, n] for row tiles [group * per_group, ...) of `count`. Tokens go in panels of `m_panel` and
// features in panels of `k_panel`, so that the panel of x stays in the L2 cache over all row tiles;
// k_panel is a multiple of 64 or at least k, m_panel a multiple of TOKENS.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void matmul(
    const int count, ARRAY(const weight_t, weights), ARRAY(const ushort, all_scales),
    ARRAY(const float, bias), ARRAY(const x_t, x), ARRAY(float, y), const int m, const int n, const int k, const int m_panel,
    const int k_panel, const int per_group, const int has_bias) {
  AT(weights);
  AT(all_scales);
  AT(bias);
  AT(x);
  AT(y);
  const int first = get_global_id(0) * per_group, last = min(first + per_group, count);
  const int blocks = (n + ROWS - 1) / ROWS;
  for (int m0 = 0; m0 < m; m0 += m_panel)
    for (int k0 = 0; k0 < k; k0 += k_panel)
      for (int tile = first; tile < last; tile++) {
        __global const weight_t *w[BLOCKS];
        __global const ushort *scales[BLOCKS];
        EACH_BLOCK {  // the last tile may have fewer blocks: it computes its last one again
          const size_t block = min(tile * BLOCKS + r, blocks - 1);
          w[r] = weights + block * BLOCK_STRIDE(k) + BLOCK_STRIDE(k0);
          scales[r] = all_scales + (block * k + k0) / 2;
        }
        for (int t0 = m0; t0 < min(m, m0 + m_panel); t0 += TOKENS) {
          float16 sum[BLOCKS][TOKENS];
          EACH {
            const int row = min(tile * BLOCKS + r, blocks - 1) * ROWS, token = min(t0 + t, m - 1);
            sum[r][t] = 0.0f;
            if (k0 > 0)
              sum[r][t] = load_rows(y + (size_t)token * n + row, n - row);
            else if (has_bias)
              sum[r][t] = load_rows(bias + row, n - row);
          }
          add_products(sum, w, scales, x + X_STRIDE(k) * (t0 / TOKENS) + X_STRIDE(k0),
                       min(k_panel, k - k0));
          EACH if (tile * BLOCKS + r < blocks && t0 + t < m) {
            const int row = (tile * BLOCKS + r) * ROWS;
            store_rows(sum[r][t], y + (size_t)(t0 + t) * n + row, n - row);
          }
        }
      }
}
