// MatMul on a CPU's vector unit. A vector holds one feature of VEC (8 or 16) rows; a tile of
// TOKENS x VECTORS vectors is accumulated in registers. With AVX-512 weights are widened on the fly:
// a permutation is all it takes, and hides behind the arithmetic from 4 tokens on. Elsewhere WIDEN
// features of a row tile are widened once into the L1 cache and serve all tokens of a panel.
//
// Defines: VEC, TOKENS, VECTORS; one of W4A16, W4A8, W8A16, W8A8, F16, F32; WIDEN (0: on the fly); for
// W4A16 PLANES (2: x in 16 bits, as pairs or two planes of int8), for W4A8 PLANES (1); BLOCKS with
// PLANES, BITS, GROUPS, HALVES, MINIMUM, ZERO and E2M1 (hetero.backends.formats.Blocks); where there
// are planes and for W8A8 DOT (2: AVX512-VNNI, 1: AVX512-BW, 0: what the compiler finds), for these
// formats PREFETCH (32-bit words ahead, 0: not).
// Layout of weights: hetero.backends.weights and blocks. Follows matmul_pack.cl, which packs x.

#define EACH_VEC UNROLL for (int r = 0; r < VECTORS; r++)
#define EACH_TOKEN UNROLL for (int t = 0; t < TOKENS; t++)
#define EACH EACH_VEC EACH_TOKEN
#define ROWS 16  // of a block of the packed layout

typedef CAT(uint, VEC) vuint;
#define AS_VINT CAT(as_int, VEC)
#define TO_VFLOAT CAT(convert_float, VEC)

// PoCL's vload16 is four quarter loads and three inserts; a dereference is one instruction.
typedef float vfloat_u __attribute__((ext_vector_type(VEC), aligned(4)));
typedef uint vuint_u __attribute__((ext_vector_type(VEC), aligned(4)));
typedef ushort vushort_u __attribute__((ext_vector_type(VEC), aligned(2)));
#define LOAD_FLOATS(p) (*(const __global vfloat_u *)(p))
#define LOAD_WORDS(p) (*(const __global vuint_u *)(p))

// PoCL's vload_half is a call per element.
INLINE vfloat load_halves(__global const ushort *p) {
#if VEC == 16 && defined(__AVX512F__)
  const short16 bits = as_short16(*(const __global vushort_u *)p);
  return __builtin_ia32_vcvtph2ps512_mask(bits, (float16)(0.0f), (ushort)-1, 4);
#elif VEC == 8 && defined(__F16C__)
  return __builtin_ia32_vcvtph2ps256(as_short8(*(const __global vushort_u *)p));
#else
  return CAT(vload_half, VEC)(0, (__global const half *)p);
#endif
}

// An addition takes 4 cycles: a small tile needs several partial sums to keep the unit busy.
#if TOKENS * VECTORS >= 8
#define CHAINS 1
#elif TOKENS * VECTORS >= 4
#define CHAINS 2
#else
#define CHAINS 4
#endif
#define EACH_CHAIN UNROLL for (int c = 0; c < CHAINS; c++)

#ifdef PAIRS  // 16-bit factors, two in a word, whose products are added to one of 32
typedef short pairs_t __attribute__((ext_vector_type(2 * VEC)));
#if VEC == 16
#define ADD_PAIRS __builtin_ia32_pmaddwd512
#else
#define ADD_PAIRS __builtin_ia32_pmaddwd256
#endif
#define AS_PAIRS(v) __builtin_astype(v, pairs_t)
#endif

#if defined(W8A8)
typedef uint weight_t;
typedef float scale_t;
#define BLOCK_STRIDE(k) ((size_t)(k)*4)

