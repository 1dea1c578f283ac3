// Codes of chunks of keys and values into caches (`DecodeChunks` in ops.py says what they mean).
//
// A chunk's keys, or values, of a head are TOKENS rows of HEAD_DIM: one run both of codes and of the
// cache. HV codes at a time become floats: WORDS words of four bytes, a code in each byte.
//
// KV_HEADS, HEAD_DIM, TOKENS, BY_TOKEN, KEYS_BY_TOKEN come from the record; HV is 4, 8 or 16 and
// divides HEAD_DIM. Caches are for `capacity` tokens.

#define BLOCK (TOKENS * HEAD_DIM)
#define VALUE_ROWS (BY_TOKEN ? TOKENS : 1)
#define KEY_ROWS (KEYS_BY_TOKEN ? TOKENS : 1)
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

// HV codes of a chunk of so many heads; `at` is the first one.
INLINE words_t codes_at(const int bits, bytes_t chunk, const int heads, const int at) {
  bytes_t upper = chunk + 2 * heads * (KEY_ROWS + VALUE_ROWS);
  bytes_t middle = upper + heads * BLOCK / 2;
  bytes_t lower = upper + heads * BLOCK;
  words_t w = twos(upper + at / 4);
  if (bits > 2) w = w << 2 | twos(middle + at / 4);
  if (bits > 4) w = w << 4 | fours(lower + at / 2);
  return w;
}
#define STEP(bits) (bits == 8 ? 0x1p-7f : bits == 4 ? 0x1p-3f : 0x1p-1f)
#define CENTRE(bits) (0.5f - 1 / STEP(bits))

#ifndef CACHE_CODES
// Rows of keys (`channels` are then the head's) or of values. `at` is the run's first code.
INLINE void decode_run(const int bits, bytes_t chunk, const int heads, const int at,
                       const int amplitude, const int rows, __global const float *channels,
                       __global cache_t *to) {
  __global const half *amplitudes = (__global const half *)chunk;
  for (int row = 0; row < rows; row++) {
    const float scale = vload_half(amplitude + row, amplitudes) * STEP(bits);
    const int first = row * (BLOCK / rows), stop = first + BLOCK / rows;
    for (int i = first + LANE * HV; i < stop; i += LANES * HV) {
      const hfloat code = TO_FLOATS(codes_at(bits, chunk, heads, at + i)) + CENTRE(bits);
      CSTORE(code * (channels ? scale * HLOAD(channels + i % HEAD_DIM) : scale), to + i);
    }
  }
}
INLINE void half_run(bytes_t chunk, const int at, __global cache_t *to) {
  __global const half *from = (__global const half *)chunk + at;
  for (int v = LANE * HV; v < BLOCK; v += LANES * HV) CSTORE(HALF_LOAD(from + v), to + v);
}
#else
// HV values of a token, divided by the scales that the cache has for them.
INLINE hfloat scaled_at(const int bits, bytes_t chunk, const int heads, const int at,
                        const float scale, const int d, __global const float *channels,
                        __global const float *own) {
  hfloat x;
  if (bits == 16) {
    x = HALF_LOAD((__global const half *)chunk + at + d);
  } else {
    const hfloat code = TO_FLOATS(codes_at(bits, chunk, heads, at + d)) + CENTRE(bits);
    x = code * (channels ? scale * HLOAD(channels + d) : scale);
  }
  return own ? x / HLOAD(own + d) : x;
}

