// x [m, width] into tiles of TOKENS tokens, zero-padded to whole tiles and to the k features of the
// weights, so that no row is read beyond its end. Prepended to matmul_cpu.cl.
//
// Defines: VEC, TOKENS, and PLANES for integers instead of floats (1: rounded to int8, 2: to 16 bits,
// in words of a pair where the processor multiplies those, else as two planes of int8, the upper and
// the lower bytes; for BLOCKS with ZERO, HALVES and MINIMUM), or W8A8 for codes of one scale.

#define UNROLL _Pragma("unroll")
#define GROUP 32
typedef CAT(int, VEC) vint;

#if PLANES || defined(W8A8)
// PoCL's convert_int_rte and fmax are slow: a sequence and a call where there are instructions.
INLINE vint nearest(const vfloat v) {
#if VEC == 16 && defined(__AVX512F__)
  return __builtin_ia32_cvtps2dq512_mask(v, (vint)(0), (ushort)-1, 4);
#elif VEC == 8 && defined(__AVX2__)
  return __builtin_ia32_cvtps2dq256(v);
#else
  return CAT(CAT(convert_int, VEC), _rte)(v);
#endif
}
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#if VEC == 16
#define VSUM_ALL(v) sum8((v).lo + (v).hi)
#else
#define VSUM_ALL(v) sum8(v)
#endif
INLINE int sum8(const int8 v) {
  const int4 a = v.lo + v.hi;
  return (a.x + a.y) + (a.z + a.w);
}

#define PARTS (GROUP / VEC)
#define EACH_PART UNROLL for (int j = 0; j < PARTS; j++)

// One group of a token, of which `filled` features are read; the others are zero.
INLINE void load_group(vfloat v[PARTS], __global const float *x, const int filled) {
  if (filled >= GROUP) {
    EACH_PART v[j] = VLOAD(x + j * VEC);
  } else {
    float values[GROUP];
    for (int i = 0; i < GROUP; i++) values[i] = i < filled ? x[i] : 0.0f;
    EACH_PART v[j] = VLOAD(values + j * VEC);
  }
}
#endif

#if PLANES
typedef int x_t;
#ifndef BLOCKS
#define ZERO 8
#define HALVES 1
#define MINIMUM 0
#endif
// Per token and group: codes, the scale's bits, the correction of each half.
#define X_WORDS (8 * PLANES + 1 + HALVES)
#define X_SCALES (8 * PLANES)
#define LARGEST (PLANES == 2 ? 32639.0f : 127.0f)  // 127 * 256 + 127
#define X_STRIDE(k) ((size_t)(k) / GROUP * X_WORDS * TOKENS)
#if PLANES == 2 && VEC == 8 && defined(__AVX2__)
#define PAIRS
#endif

#if VEC == 16
#define VMAX_ALL(v) max8(MAX((v).lo, (v).hi))
#else
#define VMAX_ALL(v) max8(v)
#endif
INLINE float max8(const float8 v) {
  const float4 a = MAX(v.lo, v.hi);
  return MAX(MAX(a.x, a.y), MAX(a.z, a.w));
}

#ifdef PAIRS
// Codes 8j and on as pairs: features 0 and 4, 1 and 5, 2 and 6, 3 and 7, as nibbles lie in a word.
INLINE void store_pairs(const vint codes, const int j, __global int *out) {
  const int4 pair = (codes.lo & 0xffff) | (codes.hi << 16);
  out += 4 * j * TOKENS;
  out[0] = pair.x, out[TOKENS] = pair.y, out[2 * TOKENS] = pair.z, out[3 * TOKENS] = pair.w;
}
#endif

// Codes j * VEC and on, as words of 4: features 0, 2, 4, 6 and 1, 3, 5, 7 of each 8, as the weights'
// nibbles come. Stores of single words: from an array the compiler makes a slower scatter.
INLINE void store_codes(const vint codes, const int j, __global int *out) {
  const CAT(char, VEC) bytes = CAT(convert_char, VEC)(codes);
  const int2 low = as_int2(bytes.s02461357);
  out[j * (VEC / 4) * TOKENS] = low.x;
  out[(j * (VEC / 4) + 1) * TOKENS] = low.y;
#if VEC == 16
  const int2 high = as_int2(bytes.s8ace9bdf);
  out[(j * 4 + 2) * TOKENS] = high.x;
  out[(j * 4 + 3) * TOKENS] = high.y;
#endif
}