// Four features of VEC rows times four of a token, added to 32-bit sums without an error.
#ifdef PAIRS
// Bytes 0 and 2, then 1 and 3.
typedef struct {
  pairs_t even, odd;
} codes_t;
INLINE codes_t codes_of(const vuint word) {
  codes_t codes;
  codes.even = (AS_PAIRS(word) << 8) >> 8;
  codes.odd = AS_PAIRS(word) >> 8;
  return codes;
}
#define CODES_DOT(sum, codes, x, t)                                    \
  (sum + ADD_PAIRS((codes).even, AS_PAIRS((vint)((x)[t]))) +           \
   ADD_PAIRS((codes).odd, AS_PAIRS((vint)((x)[TOKENS + (t)]))))
#define FIRST_SUM(correction) 0
#elif DOT == 2 && VEC == 16 && defined(__AVX512VNNI__)
// The instruction takes unsigned bytes on one side: weights + 128.
typedef vint codes_t;
#define codes_of(word) AS_VINT((word) ^ 0x80808080u)
#define CODES_DOT(sum, codes, x, t) __builtin_ia32_vpdpbusd512(sum, codes, (vint)((x)[t]))
#define FIRST_SUM(correction) (correction)
#else
typedef vint codes_t;
#define codes_of(word) AS_VINT(word)
INLINE vint codes_dot(vint sum, const vint w, const int x) {
  UNROLL for (int i = 0; i < 4; i++)
    sum += ((w << (24 - 8 * i)) >> 24) * ((x << (24 - 8 * i)) >> 24);
  return sum;
}
#define CODES_DOT(sum, codes, x, t) codes_dot(sum, codes, (x)[t])
#define FIRST_SUM(correction) 0
#endif
#define QUAD (X_WORDS / 8)  // words of x for 4 features

// Sums of integers over all features, scaled once: x_scale and the row's scale meet as one number.
INLINE void scaled_sums(vfloat sum[VECTORS][TOKENS], __global const uint *w[VECTORS],
                        __global const float *scales[VECTORS], __global const int *x,
                        const int features, const float x_scale) {
  vint part[CHAINS][VECTORS][TOKENS];
  EACH_CHAIN EACH part[c][r][t] = c > 0 ? 0 : FIRST_SUM(x[X_STRIDE(features) - TOKENS + t]);
  for (int g = 0; g < features / GROUP; g++) {
    UNROLL for (int j = 0; j < GROUP / 4; j++) {
      codes_t codes[VECTORS];
      EACH_VEC codes[r] = codes_of(LOAD_WORDS(w[r] + (g * (GROUP / 4) + j) * ROWS));
#if PREFETCH
      EACH_VEC __builtin_prefetch(w[r] + (g * (GROUP / 4) + j) * ROWS + PREFETCH, 0, 3);
#endif
      EACH part[j % CHAINS][r][t] =
          CODES_DOT(part[j % CHAINS][r][t], codes[r], x + QUAD * j * TOKENS, t);
    }
    x += X_WORDS * TOKENS;
  }
  UNROLL for (int c = 1; c < CHAINS; c++) EACH part[0][r][t] += part[c][r][t];
  EACH_VEC {
    const vfloat scale = x_scale * LOAD_FLOATS(scales[r]);
    EACH_TOKEN sum[r][t] = TO_VFLOAT(part[0][r][t]) * scale;
  }
}

#elif defined(BLOCKS)
typedef uchar scale_t;
#else
typedef ushort scale_t;
#endif

#if defined(W8A8)
#elif PLANES
typedef uint weight_t;
#ifdef BLOCKS
#define BLOCK_STRIDE(k) ((size_t)(k) / GROUP * BITS * ROWS)
#else
#define BLOCK_STRIDE(k) ((size_t)(k)*2)
#endif
#ifdef PAIRS
#define SUMS 1  // of integers for one of floats
#if TOKENS * VECTORS >= 8  // unrolled, the compiler holds more of x than there are registers
#define PAIRS_UNROLL _Pragma("unroll 1")
#else
#define PAIRS_UNROLL UNROLL
#endif
#define AS_WORDS CAT(as_uint, VEC)
#define PAIRS_DOT(sum, codes, x) ((sum) + ADD_PAIRS(AS_PAIRS(codes), AS_PAIRS((vint)(x))))