// As `decode_run`, of codes or (16 bits) halves, into rows of codes: those of 8 bits as they are
// where the cache `moves` them.
INLINE void code_run(const int bits, bytes_t chunk, const int heads, const int at,
                     const int amplitude, const int rows, __global const float *channels,
                     __global const float *own, const int moves, __global cache_t *to) {
  __global const half *amplitudes = (__global const half *)chunk;
  for (int t = LANE; t < TOKENS; t += LANES) {
    __global cache_t *row = to + t * ROW;
    const int first = at + t * HEAD_DIM;
    float scale = 0;
    if (bits < 16) scale = vload_half(amplitude + (rows > 1 ? t : 0), amplitudes) * STEP(bits);
    if (bits == 8 && moves) {
      for (int d = 0; d < HEAD_DIM; d += HV) {
        code_store(TO_FLOATS(codes_at(bits, chunk, heads, first + d)), row + d);
      }
      *(__global float *)(row + ROW - 4) = scale;
      continue;
    }
    float values[HEAD_DIM], most = 0;
    for (int d = 0; d < HEAD_DIM; d += HV) {
      const hfloat x = scaled_at(bits, chunk, heads, first, scale, d, channels, own);
      CAT(vstore, HV)(x, 0, values + d);
    }
    for (int d = 0; d < HEAD_DIM; d++) most = fmax(most, fabs(values[d]));
    const float largest = rounded_up(most), divisor = largest > 0 ? largest : 1;
    for (int d = 0; d < HEAD_DIM; d += HV) {
      code_store((CAT(vload, HV)(0, values + d) / divisor + 1.0f) * 128.0f, row + d);
    }
    *(__global float *)(row + ROW - 4) = largest * 0x1p-7f;
  }
}

// Whether the cache of the keys has these scales of channels.
INLINE int same_channels(__global const float *channels, __global const cache_t *k_cache,
                         const int capacity) {
  for (int g = 0; g < KV_HEADS; g++) {
    __global const float *own = CHANNELS_OF(HEAD_OF(k_cache, g, capacity), capacity);
    for (int d = 0; d < HEAD_DIM; d++) {
      if (own[d] != channels[g * HEAD_DIM + d]) return 0;
    }
  }
  return 1;
}
#endif

// Work-group (i of n, part): every n-th chunk's keys, or values, of a head. `count` is m. A chunk has
// all heads, or those of its mask.
__kernel void decode_chunks(const int count, ARRAY(const int, table), ARRAY(const uchar, codes),
                            ARRAY(cache_t, k_cache), ARRAY(cache_t, v_cache),
                            __global const float *restrict channels, const int capacity) {
  const int part = get_global_id(1), is_value = part >= KV_HEADS, g = part % KV_HEADS;
  AT(table); AT(codes); AT(k_cache); AT(v_cache);
  const int rows = is_value ? VALUE_ROWS : KEY_ROWS;
  __global const float *own = is_value ? 0 : channels + g * HEAD_DIM;
  __global cache_t *head = HEAD_OF(is_value ? v_cache : k_cache, g, capacity);
#ifdef CACHE_CODES
  __global const float *cached = is_value ? 0 : CHANNELS_OF(head, capacity);
  const int moves = same_channels(channels, k_cache, capacity);
#define DECODE(b) \
  code_run(b, chunk, heads, at, amplitude, rows, own, cached, moves && bits == 8, to)
#define HALVES() DECODE(16)
#else
#define DECODE(b) decode_run(b, chunk, heads, at, amplitude, rows, own, to)
#define HALVES() half_run(chunk, at, to)
#endif
  for (int i = get_group_id(0); i < count; i += get_num_groups(0)) {
    const int bits = table[4 * i + 1], mask = table[4 * i + 3];
    if (mask && !(mask >> g & 1)) continue;
    const int heads = mask ? popcount(mask) : KV_HEADS;
    const int place = mask ? popcount(mask & ((1 << g) - 1)) : g;
    const int at = (is_value ? heads + place : place) * BLOCK;
    const int amplitude = is_value ? heads * KEY_ROWS + place * VALUE_ROWS : place * KEY_ROWS;
    bytes_t chunk = codes + table[4 * i + 2];
    __global cache_t *to = head + (size_t)table[4 * i] * ROW;
    if (bits == 16) {
      HALVES();
    } else if (bits == 8 || bits == 6 && !is_value) {
      DECODE(8);
    } else if (bits == 4 || bits == 6 || bits == 3 && !is_value) {
      DECODE(4);
    } else if (bits == 3 || bits == 2) {
      DECODE(2);
    }
  }
}