// One group of one token, of which `filled` features are read: pairs of codes or their planes, the
// upper one first, then the scale's bits and -ZERO times the sum of the codes of each half or, for weights with
// a minimum, the sum of what the codes stand for. A group of zeros has scale 0.
INLINE void quantize_group(__global const float *x, const int filled, __global int *out) {
  vfloat v[PARTS];
  load_group(v, x, filled);
  vfloat largest = 0.0f;
  EACH_PART largest = MAX(largest, MAX(v[j], -v[j]));  // PoCL's fabs is a call
  const float scale = VMAX_ALL(largest) / LARGEST;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  vint total[HALVES];
  UNROLL for (int h = 0; h < HALVES; h++) total[h] = 0;
  EACH_PART {
    const vint codes = nearest(v[j] * inverse);
    total[j * HALVES / PARTS] += codes;
#ifdef PAIRS
    store_pairs(codes, j, out);
#elif PLANES == 2
    const vint upper = (codes + 128) >> 8;
    store_codes(upper, j, out);
    store_codes(codes - (upper << 8), j, out + 8 * TOKENS);
#else
    store_codes(codes, j, out);
#endif
  }
  out[X_SCALES * TOKENS] = as_int(scale);
  UNROLL for (int h = 0; h < HALVES; h++)
    out[(X_SCALES + 1 + h) * TOKENS] = MINIMUM ? as_int(scale * (float)VSUM_ALL(total[h]))
                                               : -ZERO * VSUM_ALL(total[h]);
}

// One tile: [group][X_WORDS][token].
INLINE void pack_tile(__global const float *x, __global int *packed, const int present,
                      const int width, const int k) {
  for (int t = 0; t < TOKENS; t++)
    for (int g = 0; g < k / GROUP; g++)
      quantize_group(x + (size_t)t * width + g * GROUP, (t < present ? width : 0) - g * GROUP,
                     packed + g * X_WORDS * TOKENS + t);
}

#elif defined(W8A8)
typedef int x_t;
#if DOT == 2 && VEC == 16 && defined(__AVX512VNNI__)
#define X_WORDS 8  // per token and group: codes in bytes
#elif (DOT >= 1 && VEC == 16 && defined(__AVX512BW__)) || (VEC == 8 && defined(__AVX2__))
#define X_WORDS 16  // codes in 16 bits
#define PAIRS
#else
#define X_WORDS 8
#endif
#define X_STRIDE(k) (((size_t)(k) / GROUP * X_WORDS + 1) * TOKENS)  // 1: the correction

// Codes j * VEC and on: bytes in order, or pairs of features 0 and 2, then 1 and 3, of each 4, as a
// word of four 8-bit weights is widened.
INLINE void store_codes(const vint codes, const int j, __global int *out) {
#ifdef PAIRS
  const CAT(short, VEC) wide = CAT(convert_short, VEC)(codes);
  const int4 low = as_int4((short8)(wide.s02, wide.s13, wide.s46, wide.s57));
  __global int *to = out + j * (VEC / 2) * TOKENS;
  to[0] = low.x, to[TOKENS] = low.y, to[2 * TOKENS] = low.z, to[3 * TOKENS] = low.w;
#if VEC == 16
  const int4 high = as_int4((short8)(wide.s8a, wide.s9b, wide.sce, wide.sdf));
  to += 4 * TOKENS;
  to[0] = high.x, to[TOKENS] = high.y, to[2 * TOKENS] = high.z, to[3 * TOKENS] = high.w;
#endif
#else
  const CAT(char, VEC) bytes = CAT(convert_char, VEC)(codes);
  __global int *to = out + j * (VEC / 4) * TOKENS;
#if VEC == 16
  const int4 words = as_int4(bytes);
  to[2 * TOKENS] = words.z, to[3 * TOKENS] = words.w;
#else
  const int2 words = as_int2(bytes);
#endif
  to[0] = words.x, to[TOKENS] = words.y;
#endif
}

