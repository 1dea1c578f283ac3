// Prepended to every source file. Every kernel's argument 0 counts its work; 0 does nothing.
// A tensor argument is a pair: the buffer and the offset of its first element (ARRAY, AT).
#define ARRAY(type, name) __global type *restrict name, const uint name##_at
#define AT(name) name += name##_at

#ifndef VEC
#define VEC 16
#endif
#ifndef LANES
#define LANES 1
#endif

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#if VEC == 1
typedef float vfloat;
#define VLOAD(p) (*(p))
#define VSTORE(v, p) (*(p) = (v))
#define VSUM(v) (v)
#else
typedef CAT(float, VEC) vfloat;
#define VLOAD(p) CAT(vload, VEC)(0, p)
#define VSTORE(v, p) CAT(vstore, VEC)(v, 0, p)
#endif
#if VEC == 4
#define VSUM(v) (((v).s0 + (v).s1) + ((v).s2 + (v).s3))
#elif VEC == 8
#define VSUM(v) \
  ((((v).s0 + (v).s1) + ((v).s2 + (v).s3)) + (((v).s4 + (v).s5) + ((v).s6 + (v).s7)))
#elif VEC == 16
inline float vsum16(float16 v) {
  float8 a = v.lo + v.hi;
  float4 b = a.lo + a.hi;
  return (b.s0 + b.s1) + (b.s2 + b.s3);
}
#define VSUM(v) vsum16(v)
#endif
