// MatMul on GPUs: a work-item per row, so that 16 neighbours read 16 neighbouring words of the
// packed weights (hetero.backends.weights). Up to TOKENS tokens: `gemv`, one work-group per row
// block, k split over SPLITS lanes and reduced in local memory. Above: `gemm`, 64 x 64 tiles.
// Activations are float32 in memory; w4a8 rounds them first (`round_activations`).
//
// Defines: TOKENS, SPLITS; one of W4A16, W4A8, W8A16, F16, F32, BLOCKS (with BITS, GROUPS, HALVES,
// MINIMUM and ZERO, as in hetero.backends.formats.Blocks); HALF.
// HALF 1 (devices with cl_khr_fp16; weights and activations of 16 bits or less): products and sums of
// EXACT features in fp16, everything beyond in float32. HALF 2 computes the same in float32 with
// every result rounded to fp16, for tests on devices without the extension. HALF 0: float32.
//
// fp16 ends at 65504 and loses bits below 6e-5, and activations are of any size. So those of a token
// and group of 32 are first divided by EXACT times their largest: products of them and of codes (or
// of fp16 weights) then add up to no more than fp16 holds. Float32 sums undo it.

#define EXACT 8
#if HALF
#define LEAST 1e-30f  // what is smaller counts as nothing, so that the inverse is a number
#define INVERSE(largest) ((largest) > LEAST ? (1.0f / EXACT) / (largest) : 0.0f)
#define SIZE(largest) (EXACT * (largest))
#endif
#if HALF == 1
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half real;
#define R(value) ((half)(value))
#elif HALF == 2
typedef float real;
static float R(float value) {
  ushort bits;
  vstore_half_rte(value, 0, (__private half *)&bits);
  return vload_half(0, (const __private half *)&bits);
}
#else
typedef float real;
#define R(value) (value)
#endif

#define ROWS 16
#define GROUP 32
#define UNROLL _Pragma("unroll")
#define EACH_TOKEN UNROLL for (int t = 0; t < TOKENS; t++)

#if defined(BLOCKS)
typedef uchar scale_t;
typedef uint weight_t;
typedef uint2 word_t;
#define FEATURES 8
#define VALUE(word, i) code_of(word, i)
#define WORD(p, block, g, w, lane, k) word_of(p, block, g, w, lane, k)
#define SCALE(p, block, g, h, lane, k) scale_of(p, block, g, h, lane, k)
#define SHIFT(p, block, g, lane, k, scale) shift_of(p, block, g, lane, k, scale)
#else
#define HALVES 1
#define MINIMUM 0
#define SHIFT(p, block, g, lane, k, scale) 0.0f
typedef half scale_t;
#if defined(W4A16) || defined(W4A8)
#define QUANTIZED
#define FEATURES 8  // per word
#define VALUE(word, i) ((float)(((word) >> (4 * (i))) & 15) - 8.0f)
#elif defined(W8A16)
#define QUANTIZED
#define FEATURES 4
#define VALUE(word, i) ((float)(((int)(word) << (24 - 8 * (i))) >> 24))
#else
#define FEATURES 1
#define VALUE(word, i) (word)
#endif

#if defined(QUANTIZED)
typedef uint weight_t;
typedef uint word_t;
// Word `w` of a group of 32 features, and the group's scale; the padding of k is in the weights.
#define WORD(p, block, g, w, lane, k) \
  (p)[(((size_t)(block) * (((k) + 31) / GROUP) + (g)) * (GROUP / FEATURES) + (w)) * ROWS + (lane)]
#define SCALE(p, block, g, h, lane, k) \
  vload_half(((size_t)(block) * (((k) + 31) / GROUP) + (g)) * ROWS + (lane), p)
#else
typedef float word_t;
#define INDEX(block, g, w, lane, k) (((size_t)(block) * (k) + (g) * GROUP + (w)) * ROWS + (lane))
#define SCALE(p, block, g, h, lane, k) 1.0f
#if defined(F16)
typedef half weight_t;
#define READ(p, at) vload_half(at, p)
#else
typedef float weight_t;
#define READ(p, at) (p)[at]
#endif
#define WORD(p, block, g, w, lane, k) \
  ((g) * GROUP + (w) < (k) ? READ(p, INDEX(block, g, w, lane, k)) : 0.0f)
#endif
#endif

