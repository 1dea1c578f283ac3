// MatMul of w8a8 on GPUs: codes of 8 bits, four in a word, summed in 32 bits over all of k. Work is
// cut as in matmul_simt.cl; a word of weights is four features of a row (hetero.backends.weights).
//
// Defines: TOKENS, SPLITS; ROUNDED_DIVISION (whether the device divides as IEEE 754 asks).

#define ROWS 16
#define GROUP 32
#define WORDS 8  // of a group
#define UNROLL _Pragma("unroll")
#define EACH_TOKEN UNROLL for (int t = 0; t < TOKENS; t++)
#define GROUPS_OF(k) (((k) + GROUP - 1) / GROUP)
#define WORD(p, block, g, w, lane, k) \
  (p)[(((size_t)(block)*GROUPS_OF(k) + (g)) * WORDS + (w)) * ROWS + (lane)]

#if defined(cl_khr_integer_dot_product)
#pragma OPENCL EXTENSION cl_khr_integer_dot_product : enable
#define DOT4(sum, a, b) ((sum) + dot_4x8packed_ss_int(a, b))
#else
INLINE int dot4(int sum, const uint a, const uint b) {
  const char4 p = as_char4(a), q = as_char4(b);
  sum += (int)p.x * q.x;
  sum += (int)p.y * q.y;
  sum += (int)p.z * q.z;
  sum += (int)p.w * q.w;
  return sum;
}
#define DOT4(sum, a, b) dot4(sum, a, b)
#endif

// x / scale, correctly rounded. Without an instruction for it, by Markstein's theorem: with the
// rounded reciprocal, a quotient that is right to an ulp is corrected by its exact remainder.
INLINE float divided(const float x, const float scale, const float reciprocal) {
#if ROUNDED_DIVISION
  return x / scale;
#else
  const float near = clamp(x, -200.0f * scale, 200.0f * scale);  // beyond it, codes are the last
  float quotient = near * reciprocal;
  quotient = fma(fma(-quotient, scale, near), reciprocal, quotient);
  return fma(fma(-quotient, scale, near), reciprocal, quotient);
#endif
}

// Codes rint(x / scale) of x [m, k], four in a word: [m, k / 32, 8], zeros to whole groups.
__kernel void round_codes(const int count, ARRAY(const float, x), __global uint *restrict codes,
                          const int k, const float x_scale, const float reciprocal) {
  AT(x);
  const int words = GROUPS_OF(k) * WORDS, item = get_global_id(0);
  if (item >= count) return;
  const int first = item % words * 4;
  const size_t from = (size_t)(item / words) * k + first;
  float steps[4];
  for (int i = 0; i < 4; i++)
    steps[i] = first + i < k ? divided(x[from + i], x_scale, reciprocal) : 0.0f;
  const float4 all = (float4)(steps[0], steps[1], steps[2], steps[3]);
  codes[item] = as_uint(convert_char4(rint(clamp(all, -128.0f, 127.0f))));
}

// Local size (16, SPLITS); group (0, block). y[m, n] for m <= TOKENS.
__kernel __attribute__((reqd_work_group_size(ROWS, SPLITS, 1))) void gemv(
    const int count, ARRAY(const uint, weights), ARRAY(const float, scales),
    ARRAY(const float, bias), __global const uint *restrict codes, ARRAY(float, y), const int m,
    const int n, const int k, const int has_bias, const float x_scale) {
  __local int sums[SPLITS][TOKENS][ROWS];
  AT(weights);
  AT(scales);
  AT(bias);
  AT(y);
  const int block = get_group_id(1), lane = get_local_id(0), split = get_local_id(1);
  if (block >= count) return;
  const int groups = GROUPS_OF(k);
  int sum[TOKENS];
  EACH_TOKEN sum[t] = 0;
  for (int g = split; g < groups; g += SPLITS)
    for (int w = 0; w < WORDS; w++) {
      const uint word = WORD(weights, block, g, w, lane, k);
      EACH_TOKEN {
        const uint four = codes[((size_t)min(t, m - 1) * groups + g) * WORDS + w];
        sum[t] = DOT4(sum[t], word, four);
      }
    }
  EACH_TOKEN sums[split][t][lane] = sum[t];
  barrier(CLK_LOCAL_MEM_FENCE);
  const int row = block * ROWS + lane;
  EACH_TOKEN if (row < n && t < m && t % SPLITS == split) {
    int total = 0;
    for (int s = 0; s < SPLITS; s++) total += sums[s][t][lane];
    const float scale = x_scale * scales[row];
    const float product = (float)total * scale;
    y[(size_t)t * n + row] = has_bias ? product + bias[row] : product;
  }
}

#define TILE_BLOCKS 4   // row blocks of a tile
#define TILE_TOKENS 64
#define ITEM_TOKENS (TILE_TOKENS / SPLITS)
#define EACH_BLOCK UNROLL for (int r = 0; r < TILE_BLOCKS; r++)
#define EACH_OWN UNROLL for (int t = 0; t < ITEM_TOKENS; t++)

// Local size (16, SPLITS); group (row tile, token tile). An item owns 4 rows x 64 / SPLITS tokens.
__kernel __attribute__((reqd_work_group_size(ROWS, SPLITS, 1))) void gemm(
    const int count, ARRAY(const uint, weights), ARRAY(const float, scales),
    ARRAY(const float, bias), __global const uint *restrict codes, ARRAY(float, y), const int m,
    const int n, const int k, const int has_bias, const float x_scale) {
  __local uint panel[WORDS][TILE_BLOCKS * ROWS];
  __local uint tokens[WORDS][TILE_TOKENS + 1];  // + 1: neighbours write to different banks
  AT(weights);
  AT(scales);
  AT(bias);
  AT(y);
  if ((int)get_group_id(0) >= count) return;
  const int lane = get_local_id(0), own = get_local_id(1), item = own * ROWS + lane;
  const int block0 = get_group_id(0) * TILE_BLOCKS, token0 = get_group_id(1) * TILE_TOKENS;
  const int blocks = (n + ROWS - 1) / ROWS, groups = GROUPS_OF(k);
  int sum[TILE_BLOCKS][ITEM_TOKENS];
  EACH_BLOCK EACH_OWN sum[r][t] = 0;
  for (int g = 0; g < groups; g++) {
    for (int at = own; at < TILE_BLOCKS * WORDS; at += SPLITS) {
      const int r = at / WORDS, w = at % WORDS;
      panel[w][r * ROWS + lane] = WORD(weights, min(block0 + r, blocks - 1), g, w, lane, k);
    }
    for (int at = item; at < WORDS * TILE_TOKENS; at += ROWS * SPLITS) {
      const int w = at % WORDS, t = at / WORDS;
      tokens[w][t] = codes[((size_t)min(token0 + t, m - 1) * groups + g) * WORDS + w];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int w = 0; w < WORDS; w++) {
      uint word[TILE_BLOCKS];
      EACH_BLOCK word[r] = panel[w][r * ROWS + lane];
      EACH_OWN {
        const uint four = tokens[w][own * ITEM_TOKENS + t];
        EACH_BLOCK sum[r][t] = DOT4(sum[r][t], word[r], four);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  EACH_BLOCK {
    const int row = (block0 + r) * ROWS + lane;
    if (row < n) {
      const float scale = x_scale * scales[row], offset = has_bias ? bias[row] : 0.0f;
      EACH_OWN {
        const int token = token0 + own * ITEM_TOKENS + t;
        const float product = (float)sum[r][t] * scale;
        if (token < m) y[(size_t)token * n + row] = has_bias ? product + offset : product;
      }
    }
  }
}