// Eight features, two at a time: nibbles i and i + 4 of a word.
INLINE void add_nibbles(vint dot[VECTORS][TOKENS], vuint word[VECTORS], __global const int *x) {
  PAIRS_UNROLL for (int i = 0; i < 4; i++) {
    vuint pair[VECTORS];
    EACH_VEC pair[r] = word[r] & 0x000f000fu;
    EACH_VEC word[r] >>= 4;
    EACH_TOKEN EACH_VEC dot[r][t] = PAIRS_DOT(dot[r][t], pair[r], x[i * TOKENS + t]);
  }
}
#else
#define SUMS PLANES
#endif
#define EACH_PLANE UNROLL for (int p = 0; p < SUMS; p++)
#define NIBBLES (BITS == 0 || (BITS == 4 && !E2M1))  // BITS: of BLOCKS
#if defined(PAIRS) && NIBBLES
#define STEPS_UNROLL _Pragma("unroll 1")
#else
#define STEPS_UNROLL UNROLL
#endif

#ifdef PAIRS
#elif DOT == 2 && VEC == 16 && defined(__AVX512VNNI__)
typedef vint dot_t;
#define DOT_ZERO(correction) (dot_t)(correction)
#define DOT_STEP(sum, w, x) __builtin_ia32_vpdpbusd512(sum, w, (vint)(x))
#define DOT_SUM(sum, correction) (sum)
#define DOT_UPPER(sum) ((sum) << 8)
#define DOT_PAIR(sum, a, x, b, y) DOT_STEP(DOT_STEP(sum, a, x), b, y)
#elif (DOT >= 1 && VEC == 16 && defined(__AVX512BW__)) || (VEC == 8 && defined(__AVX2__))
// Pairs of products, each at most 15 * 128 in size: the 8 steps of a group stay within 16 bits.
typedef short dot_t __attribute__((ext_vector_type(2 * VEC)));
typedef char bytes_t __attribute__((ext_vector_type(4 * VEC)));
#if VEC == 16
#define MULTIPLY_BYTES __builtin_ia32_pmaddubsw512
#define ADD_PAIRS __builtin_ia32_pmaddwd512
#else
#define MULTIPLY_BYTES __builtin_ia32_pmaddubsw256
#define ADD_PAIRS __builtin_ia32_pmaddwd256
#endif
#define BYTES(v) __builtin_astype(v, bytes_t)
#define DOT_ZERO(correction) (dot_t)(0)
#define DOT_STEP(sum, w, x) (sum + MULTIPLY_BYTES(BYTES(w), BYTES((vint)(x))))
#define DOT_SUM(sum, correction) (ADD_PAIRS(sum, (dot_t)(1)) + (vint)(correction))
#define DOT_UPPER(sum) ADD_PAIRS(sum, (dot_t)(256))
// Codes of 6 bits fill 16 bits in two steps: 4 · 63 · 128.
#define DOT_PAIR(sum, a, x, b, y) \
  (sum + ADD_PAIRS(DOT_STEP(MULTIPLY_BYTES(BYTES(a), BYTES((vint)(x))), b, y), (dot_t)(1)))
#else
typedef vint dot_t;
#define DOT_ZERO(correction) (dot_t)(correction)
INLINE dot_t dot_step(dot_t sum, const vint w, const int x) {
  UNROLL for (int i = 0; i < 4; i++) sum += ((w >> (8 * i)) & 255) * ((x << (24 - 8 * i)) >> 24);
  return sum;
}
#define DOT_STEP(sum, w, x) dot_step(sum, w, x)
#define DOT_SUM(sum, correction) (sum)
#define DOT_UPPER(sum) ((sum) << 8)
#define DOT_PAIR(sum, a, x, b, y) DOT_STEP(DOT_STEP(sum, a, x), b, y)
#endif