// Sums of a split's groups of features, of row `lane` of a block and the rows of x.
INLINE void split_sums(float sum[TOKENS], __global const weight_t *weights,
                       __global const scale_t *scales, __global const float *x, const int block,
                       const int lane, const int split, const int m, const int k) {
  EACH_TOKEN sum[t] = 0.0f;
  for (int g = split; g * GROUP < k; g += SPLITS) {
    float part[TOKENS], whole[TOKENS];  // and the sum of x
    real few[TOKENS];
    EACH_TOKEN part[t] = 0.0f;
    EACH_TOKEN whole[t] = 0.0f;
    EACH_TOKEN few[t] = R(0.0f);
#if HALF
    float largest[TOKENS], inverse[TOKENS];
    EACH_TOKEN largest[t] = 0.0f;
    for (int f = g * GROUP; f < min(g * GROUP + GROUP, k); f++)
      EACH_TOKEN largest[t] = fmax(largest[t], fabs(x[(size_t)min(t, m - 1) * k + f]));
    EACH_TOKEN inverse[t] = INVERSE(largest[t]);
#endif
    for (int w = 0; w < GROUP / FEATURES; w++) {
      const word_t word = WORD(weights, block, g, w, lane, k);
      UNROLL for (int i = 0; i < FEATURES; i++) {
        const int f = g * GROUP + w * FEATURES + i;
        const real value = R(VALUE(word, i));
        if (f < k) EACH_TOKEN {
          const float activation = x[(size_t)min(t, m - 1) * k + f];
          if (MINIMUM) whole[t] += activation;
#if HALF
          few[t] = R(few[t] + R(value * R(activation * inverse[t])));
#else
          few[t] += value * activation;
#endif
        }
      }
      if ((w + 1) * FEATURES % EXACT == 0) EACH_TOKEN {
        part[t] += (float)few[t];
        few[t] = R(0.0f);
      }
      if ((w + 1) * FEATURES % (GROUP / HALVES) == 0) {
        const float scale = SCALE(scales, block, g, w * FEATURES * HALVES / GROUP, lane, k);
        const float shift = SHIFT(scales, block, g, lane, k, scale);
        EACH_TOKEN {
#if HALF
          part[t] *= SIZE(largest[t]);
#endif
          sum[t] += scale * part[t];
          if (MINIMUM) sum[t] += shift * whole[t];
          part[t] = 0.0f;
        }
      }
    }
  }
}

// Local size (16, SPLITS); group (0, block). y[m, n] for m <= TOKENS, `stride` apart.
__kernel __attribute__((reqd_work_group_size(ROWS, SPLITS, 1))) void gemv(
    const int count, ARRAY(const weight_t, weights), ARRAY(const scale_t, scales),
    ARRAY(const float, bias), ARRAY(const float, x), ARRAY(float, y), const int m, const int n,
    const int k, const int has_bias, const int stride) {
  __local float sums[SPLITS][TOKENS][ROWS];
  AT(weights);
  AT(scales);
  AT(bias);
  AT(x);
  AT(y);
  const int block = get_group_id(1), lane = get_local_id(0), split = get_local_id(1);
  if (block >= count) return;
  float sum[TOKENS];
  split_sums(sum, weights, scales, x, block, lane, split, m, k);
  EACH_TOKEN sums[split][t][lane] = sum[t];
  barrier(CLK_LOCAL_MEM_FENCE);
  const int row = block * ROWS + lane;
  EACH_TOKEN if (row < n && t < m && t % SPLITS == split) {
    float total = has_bias ? bias[row] : 0.0f;
    for (int s = 0; s < SPLITS; s++) total += sums[s][t][lane];
    y[(size_t)t * stride + row] = total;
  }
}

#define TILE_BLOCKS 4   // row blocks of a tile
#define TILE_TOKENS 64
#define ITEM_TOKENS (TILE_TOKENS / SPLITS)
#define EACH_BLOCK UNROLL for (int r = 0; r < TILE_BLOCKS; r++)
#define EACH_OWN UNROLL for (int t = 0; t < ITEM_TOKENS; t++)

