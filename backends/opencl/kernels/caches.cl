// Vectors of HV elements of caches of keys and values, which are floats, or with CACHE_HALF halves.

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

#ifdef CACHE_HALF
typedef half cache_t;
#define CLOAD(p) HALF_LOAD(p)
#define CSTORE(v, p) HALF_STORE(v, p)
#else
typedef float cache_t;
#define CLOAD(p) HLOAD(p)
#define CSTORE(v, p) HSTORE(v, p)
#endif
