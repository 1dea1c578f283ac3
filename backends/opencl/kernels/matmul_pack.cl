// x [m, k] into tiles of `tokens` tokens for matmul_cpu.cl, zero-padded to whole tiles and to
// `padded` features, so that no row is read beyond its end. One work-item per token tile.

// Columns [from, to) of one row.
inline void pack_row(__global const float *row, __global float *packed, const int from,
                     const int to, const int tokens) {
  for (int f = from; f < to; f++) packed[(size_t)f * tokens] = row ? row[f] : 0.0f;
}

// Four rows at a time where there are four, transposed in registers.
inline int pack_quad(__global const float *x, __global float *packed, const int k,
                     const int tokens) {
  int f = 0;
  for (; f + 4 <= k; f += 4) {
    const float4 a = vload4(0, x + f), b = vload4(0, x + (size_t)k + f);
    const float4 c = vload4(0, x + (size_t)k * 2 + f), d = vload4(0, x + (size_t)k * 3 + f);
    __global float *out = packed + (size_t)f * tokens;
    vstore4((float4)(a.x, b.x, c.x, d.x), 0, out);
    vstore4((float4)(a.y, b.y, c.y, d.y), 0, out + tokens);
    vstore4((float4)(a.z, b.z, c.z, d.z), 0, out + 2 * tokens);
    vstore4((float4)(a.w, b.w, c.w, d.w), 0, out + 3 * tokens);
  }
  return f;
}

// [tile][feature][token], float32.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack(
    const int count, ARRAY(const float, x), __global float *restrict packed, const int m,
    const int k, const int padded, const int tokens) {
  AT(x);
  const int tile = get_global_id(0);
  if (tile >= count) return;
  packed += (size_t)tile * padded * tokens;
  x += (size_t)tile * tokens * k;
  const int present = min(tokens, m - tile * tokens);
  for (int q = 0; q < tokens; q += 4) {
    const int done = q + 4 <= present ? pack_quad(x + (size_t)q * k, packed + q, k, tokens) : 0;
    for (int t = q; t < min(q + 4, tokens); t++) {
      const int filled = t < present ? k : done;
      pack_row(x + (size_t)t * k, packed + t, done, filled, tokens);
      pack_row(0, packed + t, filled, padded, tokens);
    }
  }
}

// PoCL's convert_int_rte and fmax are slow: a sequence and a call where there are instructions.
typedef CAT(int, VEC) vint;
inline vint nearest(const vfloat v) {
#if VEC == 16 && defined(__AVX512F__)
  return __builtin_ia32_cvtps2dq512_mask(v, (vint)(0), (ushort)-1, 4);
#elif VEC == 8 && defined(__AVX2__)
  return __builtin_ia32_cvtps2dq256(v);
#else
  return CAT(CAT(convert_int, VEC), _rte)(v);
#endif
}
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#if VEC == 16
#define VMAX_ALL(v) max8(MAX((v).lo, (v).hi))
#define VSUM_ALL(v) sum8((v).lo + (v).hi)
#else
#define VMAX_ALL(v) max8(v)
#define VSUM_ALL(v) sum8(v)
#endif
inline float max8(const float8 v) {
  const float4 a = MAX(v.lo, v.hi);
  return MAX(MAX(a.x, a.y), MAX(a.z, a.w));
}
inline int sum8(const int8 v) {
  const int4 a = v.lo + v.hi;
  return (a.x + a.y) + (a.z + a.w);
}

#define UNROLL _Pragma("unroll")
#define GROUP 32
#define PARTS (GROUP / VEC)
#define EACH_PART UNROLL for (int j = 0; j < PARTS; j++)

// One group of one token, of which `filled` features are read. Codes go out as words of 4: features
// 0, 2, 4, 6 and 1, 3, 5, 7 of each 8, as the weights' nibbles come; then the scale's bits and -8
// times the sum of the codes. A group of zeros has scale 0.
inline void quantize_group(__global const float *x, const int filled, __global int *out,
                           const int tokens) {
  vfloat v[PARTS];
  if (filled >= GROUP) {
    EACH_PART v[j] = VLOAD(x + j * VEC);
  } else {
    float values[GROUP];
    for (int i = 0; i < GROUP; i++) values[i] = i < filled ? x[i] : 0.0f;
    EACH_PART v[j] = VLOAD(values + j * VEC);
  }
  vfloat largest = fabs(v[0]);
  EACH_PART largest = MAX(largest, fabs(v[j]));
  const float scale = VMAX_ALL(largest) / 127.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  vint total = 0;
  EACH_PART {  // stores of single words: from an array the compiler makes a slower scatter
    const vint codes = nearest(v[j] * inverse);
    total += codes;
    const CAT(char, VEC) bytes = CAT(convert_char, VEC)(codes);
    const int2 low = as_int2(bytes.s02461357);
    out[j * (VEC / 4) * tokens] = low.x;
    out[(j * (VEC / 4) + 1) * tokens] = low.y;
#if VEC == 16
    const int2 high = as_int2(bytes.s8ace9bdf);
    out[(j * 4 + 2) * tokens] = high.x;
    out[(j * 4 + 3) * tokens] = high.y;
#endif
  }
  out[8 * tokens] = as_int(scale);
  out[9 * tokens] = -8 * VSUM_ALL(total);
}

// [tile][group][10][token] int32.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void quantize(
    const int count, ARRAY(const float, x), __global int *restrict packed, const int m,
    const int k, const int padded, const int tokens) {
  AT(x);
  const int tile = get_global_id(0), groups = padded / GROUP;
  if (tile >= count) return;
  packed += (size_t)tile * groups * 10 * tokens;
  for (int t = 0; t < tokens; t++) {
    const int token = tile * tokens + t;
    const int filled = token < m ? k : 0;
    for (int g = 0; g < groups; g++)
      quantize_group(x + (size_t)token * k + g * GROUP, filled - g * GROUP,
                     packed + (size_t)g * 10 * tokens + t, tokens);
  }
}