#ifdef BLOCKS
#define FLOAT_BYTES (ROWS * 2 * (1 + MINIMUM))
#define SCALE_BYTES (FLOAT_BYTES + ROWS * GROUPS * (HALVES + MINIMUM))
#define SCALES_STRIDE(k) ((((size_t)(k) / GROUP + GROUPS - 1) / GROUPS) * SCALE_BYTES)
#define STEPS (4 / HALVES)  // of 8 features
typedef char vchar_u __attribute__((ext_vector_type(VEC), aligned(1)));

INLINE vfloat load_small(__global const uchar *p) {
  return __builtin_convertvector(*(__global const vchar_u *)p, vfloat);
}

#if E2M1
// Floats of 4 bits (hetero.backends.formats.E2M1): in each byte twice the value, and 12.
#define E2M1_TABLE (uint4)(0x0f0e0d0cu, 0x18141210u, 0x090a0b0cu, 0x00040608u)
#if VEC == 16 && defined(__AVX512BW__)
#define LOOK_UP(c) \
  __builtin_ia32_pshufb512(FOURS((vuint)(E2M1_TABLE.s0123012301230123)), FOURS(c))
#elif VEC == 8 && defined(__AVX2__)
#define LOOK_UP(c) __builtin_ia32_pshufb256(FOURS((vuint)(E2M1_TABLE.s01230123)), FOURS(c))
#endif
typedef char fours_t __attribute__((ext_vector_type(4 * VEC)));
#define FOURS(v) __builtin_astype(v, fours_t)

INLINE vint e2m1(const vuint c) {
#ifdef LOOK_UP
  return __builtin_astype(LOOK_UP(c), vint);
#else
  const vuint b0 = c & 0x01010101u, b1 = (c >> 1) & 0x01010101u, b2 = (c >> 2) & 0x01010101u;
  const vuint both = b2 & b1;
  const vuint size = (c & 0x07070707u) + (b2 & b0) + (both << 1) + ((both & b0) << 1);
  const vuint minus = ((c >> 3) & 0x01010101u) * 255u;
  return AS_VINT(0x0c0c0c0cu - (size & minus) + (size & ~minus));
#endif
}
#endif

// Codes of 4 features of a word of 8, even or odd, with the upper bits of 6.
INLINE vint codes_of(const vuint word, const vuint upper, const int j, const int odd) {
  const vuint low = (word >> (4 * odd)) & 0x0f0f0f0fu;
#if E2M1
  return e2m1(low);
#elif BITS > 4
  const int up = 4 - 4 * (j & 1) - 2 * odd;
  return AS_VINT(low | ((up >= 0 ? upper << max(up, 0) : upper >> max(-up, 0)) & 0x30303030u));
#else
  return AS_VINT(low);
#endif
}