// One tile: [group][X_WORDS][token], then for each token -128 times the sum of its codes, which
// stands for the offset that makes weights unsigned (matmul_cpu.cl). Codes are rint(x / scale).
INLINE void pack_tile(__global const float *x, __global int *packed, const int present,
                      const int width, const int k, const float scale) {
  for (int t = 0; t < TOKENS; t++) {
    vint total = 0;
    for (int g = 0; g < k / GROUP; g++) {
      vfloat v[PARTS];
      load_group(v, x + (size_t)t * width + g * GROUP, (t < present ? width : 0) - g * GROUP);
      EACH_PART {
        const vfloat steps = v[j] / (vfloat)(scale);
        const vint codes = nearest(MIN(MAX(steps, (vfloat)(-128.0f)), (vfloat)(127.0f)));
        total += codes;
        store_codes(codes, j, packed + g * X_WORDS * TOKENS + t);
      }
    }
    packed[X_STRIDE(k) - TOKENS + t] = -128 * VSUM_ALL(total);
  }
}

#else
typedef float x_t;
#define X_STRIDE(k) ((size_t)(k)*TOKENS)

// PoCL's vload4 and vstore4 are calls.
typedef float float4_u __attribute__((ext_vector_type(4), aligned(4)));
#define LOAD4(p) (*(__global const float4_u *)(p))
#define STORE4(v, p) (*(__global float4_u *)(p) = (v))

// Four rows at a time, transposed in registers. Returns how many features are done.
INLINE int pack_quad(__global const float *x, __global float *packed, const int width) {
  int f = 0;
  for (; f + 4 <= width; f += 4) {
    const float4 a = LOAD4(x + f), b = LOAD4(x + (size_t)width + f);
    const float4 c = LOAD4(x + (size_t)width * 2 + f), d = LOAD4(x + (size_t)width * 3 + f);
    __global float *out = packed + f * TOKENS;
    STORE4((float4)(a.x, b.x, c.x, d.x), out);
    STORE4((float4)(a.y, b.y, c.y, d.y), out + TOKENS);
    STORE4((float4)(a.z, b.z, c.z, d.z), out + 2 * TOKENS);
    STORE4((float4)(a.w, b.w, c.w, d.w), out + 3 * TOKENS);
  }
  return f;
}

// One tile: [feature][token].
INLINE void pack_tile(__global const float *x, __global float *packed, const int present,
                      const int width, const int k) {
  for (int q = 0; q < TOKENS; q += 4) {
    const int done = q + 4 <= min(TOKENS, present)
                         ? pack_quad(x + (size_t)q * width, packed + q, width) : 0;
    for (int t = q; t < min(q + 4, TOKENS); t++) {
      const int filled = t < present ? width : done;
      for (int f = done; f < filled; f++) packed[f * TOKENS + t] = x[(size_t)t * width + f];
      for (int f = filled; f < k; f++) packed[f * TOKENS + t] = 0.0f;
    }
  }
}
#endif

#ifdef W8A8
#define X_SCALE_PARAMETER , const float x_scale
#define X_SCALE , x_scale
#else
#define X_SCALE_PARAMETER
#define X_SCALE
#endif

INLINE void pack_tiles(__global const float *x, __global x_t *packed, const int first,
                       const int last, const int m, const int width,
                       const int k X_SCALE_PARAMETER) {
  for (int tile = first; tile < last; tile++)
    pack_tile(x + (size_t)tile * TOKENS * width, packed + tile * X_STRIDE(k), m - tile * TOKENS,
              width, k X_SCALE);
}

// One work-item per tile of `count`; where matmul itself has a single work-item, it packs instead.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack(
    const int count, ARRAY(const float, x), __global x_t *packed, const int m, const int width,
    const int k X_SCALE_PARAMETER) {
  AT(x);
  const int tile = get_global_id(0);
  pack_tiles(x, packed, tile, min(tile + 1, count), m, width, k X_SCALE);
}

