// Vectors of HV elements of caches of keys and values: floats, with CACHE_HALF halves, with
// CACHE_CODES codes with a scale behind each row (backends/kv_rows.py says what they mean).
// ROW is what lies between two tokens of a head, HEAD_ROWS the rows of a head of a cache for
// `capacity` tokens, HEAD_OF where head g begins: beyond 2^31 elements from the first, maybe.

#if HV == 1
#define HALF_LOAD(p) vload_half(0, p)
#define HALF_STORE(v, p) vstore_half_rte(v, 0, p)
#elif LANES == 1 && HV == 16 && defined(__AVX512F__)
// PoCL's vload_half and vstore_half are a call per element.
typedef short halves_t __attribute__((ext_vector_type(16), aligned(2)));
INLINE hfloat HALF_LOAD(__global const half *p) {
  const short16 bits = *(__global const halves_t *)p;
  return __builtin_ia32_vcvtph2ps512_mask(bits, (float16)(0.0f), (ushort)-1, 4);
}
INLINE void HALF_STORE(const hfloat v, __global half *p) {
  *(__global halves_t *)p = __builtin_ia32_vcvtps2ph512_mask(v, 0, (short16)(0), (ushort)-1);
}
#elif LANES == 1 && HV == 8 && defined(__F16C__)
typedef short halves_t __attribute__((ext_vector_type(8), aligned(2)));
INLINE hfloat HALF_LOAD(__global const half *p) {
  return __builtin_ia32_vcvtph2ps256(as_short8(*(__global const halves_t *)p));
}
INLINE void HALF_STORE(const hfloat v, __global half *p) {
  *(__global halves_t *)p = __builtin_ia32_vcvtps2ph256(v, 0);
}
#else
#define HALF_LOAD(p) CAT(vload_half, HV)(0, p)
#define HALF_STORE(v, p) CAT(CAT(vstore_half, HV), _rte)(v, 0, p)
#endif

#if defined(CACHE_CODES)
typedef char cache_t;
#define ROW ((HEAD_DIM + 3) / 4 * 4 + 4)
#define HEAD_ROWS(capacity) ((size_t)(capacity) + 4)
#elif defined(CACHE_HALF)
typedef half cache_t;
#define CLOAD(p) HALF_LOAD(p)
#define CLOAD1(p) vload_half(0, p)
#define CSTORE(v, p) HALF_STORE(v, p)
#define CSTORE1(x, p) vstore_half_rte(x, 0, p)
#else
typedef float cache_t;
#define CLOAD(p) HLOAD(p)
#define CLOAD1(p) (*(p))
#define CSTORE(v, p) HSTORE(v, p)
#define CSTORE1(x, p) (*(p) = (x))
#endif

#ifdef CACHE_CODES
// A token's step; the scales of the channels behind a head's tokens.
#define STEP_OF(row) (*(__global const float *)((row) + ROW - 4))
#define CHANNELS_OF(head, capacity) ((__global const float *)((head) + (size_t)(capacity) * ROW))

// CODES_OF: without their scales. CLOAD: and a half, which a code stands for.
#define CLOAD1(p) (*(p) + 0.5f)
#define CLOAD(p) (CODES_OF(p) + 0.5f)
#if HV == 1
INLINE float CODES_OF(__global const cache_t *p) { return *p; }
INLINE void code_store(const float x, __global cache_t *p) { *p = min((int)x, 255) - 128; }
#elif LANES == 1
typedef char codes_t __attribute__((ext_vector_type(HV), aligned(1)));
INLINE hfloat CODES_OF(__global const cache_t *p) {
  return __builtin_convertvector(*(__global const codes_t *)p, hfloat);
}
INLINE void code_store(const hfloat x, __global cache_t *p) {
  const CAT(int, HV) code = min(__builtin_convertvector(x, CAT(int, HV)), 255) - 128;
  *(__global codes_t *)p = __builtin_convertvector(code, codes_t);
}
#else
INLINE hfloat CODES_OF(__global const cache_t *p) {
  return CAT(convert_float, HV)(CAT(vload, HV)(0, p));
}
INLINE void code_store(const hfloat x, __global cache_t *p) {
  const CAT(int, HV) code = min(CAT(convert_int, HV)(x), 255) - 128;
  CAT(vstore, HV)(CAT(convert_char, HV)(code), 0, p);
}
#endif

// To the next that a half has; as it is beyond its range, and NaN.
INLINE float rounded_up(const float x) {
  if (x < 0x1p-14f) {
    const int units = (int)(x * 0x1p24f);
    return (units + (units < x * 0x1p24f)) * 0x1p-24f;
  }
  return !(x <= 65504.0f) ? x : as_float((as_uint(x) + 0x1FFFu) & 0xFFFFE000u);
}

// A token of a head; `channels` of keys alone.
INLINE void code_row(__global const float *from, __global cache_t *to, const bool keys,
                     __global const float *channels) {
#define SCALED(c) (keys ? HLOAD(from + (c) * HV) / HLOAD(channels + (c) * HV) \
                        : HLOAD(from + (c) * HV))
  float most = 0;
  for (int d = 0; d < HEAD_DIM; d++) {
    const float x = fabs(keys ? from[d] / channels[d] : from[d]);
    most = x > most || x != x ? x : most;
  }
  const float amplitude = rounded_up(most), divisor = amplitude > 0 ? amplitude : 1;
  for (int c = 0; c < HEAD_DIM / HV; c++) {
    code_store((SCALED(c) / divisor + 1.0f) * 128.0f, to + c * HV);  // from 0 on
  }
  *(__global float *)(to + ROW - 4) = amplitude * 0x1p-7f;
}
#else
#define CODES_OF(p) CLOAD(p)
#define ROW HEAD_DIM
#define HEAD_ROWS(capacity) ((size_t)(capacity))
#endif
#define HEAD_OF(cache, g, capacity) ((cache) + (g) * HEAD_ROWS(capacity) * ROW)
