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

// PoCL's convert_int16_rte and fmax are slow: a sequence and a call where there are instructions.
inline int16 nearest(const float16 v) {
#if defined(__AVX512F__)
  return __builtin_ia32_cvtps2dq512_mask(v, (int16)(0), (ushort)-1, 4);
#elif defined(__AVX2__)
  return (int16)(__builtin_ia32_cvtps2dq256(v.lo), __builtin_ia32_cvtps2dq256(v.hi));
#else
  return convert_int16_rte(v);
#endif
}
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// Scale and codes of one group of 32; a group of zeros has scale 0. `filled` features are read.
inline float quantize_group(__global const float *x, const int filled, int16 *low, int16 *high) {
  float16 a, b;
  if (filled >= 32) {
    a = vload16(0, x);
    b = vload16(1, x);
  } else {
    float values[32];
    for (int i = 0; i < 32; i++) values[i] = i < filled ? x[i] : 0.0f;
    a = vload16(0, values);
    b = vload16(1, values);
  }
  const float16 m16 = MAX(fabs(a), fabs(b));
  const float8 m8 = MAX(m16.lo, m16.hi);
  const float4 m4 = MAX(m8.lo, m8.hi);
  const float scale = MAX(MAX(m4.x, m4.y), MAX(m4.z, m4.w)) / 127.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  *low = nearest(a * inverse);
  *high = nearest(b * inverse);
  return scale;
}

// Words of 4 codes: features 0, 2, 4, 6 and 1, 3, 5, 7 of each 8, as the weights' nibbles come.
inline int4 words(const int16 codes) {
  return as_int4(convert_char16(codes).s024613578ace9bdf);
}

// [tile][group][10][token] int32: 8 words of codes, the scale's bits, -8 times the sum of codes.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void quantize(
    const int count, ARRAY(const float, x), __global int *restrict packed, const int m,
    const int k, const int padded, const int tokens) {
  AT(x);
  const int tile = get_global_id(0);
  if (tile >= count) return;
  packed += (size_t)tile * (padded / 32) * 10 * tokens;
  for (int t = 0; t < tokens; t++) {
    const int token = tile * tokens + t;
    const int filled = token < m ? k : 0;
    for (int g = 0; g < padded / 32; g++) {
      __global int *out = packed + (size_t)g * 10 * tokens + t;
      int16 low, high;
      const float scale =
          quantize_group(x + (size_t)token * k + g * 32, filled - g * 32, &low, &high);
      const int16 s16 = low + high;
      const int8 s8 = s16.lo + s16.hi;
      const int4 s4 = s8.lo + s8.hi;
      const int4 a = words(low), b = words(high);
      // Ten stores: from an array the compiler makes a scatter, which is slower.
      out[0] = a.x;
      out[tokens] = a.y;
      out[2 * tokens] = a.z;
      out[3 * tokens] = a.w;
      out[4 * tokens] = b.x;
      out[5 * tokens] = b.y;
      out[6 * tokens] = b.z;
      out[7 * tokens] = b.w;
      out[8 * tokens] = as_int(scale);
      out[9 * tokens] = -8 * (s4.x + s4.y + s4.z + s4.w);
    }
  }
}
