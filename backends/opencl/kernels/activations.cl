// Activations of elementwise.cl and pointwise.cl; ACTIVATION names one.
//
// Each activation for scalars and for vectors; EXP2 is the matching exponential.
//
// gelu: x · Φ(x) with Φ(-|x|) = erfc(|x| / √2) / 2 from the Chebyshev fit of Numerical Recipes
// (section 6.2, relative error 1.2e-7 everywhere, so the negative tail keeps its digits).
#define SIGMOID(EXP2, z) (1.0f / (1.0f + EXP2((z) * -LOG2E)))

#define SILU(real, EXP2) return x * SIGMOID(EXP2, x);

#define SIGMA(real, EXP2) return SIGMOID(EXP2, x);

#define GELU_TANH(real, EXP2)                                              \
  const real cubic = x * x * x * 0.044715f + x;                            \
  return x * SIGMOID(EXP2, cubic * 1.5957691216057308f);

#define GELU(real, EXP2)                                                   \
  const real z = (x < 0.0f ? -x : x) * 0.70710678118654752f;               \
  const real t = 1.0f / (z * 0.5f + 1.0f);                                 \
  real p = t * 0.17087277f - 0.82215223f;                                  \
  p = p * t + 1.48851587f;                                                 \
  p = p * t - 1.13520398f;                                                 \
  p = p * t + 0.27886807f;                                                 \
  p = p * t - 0.18628806f;                                                 \
  p = p * t + 0.09678418f;                                                 \
  p = p * t + 0.37409196f;                                                 \
  p = p * t + 1.00002368f;                                                 \
  p = p * t - 1.26551223f;                                                 \
  const real tail = 0.5f * t * EXP2((p - z * z) * LOG2E);                  \
  return x * (x < 0.0f ? tail : 1.0f - tail);

#define RELU(real, EXP2) return x < 0.0f ? 0.0f : x;

// The gate of gpt-oss, clamped: g · σ(ALPHA · g), g = min(x, LIMIT).
#define SWIGLU_OAI(real, EXP2)                                             \
  const real g = x > LIMIT ? (real)(LIMIT) : x;                            \
  return g * SIGMOID(EXP2, g * ALPHA);

// cap · tanh(x / cap), with tanh(z) = sign(z) · (1 - t) / (1 + t), t = e^(-2 |z|).
#define SOFTCAP(real, EXP2)                                                \
  const real t = EXP2((x < 0.0f ? x : -x) * (2.0f * LOG2E / CAP));         \
  const real high = CAP * (1.0f - t) / (1.0f + t);                         \
  return x < 0.0f ? -high : high;

INLINE float activate_scalar(float x) { ACTIVATION(float, exp2_scalar) }
INLINE vfloat activate(vfloat x) { ACTIVATION(vfloat, exp2_vector) }
