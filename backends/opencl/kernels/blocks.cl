// Reading weights in blocks (hetero.backends.blocks) one feature at a time. Prepended to files that do.
//
// Defines: BITS, GROUPS, HALVES, MINIMUM, ZERO, E2M1 (hetero.backends.formats.Blocks).

#define ROWS 16
#define GROUP 32
// Codes of weights with a minimum are centred, so that small numbers are added up; the minimum is
// moved by as much (`shift_of`).
#define CENTRE (MINIMUM ? 1 << (BITS == 4 ? 3 : 4) : ZERO)
#define GROUPS_OF(k) (((k) + 31) / GROUP)
#define FLOAT_BYTES (ROWS * 2 * (1 + MINIMUM))
#define SCALE_BYTES (FLOAT_BYTES + ROWS * GROUPS * (HALVES + MINIMUM))

// Word `w` of a group: the low halves of eight codes, and a word with their upper bits.
INLINE uint2 word_of(__global const uint *p, const int block, const int g, const int w,
                     const int lane, const int k) {
  p += ((size_t)block * GROUPS_OF(k) + g) * BITS * ROWS + lane;
  return (uint2)(p[w * ROWS], BITS > 4 ? p[(4 + w / 2) * ROWS] >> (4 * (w % 2)) : 0);
}

INLINE float scale_of(__global const uchar *p, const int block, const int g, const int h,
                      const int lane, const int k) {
  p += ((size_t)block * ((GROUPS_OF(k) + GROUPS - 1) / GROUPS) + g / GROUPS) * SCALE_BYTES;
  const char s = as_char(p[FLOAT_BYTES + (g % GROUPS * HALVES + h) * ROWS + lane]);
  return vload_half(lane, (__global const half *)p) * (float)s;
}

// What is added to (code - CENTRE) * scale.
INLINE float shift_of(__global const uchar *p, const int block, const int g, const int lane,
                      const int k, const float scale) {
#if MINIMUM
  p += ((size_t)block * ((GROUPS_OF(k) + GROUPS - 1) / GROUPS) + g / GROUPS) * SCALE_BYTES;
  const char t = as_char(p[FLOAT_BYTES + (GROUPS * HALVES + g % GROUPS) * ROWS + lane]);
  return (float)CENTRE * scale - vload_half(ROWS + lane, (__global const half *)p) * (float)t;
#else
  return 0.0f;
#endif
}

// Twice the value of a float of 4 bits.
INLINE float e2m1(const uint code) {
  const uint c = code & 7, b0 = c & 1, b1 = c >> 1 & 1, b2 = c >> 2;
  const float size = (float)(c + (b2 & b0) + 2 * (b2 & b1) + 2 * (b2 & b1 & b0));
  return code & 8 ? -size : size;
}

// Feature i of a word.
INLINE float code_of(const uint2 word, const int i) {
  const uint low = (word.x >> (4 * i)) & 15, upper = (word.y >> (8 * (i / 2) + 2 * (i % 2))) & 3;
  return E2M1 ? e2m1(low) : (float)(low | upper << 4) - (float)CENTRE;
}