// One group: exact integers, then one scaled addition for each half; the minimum is multiplied with
// the sum of x. `lane` is that of the first row in its block.
INLINE void add_group(vfloat sum[VECTORS][TOKENS], __global const uint *w[VECTORS],
                      __global const uchar *small[VECTORS], const vfloat d[VECTORS],
                      const vfloat e[VECTORS], __global const int *x) {
  UNROLL for (int h = 0; h < HALVES; h++) {
    vint dot[SUMS][VECTORS][TOKENS];
    EACH_PLANE EACH dot[p][r][t] =
        p < SUMS - 1 || MINIMUM ? 0 : x[(X_SCALES + 1 + h) * TOKENS + t];
    STEPS_UNROLL for (int j = h * STEPS; j < (h + 1) * STEPS; j++) {
      vuint word[VECTORS], upper[VECTORS];
      EACH_VEC word[r] = LOAD_WORDS(w[r] + j * ROWS);
      EACH_VEC upper[r] = BITS > 4 ? LOAD_WORDS(w[r] + (4 + j / 2) * ROWS) : word[r];
#if PREFETCH
      EACH_VEC __builtin_prefetch(w[r] + j * ROWS + PREFETCH, 0, 3);
      if (BITS > 4 && j % 2) EACH_VEC __builtin_prefetch(w[r] + (4 + j / 2) * ROWS + PREFETCH, 0, 3);
#endif
#if defined(PAIRS) && NIBBLES
      add_nibbles(dot[0], word, x + 4 * j * TOKENS);
#elif defined(PAIRS)
      vuint even[VECTORS], odd[VECTORS];
      EACH_VEC even[r] = AS_WORDS(codes_of(word[r], upper[r], j, 0));
      EACH_VEC odd[r] = AS_WORDS(codes_of(word[r], upper[r], j, 1));
      PAIRS_UNROLL for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        vuint first[VECTORS], second[VECTORS];
        EACH_VEC first[r] = even[r] & 0x00ff00ffu;
        EACH_VEC second[r] = odd[r] & 0x00ff00ffu;
        EACH_VEC even[r] >>= 8;
        EACH_VEC odd[r] >>= 8;
        EACH_TOKEN EACH_VEC dot[0][r][t] = PAIRS_DOT(dot[0][r][t], first[r], x[i * TOKENS + t]);
        EACH_TOKEN EACH_VEC
          dot[0][r][t] = PAIRS_DOT(dot[0][r][t], second[r], x[(i + 1) * TOKENS + t]);
      }
#else
      EACH_VEC {
        const vint even = codes_of(word[r], upper[r], j, 0), odd = codes_of(word[r], upper[r], j, 1);
        EACH_TOKEN EACH_PLANE {
          __global const int *codes = x + (8 * p + 2 * j) * TOKENS + t;
          dot[p][r][t] = DOT_PAIR(dot[p][r][t], even, codes[0], odd, codes[TOKENS]);
        }
      }
#endif
    }
    EACH_VEC {
      const vfloat scale = d[r] * load_small(small[r] + h * ROWS);
      EACH_TOKEN {
        vint product = dot[SUMS - 1][r][t];
        if (SUMS == 2) product += dot[0][r][t] << 8;
        sum[r][t] += TO_VFLOAT(product) * (scale * as_float(x[X_SCALES * TOKENS + t]));
      }
    }
  }
#if MINIMUM
  EACH_VEC {
    const vfloat least = e[r] * load_small(small[r] + ROWS * GROUPS * HALVES);
    EACH_TOKEN sum[r][t] -= least * as_float(x[(X_SCALES + 1) * TOKENS + t]);
  }
#endif
}

INLINE void add_blocks(vfloat sum[VECTORS][TOKENS], __global const uint *w[VECTORS],
                       __global const uchar *scales[VECTORS], const int lane[VECTORS],
                       __global const int *x, const int features) {
  for (int first = 0; first < features / GROUP; first += GROUPS) {
    vfloat d[VECTORS], e[VECTORS];
    __global const uchar *at[VECTORS];
    EACH_VEC {
      at[r] = scales[r] + (size_t)(first / GROUPS) * SCALE_BYTES;
      d[r] = load_halves((__global const ushort *)at[r] + lane[r]);
      e[r] = MINIMUM ? load_halves((__global const ushort *)at[r] + ROWS + lane[r]) : d[r];
      at[r] += FLOAT_BYTES + lane[r];
    }
    for (int g = first; g < min(first + GROUPS, features / GROUP); g++) {
      __global const uint *word[VECTORS];
      __global const uchar *small[VECTORS];
      EACH_VEC {
        word[r] = w[r] + (size_t)g * BITS * ROWS;
        small[r] = at[r] + (g - first) * HALVES * ROWS;
      }
      add_group(sum, word, small, d, e, x);
      x += X_WORDS * TOKENS;
    }
  }
}

#else