// Local size (16, SPLITS); group (row tile, token tile). An item owns 4 rows x 64 / SPLITS tokens.
__kernel __attribute__((reqd_work_group_size(ROWS, SPLITS, 1))) void gemm(
    const int count, ARRAY(const weight_t, weights), ARRAY(const scale_t, scales),
    ARRAY(const float, bias), ARRAY(const float, x), ARRAY(float, y), const int m, const int n,
    const int k, const int has_bias, const int stride) {
  __local real panel[GROUP][TILE_BLOCKS * ROWS];
  __local real tokens[GROUP][TILE_TOKENS + 1];  // + 1: neighbours write to different banks
#if HALF
  __local float largest[TILE_TOKENS];  // of each token in the group
#endif
  AT(weights);
  AT(scales);
  AT(bias);
  AT(x);
  AT(y);
  if ((int)get_group_id(0) >= count) return;
  const int lane = get_local_id(0), own = get_local_id(1), item = own * ROWS + lane;
  const int block0 = get_group_id(0) * TILE_BLOCKS, token0 = get_group_id(1) * TILE_TOKENS;
  const int blocks = (n + ROWS - 1) / ROWS;
  float sum[TILE_BLOCKS][ITEM_TOKENS];
  real few[TILE_BLOCKS][ITEM_TOKENS];
  EACH_BLOCK EACH_OWN sum[r][t] = 0.0f;
  EACH_BLOCK EACH_OWN few[r][t] = R(0.0f);
  for (int g = 0; g * GROUP < k; g++) {
    for (int at = own; at < TILE_BLOCKS * GROUP / FEATURES; at += SPLITS) {
      const int r = at / (GROUP / FEATURES), w = at % (GROUP / FEATURES);
      const int block = min(block0 + r, blocks - 1);
      const word_t word = WORD(weights, block, g, w, lane, k);
      const float scale = SCALE(scales, block, g, w * FEATURES * HALVES / GROUP, lane, k);
      const float shift = SHIFT(scales, block, g, lane, k, scale);
      UNROLL for (int i = 0; i < FEATURES; i++)
        panel[w * FEATURES + i][r * ROWS + lane] = R(scale * VALUE(word, i) + shift);
    }
#if HALF
    for (int t = item; t < TILE_TOKENS; t += ROWS * SPLITS) {
      const size_t from = (size_t)min(token0 + t, m - 1) * k;
      float found = 0.0f;
      for (int f = g * GROUP; f < min(g * GROUP + GROUP, k); f++)
        found = fmax(found, fabs(x[from + f]));
      largest[t] = found;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    for (int at = item; at < GROUP * TILE_TOKENS; at += ROWS * SPLITS) {
      const int f = at % GROUP, t = at / GROUP;
      const bool inside = token0 + t < m && g * GROUP + f < k;
      const float activation = inside ? x[(size_t)(token0 + t) * k + g * GROUP + f] : 0.0f;
#if HALF
      tokens[f][t] = R(activation * INVERSE(largest[t]));
#else
      tokens[f][t] = activation;
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int f = 0; f < GROUP; f++) {
      real value[TILE_BLOCKS];
      EACH_BLOCK value[r] = panel[f][r * ROWS + lane];
      EACH_OWN {
        const real activation = tokens[f][own * ITEM_TOKENS + t];
        EACH_BLOCK few[r][t] = R(few[r][t] + R(value[r] * activation));
      }
      if ((f + 1) % EXACT == 0) EACH_BLOCK EACH_OWN {
#if HALF
        sum[r][t] += SIZE(largest[own * ITEM_TOKENS + t]) * (float)few[r][t];
#else
        sum[r][t] += few[r][t];
#endif
        few[r][t] = R(0.0f);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  EACH_BLOCK EACH_OWN {
    const int row = (block0 + r) * ROWS + lane, token = token0 + own * ITEM_TOKENS + t;
    if (row < n && token < m)
      y[(size_t)token * stride + row] = sum[r][t] + (has_bias ? bias[row] : 0.0f);
  }
}

// x [m, k] rounded to int8 codes times the scale of each token and group of 32.
__kernel void round_activations(const int count, ARRAY(const float, x),
                                __global float *restrict rounded, const int k) {
  AT(x);
  const int groups = (k + GROUP - 1) / GROUP, item = get_global_id(0);
  if (item >= count) return;
  const size_t from = (size_t)(item / groups) * k + (item % groups) * GROUP;
  const int filled = min(GROUP, k - item % groups * GROUP);
  float largest = 0.0f;
  for (int i = 0; i < filled; i++) largest = fmax(largest, fabs(x[from + i]));
  const float scale = largest / 127.0f;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < filled; i++) rounded[from + i] = rint(x[from + i] * inverse) * scale;
}
