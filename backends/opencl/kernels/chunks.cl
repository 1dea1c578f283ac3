// Codes of chunks of keys and values into caches (`DecodeChunks` in ops.py says what they mean).
//
// A chunk's keys, or values, of a head are TOKENS rows of HEAD_DIM: one run both of codes and of the
// cache. HV codes at a time become floats: WORDS words of four bytes, a code in each byte.
//
// KV_HEADS, HEAD_DIM, TOKENS, BY_TOKEN come from the record; HV is 4, 8 or 16 and divides
// HEAD_DIM.

#define BLOCK (TOKENS * HEAD_DIM)
#define VALUES (2 * KV_HEADS * BLOCK)
#define VALUE_ROWS (BY_TOKEN ? TOKENS : 1)
#define AMPLITUDES (KV_HEADS * (1 + VALUE_ROWS))
#if HV == 16
#define WORDS 4
#elif HV == 8
#define WORDS 2
#else
#define WORDS 1
#endif
typedef __global const uchar *bytes_t;

#if WORDS == 1
typedef uint words_t;
INLINE words_t of_bytes(bytes_t p) { return p[0]; }
INLINE words_t of_pairs(bytes_t p) { return p[0] | (uint)p[1] << 8; }
#define TO_FLOATS(w) convert_float4(as_uchar4(w))
#elif LANES == 1
typedef CAT(uint, WORDS) words_t;
INLINE words_t of_bytes(bytes_t p) {
  typedef uchar unaligned_t __attribute__((ext_vector_type(WORDS), aligned(1)));
  return __builtin_convertvector(*(__global const unaligned_t *)p, words_t);
}
INLINE words_t of_pairs(bytes_t p) {
  typedef ushort unaligned_t __attribute__((ext_vector_type(WORDS), aligned(1)));
  return __builtin_convertvector(*(__global const unaligned_t *)p, words_t);
}
#define TO_FLOATS(w) __builtin_convertvector(CAT(as_uchar, HV)(w), hfloat)
#else
typedef CAT(uint, WORDS) words_t;
INLINE words_t of_bytes(bytes_t p) { return CAT(convert_uint, WORDS)(CAT(vload, WORDS)(0, p)); }
INLINE words_t of_pairs(bytes_t p) {
  return CAT(convert_uint, WORDS)(CAT(vload, WORDS)(0, (__global const ushort *)p));
}
#define TO_FLOATS(w) CAT(convert_float, HV)(CAT(as_uchar, HV)(w))
#endif

// HV codes of two bits from HV / 4 bytes, and of four bits from HV / 2.
INLINE words_t twos(bytes_t p) {
  words_t w = of_bytes(p);
  w = (w | w << 12) & 0x000F000Fu;
  return (w | w << 6) & 0x03030303u;
}
INLINE words_t fours(bytes_t p) {
  words_t w = of_pairs(p);
  w = (w | w << 8) & 0x00FF00FFu;
  return (w | w << 4) & 0x0F0F0F0Fu;
}

// Rows of keys (`channels` are then the head's) or of values. `at` is the run's first code.
INLINE void decode_run(const int bits, bytes_t chunk, const int at, const int amplitude,
                       const int rows, __global const float *channels, __global cache_t *to) {
  __global const half *amplitudes = (__global const half *)chunk;
  bytes_t upper = chunk + 2 * AMPLITUDES + at / 4;
  bytes_t middle = upper + VALUES / 4;
  bytes_t lower = chunk + 2 * AMPLITUDES + VALUES / 2 + at / 2;
  const float step = bits == 8 ? 0x1p-7f : bits == 4 ? 0x1p-3f : 0x1p-1f;
  const float centre = 0.5f - 1 / step;
  for (int row = 0; row < rows; row++) {
    const float scale = vload_half(amplitude + row, amplitudes) * step;
    const int first = row * (BLOCK / rows), stop = first + BLOCK / rows;
    for (int i = first + LANE * HV; i < stop; i += LANES * HV) {
      words_t w = twos(upper + i / 4);
      if (bits > 2) w = w << 2 | twos(middle + i / 4);
      if (bits > 4) w = w << 4 | fours(lower + i / 2);
      const hfloat code = TO_FLOATS(w) + centre;
      CSTORE(code * (channels ? scale * HLOAD(channels + i % HEAD_DIM) : scale), to + i);
    }
  }
}

#define DECODE(bits) \
  decode_run(bits, chunk, part * BLOCK, amplitude, is_value ? VALUE_ROWS : 1, \
             is_value ? 0 : channels + g * HEAD_DIM, to)

// Work-group (i of n, part): every n-th chunk's keys, or values, of a head. `count` is m.
__kernel void decode_chunks(const int count, ARRAY(const int, table), ARRAY(const uchar, codes),
                            ARRAY(cache_t, k_cache), ARRAY(cache_t, v_cache),
                            __global const float *restrict channels, const int capacity) {
  const int part = get_global_id(1), is_value = part >= KV_HEADS, g = part % KV_HEADS;
  AT(table); AT(codes); AT(k_cache); AT(v_cache);
  const int amplitude = is_value ? KV_HEADS + g * VALUE_ROWS : g;
  for (int i = get_group_id(0); i < count; i += get_num_groups(0)) {
    const int bits = table[3 * i + 1];
    bytes_t chunk = codes + table[3 * i + 2];
    __global cache_t *to = is_value ? v_cache : k_cache;
    to += ((size_t)g * capacity + table[3 * i]) * HEAD_DIM;
    if (bits == 16) {
      __global const half *from = (__global const half *)chunk + part * BLOCK;
      for (int v = LANE * HV; v < BLOCK; v += LANES * HV) CSTORE(HALF_LOAD(from + v), to + v);
    } else if (bits == 8) {
      DECODE(8);
    } else if (bits == 4) {
      DECODE(4);
    } else if (bits == 2) {
      DECODE(2);
    }
  }
}