// One group: exact integers (of 16 bits of x below 2^24: exact as floats as well), then one scaled
// addition. Nibbles stay 0..15; the correction that x carries, for the last plane, is -8 times the sum
// of its codes. Even nibbles of a word meet x's even features.
INLINE void add_products(vfloat sum[VECTORS][TOKENS], __global const uint *w[VECTORS],
                         __global const ushort *scales[VECTORS], __global const int *x,
                         const int features) {
  for (int g = 0; g < features / GROUP; g++) {
    __global const int *correction = x + (X_WORDS - 1) * TOKENS;
#ifdef PAIRS
    vint dot[VECTORS][TOKENS];
    EACH dot[r][t] = correction[t];
#else
    dot_t dot[PLANES][VECTORS][TOKENS];
    EACH_PLANE EACH dot[p][r][t] = DOT_ZERO(p < PLANES - 1 ? 0 : correction[t]);
#endif
    STEPS_UNROLL for (int j = 0; j < 4; j++) {
      vuint word[VECTORS];
      EACH_VEC word[r] = LOAD_WORDS(w[r] + (g * 4 + j) * ROWS);
#if PREFETCH
      EACH_VEC __builtin_prefetch(w[r] + (g * 4 + j) * ROWS + PREFETCH, 0, 3);
#endif
#ifdef PAIRS
      add_nibbles(dot, word, x + 4 * j * TOKENS);
#else
      UNROLL for (int odd = 0; odd < 2; odd++) EACH {
        const vint codes = AS_VINT((word[r] >> (4 * odd)) & 0x0f0f0f0fu);
        EACH_PLANE
          dot[p][r][t] = DOT_STEP(dot[p][r][t], codes, x[(8 * p + 2 * j + odd) * TOKENS + t]);
      }
#endif
    }
    EACH_VEC {
      const vfloat scale = load_halves(scales[r] + g * ROWS);
      EACH_TOKEN {
#ifdef PAIRS
        const vint product = dot[r][t];
#else
        vint product = DOT_SUM(dot[PLANES - 1][r][t], correction[t]);
        if (PLANES == 2) product += DOT_UPPER(dot[0][r][t]);
#endif
        sum[r][t] += TO_VFLOAT(product) * (scale * as_float(x[X_SCALES * TOKENS + t]));
      }
    }
    x += X_WORDS * TOKENS;
  }
}
#endif

#else  // floating-point activations

#if defined(W4A16)
typedef uint weight_t;
typedef vint word_t;
#define BLOCK_STRIDE(k) ((size_t)(k)*2)
#define FEATURES 8  // per vector of words
#define LOAD(p, f) AS_VINT(LOAD_WORDS((p) + (f) / FEATURES * ROWS))
#if VEC == 16 && defined(__AVX512F__)
// The permutation looks at the index's low 4 bits only: no mask, no conversion.
#define NIBBLE_VALUES (float16)(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)
#define VALUE(word, i) __builtin_ia32_permvarsf512(NIBBLE_VALUES, (word) >> (4 * (i)))
#else
#define VALUE(word, i) (TO_VFLOAT(((word) >> (4 * (i))) & 15) - 8.0f)
#endif
#elif defined(W8A16)
typedef uint weight_t;
typedef vint word_t;
#define BLOCK_STRIDE(k) ((size_t)(k)*4)
#define FEATURES 4
#define LOAD(p, f) AS_VINT(LOAD_WORDS((p) + (f) / FEATURES * ROWS))
#define VALUE(word, i) TO_VFLOAT(((word) << (24 - 8 * (i))) >> 24)
#else
typedef vfloat word_t;
#define BLOCK_STRIDE(k) ((size_t)(k)*ROWS)
#define FEATURES 1
#define VALUE(word, i) (word)
#if defined(F16)
typedef ushort weight_t;
#define LOAD(p, f) load_halves((p) + (f)*ROWS)
#else
typedef float weight_t;
#define LOAD(p, f) LOAD_FLOATS((p) + (f)*ROWS)
#endif
#endif

#define STEP 8
#define ADD_STEP(at, step)                                                             \
  UNROLL for (int f = 0; f < step; f += FEATURES) {                                    \
    word_t word[VECTORS];                                                              \
    EACH_VEC word[r] = LOAD(w[r], (at) + f);                                        \
    UNROLL for (int i = 0; i < FEATURES; i++) {                                        \
      vfloat value[VECTORS];                                                           \
      EACH_VEC value[r] = VALUE(word[r], i);                                        \
      EACH part[(f + i) % CHAINS][r][t] += x[((at) + f + i) * TOKENS + t] * value[r]; \
    }                                                                                  \
  }

