// Rotary embedding ("rotate half") of queries and keys, with optional RMSNorm per head or, with
// ROW_NORM, over all heads; with NORM_AFTER (what the rotation multiplies squares by) its weight
// multiplies what is rotated. Values are copied, or normed (V_EPS).
// A work-item takes ITEM_HEADS heads of one token.
// `count` is m · TOTAL_HEADS / ITEM_HEADS.
//
// GATE_HEADS heads between queries and keys are gates, which others read.
// HEADS, KV_HEADS, HEAD_DIM, ROTATED come from the record; HV divides HEAD_DIM and RV ROTATED / 2.
// cosines and sines: [max_position][TABLES][ROTATED / 2]; of two tables the second is of queries.

#define TOTAL_HEADS (HEADS + 2 * KV_HEADS)
#define HALF (ROTATED / 2)

#if RV == 1
typedef float rfloat;
#define RLOAD(p) (*(p))
#define RSTORE(v, p) (*(p) = (v))
#else
typedef CAT(float, RV) rfloat;
#if LANES == 1
ACCESS(rfloat, RV, __global, load_run, store_run)
#define RLOAD(p) load_run(p)
#define RSTORE(v, p) store_run(v, p)
#else
#define RLOAD(p) CAT(vload, RV)(0, p)
#define RSTORE(v, p) CAT(vstore, RV)(v, 0, p)
#endif
#endif

INLINE void copy_dims(__global const float *from, __global float *to) {
  for (int d = 0; d < HEAD_DIM; d += HV) HSTORE(HLOAD(from + d), to + d);
}

// Rotates one head in place of `to` from `from`, whose dimensions are scaled by `weight`.
INLINE void rotate_head(__global const float *from, __global float *to,
                        __global const float *cosines, __global const float *sines) {
  for (int d = 0; d < HALF; d += RV) {
    const rfloat low = RLOAD(from + d), high = RLOAD(from + HALF + d);
    const rfloat c = RLOAD(cosines + d), s = RLOAD(sines + d);
    RSTORE(low * c - high * s, to + d);
    RSTORE(high * c + low * s, to + HALF + d);
  }
  for (int d = ROTATED; d < HEAD_DIM; d++) to[d] = from[d];
}

#if defined(EPS) || defined(V_EPS)
INLINE float head_squares(__global const float *from) {
  hfloat squares = 0;
  for (int d = 0; d < HEAD_DIM; d += HV) {
    const hfloat x = HLOAD(from + d);
    squares = x * x + squares;
  }
  return HSUM(squares);
}
#endif

#ifdef EPS
INLINE void rotate_normed(__global const float *from, __global float *to,
                          __global const float *cosines, __global const float *sines,
                          __global const float *weight, const float factor) {
  for (int d = 0; d < HALF; d += RV) {
    const rfloat c = RLOAD(cosines + d), s = RLOAD(sines + d);
#ifdef NORM_AFTER
    const rfloat low = factor * RLOAD(from + d), high = factor * RLOAD(from + HALF + d);
    RSTORE((low * c - high * s) * RLOAD(weight + d), to + d);
    RSTORE((high * c + low * s) * RLOAD(weight + HALF + d), to + HALF + d);
#else
    const rfloat low = factor * RLOAD(from + d) * RLOAD(weight + d);
    const rfloat high = factor * RLOAD(from + HALF + d) * RLOAD(weight + HALF + d);
    RSTORE(low * c - high * s, to + d);
    RSTORE(high * c + low * s, to + HALF + d);
#endif
  }
  for (int d = ROTATED; d < HEAD_DIM; d++) to[d] = factor * from[d] * weight[d];
}
#endif

__kernel void rope(const int count, PANELS(const float, qkv), ARRAY(const int, position),
                   ARRAY(float, out), __global const float *restrict cosines,
                   __global const float *restrict sines, __global const float *restrict q_norm,
                   __global const float *restrict k_norm) {
  const int item = get_global_id(0);
  if (item >= count) return;
  AT(position); AT(out);
  const int token = item / (TOTAL_HEADS / ITEM_HEADS);
  const int first = item % (TOTAL_HEADS / ITEM_HEADS) * ITEM_HEADS;
  const size_t at = (size_t)(position[0] + token) * (HALF * TABLES);
  cosines += at;
  sines += at;
#ifdef ROW_NORM
  float rows[2] = {0, 0};  // sums of squares of all queries, of all keys
  for (int head = 0; head < HEADS + KV_HEADS; head++) {
    if (ITEM_HEADS == 1 && (head < HEADS) != (first < HEADS)) continue;
    const int column = (head < HEADS ? head : head + GATE_HEADS) * HEAD_DIM;
    const int panel = panel_of(qkv_table, qkv_count, column);
    float squares = 0;
    if (PANEL_STOP(qkv, panel) < column + HEAD_DIM) {
      for (int d = 0; d < HEAD_DIM; d++) {
        const int p = panel_of(qkv_table, qkv_count, column + d);
        const float x = PANEL_ROW(qkv, p, token)[column + d];
        squares += x * x;
      }
    } else {
      squares = head_squares(PANEL_ROW(qkv, panel, token) + column);
    }
    rows[head >= HEADS] += squares;
  }
#endif
  for (int head = first; head < first + ITEM_HEADS; head++) {
    const size_t offset = ((size_t)token * TOTAL_HEADS + head) * HEAD_DIM;
    __global float *to = out + offset;
    const int column = (head < HEADS ? head : head + GATE_HEADS) * HEAD_DIM;
    const int panel = panel_of(qkv_table, qkv_count, column);
    __global const float *from = PANEL_ROW(qkv, panel, token) + column;
    if (PANEL_STOP(qkv, panel) < column + HEAD_DIM) {  // the head goes on in the next panel
      for (int d = 0; d < HEAD_DIM; d++) {
        const int p = panel_of(qkv_table, qkv_count, column + d);
        to[d] = PANEL_ROW(qkv, p, token)[column + d];
      }
      from = to;
    }
    if (head >= HEADS + KV_HEADS) {
#ifdef V_EPS
      const float factor = 1.0f / sqrt(head_squares(from) * (1.0f / HEAD_DIM) + V_EPS);
      for (int d = 0; d < HEAD_DIM; d += HV) HSTORE(factor * HLOAD(from + d), to + d);
#else
      copy_dims(from, to);
#endif
    } else {
      const bool query = head < HEADS;
      const int table = query ? (TABLES - 1) * HALF : 0;
#ifdef EPS
#ifdef ROW_NORM
      const float mean = rows[!query] * (1.0f / ((query ? HEADS : KV_HEADS) * HEAD_DIM));
      const int weights = (query ? head : head - HEADS) * HEAD_DIM;
#else
      const float mean = head_squares(from) * (1.0f / HEAD_DIM);
      const int weights = 0;
#endif
#ifdef NORM_AFTER
      const float factor = 1.0f / sqrt(mean * NORM_AFTER + EPS);
#else
      const float factor = 1.0f / sqrt(mean + EPS);
#endif
      rotate_normed(from, to, cosines + table, sines + table,
                    (query ? q_norm : k_norm) + weights, factor);
#else
      rotate_head(from, to, cosines + table, sines + table);
#endif
    }
  }
}
