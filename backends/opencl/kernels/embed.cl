// Embed: y[t] = SCALE · W[tokens[t]] from the packed layouts of `hetero.backends.weights` (rows in
// blocks of 16, lane = row). A work-item takes `groups` groups of 32 features of one token.
// D is the width, STORAGE one of Q4, Q8, Q8R, F16, F32, IN_BLOCKS (behind blocks.cl). `count` is m.

#define Q4 0
#define Q8 1
#define F16 2
#define F32 3
#define Q8R 4
#define IN_BLOCKS 5
#define ROW_GROUPS ((D + 31) / 32)
#if STORAGE == Q8R
#define SCALES float  // of rows
#elif STORAGE == IN_BLOCKS
#define SCALES uchar
#else
#define SCALES half
#endif

// Up to 8 features from a vector; the last group of a row may be cut.
INLINE void store8(const float8 v, __global float *y, const int left) {
  if (left >= 8) {
    vstore8(v, 0, y);
  } else {
    float part[8];
    vstore8(v, 0, part);
    for (int i = 0; i < left; i++) y[i] = part[i];
  }
}

#if STORAGE == Q4
INLINE void group_of(__global const uint *data, __global const half *scales, const size_t block,
                     const int lane, const int g, __global float *y, const int left) {
  const float scale = SCALE * vload_half((block * ROW_GROUPS + g) * 16 + lane, scales);
  __global const uint *words = data + (block * ROW_GROUPS + g) * 64 + lane;
  for (int w = 0; w < 4; w++) {
    const uint8 nibbles = ((uint8)(words[w * 16]) >> (uint8)(0, 4, 8, 12, 16, 20, 24, 28)) & 15u;
    store8((convert_float8(nibbles) - 8.0f) * scale, y + w * 8, left - w * 8);
  }
}
#define DATA uint
#elif STORAGE == Q8 || STORAGE == Q8R
#if STORAGE == Q8
#define SCALE_OF(block, g, lane) vload_half(((block) * ROW_GROUPS + (g)) * 16 + (lane), scales)
#else
#define SCALE_OF(block, g, lane) scales[(block) * 16 + (lane)]
#endif
INLINE void group_of(__global const char *data, __global const SCALES *scales, const size_t block,
                     const int lane, const int g, __global float *y, const int left) {
  const float scale = SCALE * SCALE_OF(block, g, lane);
  __global const char *bytes = data + (block * ROW_GROUPS + g) * 512 + lane * 4;
  for (int w = 0; w < 8; w += 2) {
    const char8 codes = (char8)(vload4(0, bytes + w * 64), vload4(0, bytes + w * 64 + 64));
    store8(convert_float8(codes) * scale, y + w * 4, left - w * 4);
  }
}
#define DATA char
#elif STORAGE == IN_BLOCKS
INLINE void group_of(__global const uint *data, __global const uchar *scales, const size_t block,
                     const int lane, const int g, __global float *y, const int left) {
  for (int w = 0; w < 4; w++) {
    const uint2 word = word_of(data, block, g, w, lane, D);
    const float scale = scale_of(scales, block, g, w * HALVES / 4, lane, D);
    const float shift = shift_of(scales, block, g, lane, D, scale);
    float values[8];
    for (int i = 0; i < 8; i++) values[i] = SCALE * (code_of(word, i) * scale + shift);
    store8(vload8(0, values), y + w * 8, left - w * 8);
  }
}
#define DATA uint
#else
#if STORAGE == F16
#define DATA half
#define ELEMENT(i) vload_half(i, data)
#else
#define DATA float
#define ELEMENT(i) data[i]
#endif
INLINE void group_of(__global const DATA *data, __global const half *scales, const size_t block,
                     const int lane, const int g, __global float *y, const int left) {
  const size_t at = (block * D + g * 32) * 16 + lane;
  for (int i = 0; i < min(32, left); i++) y[i] = SCALE * ELEMENT(at + i * 16);
}
#endif

__kernel void embed(const int count, ARRAY(const int, tokens), ARRAY(float, y),
                    __global const DATA *restrict data, __global const SCALES *restrict scales,
                    const int groups) {
  const int t = get_global_id(1);
  if (t >= count) return;
  AT(tokens); AT(y);
  const int token = tokens[t];
  const int first = (int)get_global_id(0) * groups;
  y += (size_t)t * D;
  for (int g = first; g < min(first + groups, ROW_GROUPS); g++) {
    group_of(data, scales, token / 16, token % 16, g, y + g * 32, D - g * 32);
  }
}