#if FEATURES > 1
#define SCALE(g) load_halves(scales[r] + (g)*ROWS)
#define CHUNK GROUP
#else
#define SCALE(g) 1.0f
#define CHUNK 64
#endif

// Sums of CHUNK products first: what the scale is applied to, and a shorter chain of roundings.
INLINE void add_products(vfloat sum[VECTORS][TOKENS], __global const weight_t *w[VECTORS],
                         __global const ushort *scales[VECTORS], __global const float *x,
                         const int features) {
  for (int start = 0; start < features; start += CHUNK) {
    vfloat part[CHAINS][VECTORS][TOKENS];
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
    EACH_VEC {
      const vfloat scale = SCALE(start / GROUP);
      EACH_TOKEN sum[r][t] += scale * part[0][r][t];
    }
  }
}
#endif

#if WIDEN
#define WIDTH (VECTORS * VEC)

// [feature][WIDTH] scaled weights; a multiple of FEATURES features.
INLINE void widen(__global const weight_t *w[VECTORS], __global const ushort *scales[VECTORS],
                  float *panel, const int features) {
  for (int at = 0; at < features; at += FEATURES) EACH_VEC {
    const vfloat scale = SCALE(at / GROUP);
    const word_t word = LOAD(w[r], at);
    UNROLL for (int i = 0; i < FEATURES; i++)
      VSTORE(scale * VALUE(word, i), panel + (at + i) * WIDTH + r * VEC);
  }
}

// One broadcast of x at a time, next to its uses: more would not fit the registers of AVX2.
INLINE void add_widened(vfloat sum[VECTORS][TOKENS], const float *panel, __global const float *x,
                        const int features) {
  vfloat part[VECTORS][TOKENS];
  EACH part[r][t] = 0.0f;
  _Pragma("unroll 4") for (int f = 0; f < features; f++) {
    vfloat value[VECTORS];
    EACH_VEC value[r] = VLOAD(panel + r * VEC);
    EACH_TOKEN {
      const float one = x[t];
      EACH_VEC part[r][t] += one * value[r];
    }
    panel += WIDTH;
    x += TOKENS;
  }
  EACH sum[r][t] += part[r][t];
}
#endif

INLINE vfloat load_rows(__global const float *p, const int rows) {
  if (rows >= VEC) return LOAD_FLOATS(p);
  float lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = i < rows ? p[i] : 0.0f;
  return VLOAD(lanes);
}

INLINE void store_rows(const vfloat value, __global float *p, const int rows) {
  if (rows >= VEC) {
    *(__global vfloat_u *)p = value;
    return;
  }
  float lanes[VEC];
  VSTORE(value, lanes);
  for (int i = 0; i < rows; i++) p[i] = lanes[i];
}

#define IN_PLACE 0   // x is one token of floats that needs no padding
#define PACK_HERE 1  // each work-item packs x first, in a place of its own
#define PACKED 2     // the kernel `pack` has run

