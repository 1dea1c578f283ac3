// x [m, k] into tiles of `tokens` tokens for matmul_cpu.cl, zero-padded to whole tiles and to
// `padded` features, so that no row is read beyond its end. One work-item per token tile.

// [tile][feature][token], float32.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack(
    const int count, ARRAY(const float, x), __global float *restrict packed, const int m,
    const int k, const int padded, const int tokens) {
  AT(x);
  const int tile = get_global_id(0);
  if (tile >= count) return;
  packed += (size_t)tile * padded * tokens;
  for (int t = 0; t < tokens; t++) {
    const int token = tile * tokens + t;
    const int filled = token < m ? k : 0;
    __global const float *row = x + (size_t)token * k;
    for (int f = 0; f < filled; f++) packed[(size_t)f * tokens + t] = row[f];
    for (int f = filled; f < padded; f++) packed[(size_t)f * tokens + t] = 0.0f;
  }
}

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
  const float16 m16 = fmax(fabs(a), fabs(b));
  const float8 m8 = fmax(m16.lo, m16.hi);
  const float4 m4 = fmax(m8.lo, m8.hi);
  const float scale = fmax(fmax(m4.x, m4.y), fmax(m4.z, m4.w)) / 127.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  *low = convert_int16_rte(a * inverse);
  *high = convert_int16_rte(b * inverse);
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
      const int line[10] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w,
                            as_int(scale), -8 * (s4.x + s4.y + s4.z + s4.w)};
      for (int i = 0; i < 10; i++) out[i * tokens] = line[i];
    }
  }
}
