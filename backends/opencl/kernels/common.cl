// Prepended to every source file. Every kernel's argument 0 counts its work; 0 does nothing.
// A tensor argument is a pair: the buffer and the offset of its first element (ARRAY, AT).
#define ARRAY(type, name) __global type *restrict name, const uint name##_at
#define AT(name) name += name##_at

// A tensor in panels of columns: the buffer and, for each panel, its first column, the column
// behind its last, the element that column 0 of token 0 would have, and the elements of a token.
#define PANELS(type, name)                                            \
  __global type *restrict name, __global const int *restrict name##_table, const int name##_count
#define PANEL_START(name, p) name##_table[4 * (p)]
#define PANEL_STOP(name, p) name##_table[4 * (p) + 1]
#define PANEL_ROW(name, p, token) \
  (name + name##_table[4 * (p) + 2] + (size_t)(token) * name##_table[4 * (p) + 3])

#ifndef VEC
#define VEC 1
#endif
#ifndef LANES
#define LANES 1
#endif

// PoCL's inliner leaves calls even of small functions (and of its own library's) in the inner loops.
#if LANES == 1
#define INLINE __attribute__((always_inline)) inline
#else
#define INLINE inline
#endif

INLINE int panel_of(__global const int *table, const int count, const int column) {
  int p = 0;
  while (p + 1 < count && column >= table[4 * p + 1]) p++;
  return p;
}

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

// PoCL's vload8 and vstore8 are calls on AVX2 targets, its vload16 is four quarter loads: where
// PoCL is the compiler, unaligned vectors are dereferenced, which is one instruction.
#if LANES == 1
#define ACCESS(vector, width, space, load, store)                                             \
  INLINE __attribute__((overloadable)) vector load(space const float *p) {                    \
    typedef float unaligned_t __attribute__((ext_vector_type(width), aligned(4)));            \
    return *(space const unaligned_t *)p;                                                     \
  }                                                                                           \
  INLINE __attribute__((overloadable)) void store(const vector v, space float *p) {           \
    typedef float unaligned_t __attribute__((ext_vector_type(width), aligned(4)));            \
    *(space unaligned_t *)p = v;                                                              \
  }
#endif

#if VEC == 1
typedef float vfloat;
#define VLOAD(p) (*(p))
#define VSTORE(v, p) (*(p) = (v))
#define VSUM(v) (v)
#else
typedef CAT(float, VEC) vfloat;
#if LANES == 1
ACCESS(vfloat, VEC, __global, load_vector, store_vector)
ACCESS(vfloat, VEC, __private, load_vector, store_vector)
#define VLOAD(p) load_vector(p)
#define VSTORE(v, p) store_vector(v, p)
#else
#define VLOAD(p) CAT(vload, VEC)(0, p)
#define VSTORE(v, p) CAT(vstore, VEC)(v, 0, p)
#endif
#endif
#if VEC == 4
#define VSUM(v) (((v).s0 + (v).s1) + ((v).s2 + (v).s3))
#elif VEC == 8
#define VSUM(v) \
  ((((v).s0 + (v).s1) + ((v).s2 + (v).s3)) + (((v).s4 + (v).s5) + ((v).s6 + (v).s7)))
#elif VEC == 16
INLINE float vsum16(float16 v) {
  float8 a = v.lo + v.hi;
  float4 b = a.lo + a.hi;
  return (b.s0 + b.s1) + (b.s2 + b.s3);
}
#define VSUM(v) vsum16(v)
#endif

// 2^x to 2 units in the last place for -126 <= x <= 127, clamped outside: round to an integer (its
// bits go to the exponent) and a degree 5 minimax polynomial on [-1/2, 1/2]. PoCL's own exp2 is a
// call per vector.
#define EXP2_BODY(real, integer, as_integer, as_real)                             \
  x = x < -126.0f ? (real)(-126.0f) : x;                                          \
  x = x > 127.0f ? (real)(127.0f) : x;                                            \
  const real shifted = x + 12582912.0f; /* 1.5 * 2^23 */                          \
  const real f = x - (shifted - 12582912.0f);                                     \
  real p = f * 0.001327647196f + 0.009675541503f;                                                           \
  p = p * f + 0.05550713275f;                                                                 \
  p = p * f + 0.2402211972f;                                                                 \
  p = p * f + 0.6931469671f;                                                                 \
  p = p * f + 1.000000072f;                                                                 \
  return as_real(as_integer(p) + (as_integer(shifted) << 23));

INLINE float exp2_scalar(float x) { EXP2_BODY(float, int, as_int, as_float) }
#if VEC == 1
#define exp2_vector exp2_scalar
#define VMAX(v) (v)
#else
INLINE vfloat exp2_vector(vfloat x) {
  EXP2_BODY(vfloat, CAT(int, VEC), CAT(as_int, VEC), CAT(as_float, VEC))
}
#endif
#define LOG2E 1.44269504088896341f

INLINE float larger(float a, float b) { return a > b ? a : b; }
#if VEC == 4
INLINE float VMAX(float4 v) { return larger(larger(v.s0, v.s1), larger(v.s2, v.s3)); }
#elif VEC == 8
INLINE float VMAX(float8 v) {
  const float4 b = v.lo > v.hi ? v.lo : v.hi;
  return larger(larger(b.s0, b.s1), larger(b.s2, b.s3));
}
#elif VEC == 16
INLINE float VMAX(float16 v) {
  const float8 a = v.lo > v.hi ? v.lo : v.hi;
  const float4 b = a.lo > a.hi ? a.lo : a.hi;
  return larger(larger(b.s0, b.s1), larger(b.s2, b.s3));
}
#endif

// One row of n floats is shared by LANES work-items (1 on CPUs): full vectors first, then the rest.
#define LANE ((int)get_local_id(0))
#define EACH_VECTOR(i, n) for (int i = LANE * VEC; i + VEC <= (n); i += LANES * VEC)
#define EACH_REST(i, n) for (int i = (n) / VEC * VEC + LANE; i < (n); i += LANES)
// The same for columns [start, stop) of a panel.
#define EACH_VECTOR_OF(i, start, stop) \
  for (int i = (start) + LANE * VEC; i + VEC <= (stop); i += LANES * VEC)
#define EACH_REST_OF(i, start, stop) \
  for (int i = (start) + ((stop) - (start)) / VEC * VEC + LANE; i < (stop); i += LANES)

// Sum over the work-items of a row; `scratch` has LANES floats. Every work-item gets the sum.
#if LANES == 1
#define LANES_SCRATCH(name) float *name = 0
INLINE float lanes_sum(float x, float *scratch) { return x; }
#else
#define LANES_SCRATCH(name) __local float name[LANES]
INLINE float lanes_sum(float x, __local float *scratch) {
  barrier(CLK_LOCAL_MEM_FENCE);
  scratch[LANE] = x;
  for (int half_lanes = LANES / 2; half_lanes > 0; half_lanes /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (LANE < half_lanes) scratch[LANE] += scratch[LANE + half_lanes];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  return scratch[0];
}
#endif

// Vectors that divide a head of HEAD_DIM dimensions.
#ifdef HV
#if HV == 1
typedef float hfloat;
#define HLOAD(p) (*(p))
#define HSTORE(v, p) (*(p) = (v))
#define HSUM(v) (v)
#else
typedef CAT(float, HV) hfloat;
#if LANES == 1
ACCESS(hfloat, HV, __global, load_part, store_part)
ACCESS(hfloat, HV, __private, load_part, store_part)
#define HLOAD(p) load_part(p)
#define HSTORE(v, p) store_part(v, p)
#else
#define HLOAD(p) CAT(vload, HV)(0, p)
#define HSTORE(v, p) CAT(vstore, HV)(v, 0, p)
#endif
#endif
#if HV == 2
#define HSUM(v) ((v).s0 + (v).s1)
#elif HV == 4
#define HSUM(v) (((v).s0 + (v).s1) + ((v).s2 + (v).s3))
#elif HV >= 8
INLINE float HSUM(hfloat v) {
#if HV == 16
  const float8 a = v.lo + v.hi;
#else
  const float8 a = v;
#endif
  const float4 b = a.lo + a.hi;
  return (b.s0 + b.s1) + (b.s2 + b.s3);
}
#endif
#endif