// Columns of row tile `tile` of y, from features [k0, k0 + k_panel) and tokens [m0, m1) of m; `row0` is
// the first row of y in the weights. The last tile may have fewer vectors: it computes its last one
// again.
INLINE void row_tile(__global const weight_t *weights, __global const scale_t *all_scales,
                     __global const float *bias, __global const x_t *inputs, __global float *y,
                     const int tile, const int row0, const int n, const int stride, const int k,
                     const int m, const int m0, const int m1, const int k0, const int k_panel,
                     const int has_bias X_SCALE_PARAMETER) {
  const int vectors = (n + VEC - 1) / VEC;
  int row[VECTORS], lane[VECTORS];
  __global const weight_t *w[VECTORS];
  __global const scale_t *scales[VECTORS];
  EACH_VEC {
    row[r] = min(tile * VECTORS + r, vectors - 1) * VEC;
    const size_t block = (row0 + row[r]) / ROWS;
    lane[r] = (row0 + row[r]) % ROWS;
    w[r] = weights + block * BLOCK_STRIDE(k) + BLOCK_STRIDE(k0) + lane[r];
#if defined(W8A8)
    scales[r] = all_scales + row0 + row[r];
#elif defined(BLOCKS)
    scales[r] = all_scales + block * SCALES_STRIDE(k) + SCALES_STRIDE(k0);
#else
    scales[r] = all_scales + (block * k + k0) / 2 + lane[r];
#endif
  }
#if WIDEN
  float panel[WIDEN * WIDTH];
  widen(w, scales, panel, min(k_panel, k - k0));
#endif
  for (int t0 = m0; t0 < m1; t0 += TOKENS) {
    vfloat sum[VECTORS][TOKENS];
#if defined(W8A8)  // k_panel is k
    scaled_sums(sum, w, scales, inputs + X_STRIDE(k) * (t0 / TOKENS), k, x_scale);
    if (has_bias) EACH sum[r][t] += load_rows(bias + row[r], n - row[r]);
#else
    EACH {
      const size_t token = min(t0 + t, m - 1);
      sum[r][t] = 0.0f;
      if (k0 > 0)
        sum[r][t] = load_rows(y + token * stride + row[r], n - row[r]);
      else if (has_bias)
        sum[r][t] = load_rows(bias + row[r], n - row[r]);
    }
    __global const x_t *input = inputs + X_STRIDE(k) * (t0 / TOKENS) + X_STRIDE(k0);
#if WIDEN
    add_widened(sum, panel, input, min(k_panel, k - k0));
#elif defined(BLOCKS)
    add_blocks(sum, w, scales, lane, input, min(k_panel, k - k0));
#else
    add_products(sum, w, scales, input, min(k_panel, k - k0));
#endif
#endif
    EACH if (tile * VECTORS + r < vectors && t0 + t < m)
      store_rows(sum[r][t], y + (size_t)(t0 + t) * stride + row[r], n - row[r]);
  }
}

// y[m, n], whose tokens are `stride` apart, for row tiles [group * per_group, ...) of `count`. Tokens
// go in panels of `m_panel` and features in panels of `k_panel`, so that a panel of x is still in cache for the next row tile;
// k_panel is a multiple of 64 (of whole blocks) or at least k, m_panel a multiple of TOKENS or at least m.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void matmul(
    const int count, ARRAY(const weight_t, weights), ARRAY(const scale_t, all_scales),
    ARRAY(const float, bias), ARRAY(const float, x), __global x_t *packed, ARRAY(float, y),
    const int m, const int n, const int stride, const int width, const int k, const int m_panel,
    const int k_panel, const int per_group, const int has_bias, const int packing X_SCALE_PARAMETER) {
  AT(weights);
  AT(all_scales);
  AT(bias);
  AT(x);
  AT(y);
  const int first = get_global_id(0) * per_group, last = min(first + per_group, count);
  if (packing == PACK_HERE && last > first) {
    const int token_tiles = (m + TOKENS - 1) / TOKENS;
    packed += (size_t)get_global_id(0) * token_tiles * X_STRIDE(k);
    pack_tiles(x, packed, 0, token_tiles, m, width, k X_SCALE);
  }
#if PLANES || defined(W8A8)
  __global const x_t *inputs = packed;
#else
  __global const x_t *inputs = packing == IN_PLACE ? x : packed;
#endif
  for (int m0 = 0; m0 < m; m0 += m_panel)
    for (int k0 = 0; k0 < k; k0 += k_panel)
      for (int tile = first; tile < last; tile++)
        row_tile(weights, all_scales, bias, inputs, y, tile, 0, n, stride, k, m, m0,
                 min(m, m0 + m_panel), k0, k_panel, has_bias X_SCALE);
}
