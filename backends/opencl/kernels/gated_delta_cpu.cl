// GatedDelta on a processor. Work-item: a value head. `count` is m.
//
// The state of a head [DK, DV] is taken in blocks of columns that stay in the first cache while a
// tile of tokens passes. A token reads and writes a block once: the pass that adds what token t
// leaves also sums the products of token t + 1 with the new state.
//
// With kᵣ and qᵣ as they come, k = kᵣ / |kᵣ|, q = qᵣ / (|qᵣ| sqrt(DK)), and S before the token:
//   u = β (v - e^g Sᵀk);  o = (e^g S + k uᵀ)ᵀ q = e^g Sᵀq + (k·q) u
//
// Tokens in chunks of CHUNK pass a block together, as matmuls (arXiv 2412.06464, section 3.3). With
// Gᵢ the sum of g up to token i of the chunk and S before the chunk:
//   uᵢ = βᵢ (vᵢ - e^Gᵢ Sᵀkᵢ - Σ_{j<i} e^(Gᵢ-Gⱼ) (kᵢ·kⱼ) uⱼ)
//   oᵢ = e^Gᵢ Sᵀqᵢ + Σ_{j≤i} e^(Gᵢ-Gⱼ) (qᵢ·kⱼ) uⱼ
//   S ← e^G S + Σⱼ kⱼ (e^(G-Gⱼ) uⱼ)ᵀ
#define BLOCK (BV * HV)
#define KEYS (k_heads * DK)
#define WIDTH (2 * KEYS + v_heads * DV)
#define TILE 32
#define EACH_PART(b) _Pragma("unroll") for (int b = 0; b < BV; b++)

typedef struct {
  float kept;    // e^g
  float beta;
  float by_key;    // 1 / |kᵣ|
  float by_query;  // 1 / (|qᵣ| sqrt(DK))
  float both;    // k · q
} token_t;

INLINE token_t token_of(__global const float *q, __global const float *k, const float b,
                        const float a, const float decay, const float by_dim) {
  token_t token;
  token.kept = kept_of(a, decay);
  token.beta = SIGMOID(exp2_scalar, b);
  hfloat keys = 0.0f, queries = 0.0f, both = 0.0f;
  for (int i = 0; i < DK; i += HV) {
    const hfloat ki = HLOAD(k + i), qi = HLOAD(q + i);
    keys += ki * ki;
    queries += qi * qi;
    both += ki * qi;
  }
  token.by_key = 1.0f / sqrt(HSUM(keys) + L2_EPS);
  token.by_query = by_dim / sqrt(HSUM(queries) + L2_EPS);
  token.both = HSUM(both) * token.by_key * token.by_query;
  return token;
}

// y = o / sqrt(mean(o²) + eps) · norm · silu(z) of one head, in place.
INLINE void finish(__global float *y, __global const float *norm, PANELS(const float, gates),
                   const int token, const int column, const float eps) {
  hfloat squares = 0.0f;
  for (int j = 0; j < DV; j += HV) squares += HLOAD(y + j) * HLOAD(y + j);
  const float scale = 1.0f / sqrt(HSUM(squares) / DV + eps);
  for (int j = 0; j < DV;) { // runs of columns in which no panel ends
    const int panel = panel_of(gates_table, gates_count, column + j);
    const int stop = min(DV, PANEL_STOP(gates, panel) - column);
    __global const float *z = PANEL_ROW(gates, panel, token) + column;
    for (; j + VEC <= stop; j += VEC)
      VSTORE(VLOAD(y + j) * scale * VLOAD(norm + j) * activate(VLOAD(z + j)), y + j);
    for (; j < stop; j++) y[j] = y[j] * scale * norm[j] * activate_scalar(z[j]);
  }
}

#define CHUNK VEC
#if VEC == 16 // as the registers allow: tokens and rows of a block that are computed together
#define PAIR 2
#define STEP (DK % 4 == 0 ? 4 : 1)
#else
#define PAIR 1
#define STEP (DK % 2 == 0 ? 2 : 1)
#endif
#define QUAD 4 // tokens that meet all keys of the chunk together
#define UNROLL _Pragma("unroll")

typedef struct {
  float keys[DK * CHUNK];                 // k, token after token for each feature
  float by_keys[CHUNK][CHUNK];            // e^(Gᵢ-Gⱼ) βᵢ (kᵢ·kⱼ), j < i
  float by_queries[CHUNK][CHUNK];         // e^(Gᵢ-Gⱼ) (qᵢ·kⱼ), j ≤ i
  float kept[CHUNK];                      // e^Gᵢ
  float left[CHUNK];                      // e^(G-Gⱼ)
} chunk_t;

// What a chunk's tokens are to each other. Products of e^g, not exponentials of sums: exact for 1.
INLINE void relate(chunk_t *chunk, const token_t *tokens, __global const float *q,
                   __global const float *k, const int width) {
  for (int t = 0; t < CHUNK; t++)
    for (int i = 0; i < DK; i++)
      chunk->keys[i * CHUNK + t] = k[(size_t)t * width + i] * tokens[t].by_key;
  for (int j = 0; j < CHUNK; j++) chunk->left[j] = 0.0f;
  float kept = 1.0f;
  for (int first = 0; first < CHUNK; first += QUAD) {
    vfloat by_k[QUAD], by_q[QUAD];
    UNROLL for (int r = 0; r < QUAD; r++) by_k[r] = by_q[r] = 0.0f;
    for (int i = 0; i < DK; i++) {
      const vfloat keys = VLOAD(chunk->keys + i * CHUNK);
      UNROLL for (int r = 0; r < QUAD; r++) {
        by_k[r] += keys * k[(size_t)(first + r) * width + i];
        by_q[r] += keys * q[(size_t)(first + r) * width + i];
      }
    }
    UNROLL for (int r = 0; r < QUAD; r++) {
      const token_t token = tokens[first + r];
      const vfloat before = VLOAD(chunk->left) * token.kept;
      VSTORE(FORGET(before), chunk->left);
      chunk->left[first + r] = 1.0f;
      kept *= token.kept;
      chunk->kept[first + r] = kept = FORGET(kept);
      const vfloat left = VLOAD(chunk->left);
      VSTORE(by_k[r] * left * (token.beta * token.by_key), chunk->by_keys[first + r]);
      VSTORE(by_q[r] * left * token.by_query, chunk->by_queries[first + r]);
    }
  }
}

// CHUNK tokens and columns [c, c + BLOCK) of a head, whose `state`, `v` and `y` begin there.
INLINE void pass_chunk(const chunk_t *chunk, const token_t *tokens, __global const float *q,
                       __global const float *k, __global const float *v, __global float *state,
                       __global float *y, const int width, const int stride) {
  hfloat u[CHUNK][BV], out[CHUNK][BV];
  for (int t = 0; t < CHUNK; t += PAIR) {
    hfloat by_k[PAIR][BV], by_q[PAIR][BV];
    UNROLL for (int r = 0; r < PAIR; r++) EACH_PART(b) by_k[r][b] = by_q[r][b] = 0.0f;
    for (int i = 0; i < DK; i++) {
      hfloat s[BV];
      EACH_PART(b) s[b] = HLOAD(state + i * DV + b * HV);
      UNROLL for (int r = 0; r < PAIR; r++) {
        const float ki = k[(size_t)(t + r) * width + i], qi = q[(size_t)(t + r) * width + i];
        EACH_PART(b) by_k[r][b] += s[b] * ki;
        EACH_PART(b) by_q[r][b] += s[b] * qi;
      }
    }
    UNROLL for (int r = 0; r < PAIR; r++) EACH_PART(b) {
      u[t + r][b] = by_k[r][b];
      out[t + r][b] = by_q[r][b];
    }
  }
  for (int t = 0; t < CHUNK; t++) {
    const float beta = tokens[t].beta, kept = chunk->kept[t];
    hfloat new[BV], seen[BV];
    EACH_PART(b) {
      const hfloat value = HLOAD(v + (size_t)t * width + b * HV);
      new[b] = (value - u[t][b] * (kept * tokens[t].by_key)) * beta;
      seen[b] = out[t][b] * (kept * tokens[t].by_query);
    }
    for (int j = 0; j < t; j++) {
      const float by_key = chunk->by_keys[t][j], by_query = chunk->by_queries[t][j];
      EACH_PART(b) new[b] -= u[j][b] * by_key;
      EACH_PART(b) seen[b] += u[j][b] * by_query;
    }
    EACH_PART(b) {
      u[t][b] = new[b];
      HSTORE(seen[b] + new[b] * chunk->by_queries[t][t], y + (size_t)t * stride + b * HV);
    }
  }
  for (int t = 0; t < CHUNK; t++) EACH_PART(b) u[t][b] *= chunk->left[t];
  const float kept = chunk->kept[CHUNK - 1];
  for (int i = 0; i < DK; i += STEP) {
    hfloat s[STEP][BV];
    UNROLL for (int r = 0; r < STEP; r++)
      EACH_PART(b) s[r][b] = HLOAD(state + (i + r) * DV + b * HV) * kept;
    for (int t = 0; t < CHUNK; t++)
      UNROLL for (int r = 0; r < STEP; r++)
        EACH_PART(b) s[r][b] += u[t][b] * chunk->keys[(i + r) * CHUNK + t];
    UNROLL for (int r = 0; r < STEP; r++)
      EACH_PART(b) HSTORE(s[r][b], state + (i + r) * DV + b * HV);
  }
}

__kernel void gated_delta(const int count, ARRAY(const float, x), PANELS(const float, gates),
                          ARRAY(const int, position), ARRAY(float, state), ARRAY(float, y),
                          __global const float *restrict decay,
                          __global const float *restrict dt_bias,
                          const int k_heads, const int v_heads, const int gates_at,
                          const float by_dim, __global const float *restrict norm,
                          const float eps) {
  if (count == 0) return;
  AT(x);
  AT(state);
  AT(y);
  const int head = get_global_id(0);
  __global const float *q = x + head % k_heads * DK;
  __global const float *k = q + KEYS;
  __global const float *v = x + 2 * KEYS + head * DV;
  state += (size_t)head * DK * DV;
  y += head * DV;
  if (position[position_at] == 0)
    for (int i = 0; i < DK * DV; i += HV) HSTORE((hfloat)(0.0f), state + i);
  token_t tokens[TILE];
  int start = 0;
  for (; start + CHUNK <= count; start += CHUNK) {
    const size_t row = (size_t)start * WIDTH;
    chunk_t chunk;
    for (int t = 0; t < CHUNK; t++)
      tokens[t] = token_of(q + row + (size_t)t * WIDTH, k + row + (size_t)t * WIDTH,
                           GATE_B(start + t, head), GATE_A(start + t, head) + dt_bias[head],
                           decay[head], by_dim);
    relate(&chunk, tokens, q + row, k + row, WIDTH);
    const int stride = v_heads * DV;
    for (int c = 0; c < DV; c += BLOCK)
      pass_chunk(&chunk, tokens, q + row, k + row, v + row + c, state + c,
                 y + (size_t)start * stride + c, WIDTH, stride);
    for (int t = start; t < start + CHUNK; t++)
      finish(y + (size_t)t * stride, norm, gates, gates_table, gates_count, t,
             gates_at + head * DV, eps);
  }
  for (; start < count; start += TILE) {
    const int stop = min(count, start + TILE);
    for (int t = start; t < stop; t++)
      tokens[t - start] = token_of(q + (size_t)t * WIDTH, k + (size_t)t * WIDTH,
                                   GATE_B(t, head), GATE_A(t, head) + dt_bias[head], decay[head], by_dim);
    for (int c = 0; c < DV; c += BLOCK) {
      hfloat by_k[BV], by_q[BV], u[BV]; // Sᵀkᵣ and Sᵀqᵣ of the token
      EACH_PART(b) by_k[b] = by_q[b] = 0.0f;
      for (int i = 0; i < DK; i++) {
        const float ki = k[(size_t)start * WIDTH + i], qi = q[(size_t)start * WIDTH + i];
        EACH_PART(b) {
          const hfloat s = HLOAD(state + i * DV + c + b * HV);
          by_k[b] += s * ki;
          by_q[b] += s * qi;
        }
      }
      for (int t = start; t < stop; t++) {
        const token_t token = tokens[t - start];
        const size_t row = (size_t)t * WIDTH;
        EACH_PART(b) {
          const hfloat known = by_k[b] * (token.kept * token.by_key);
          u[b] = (HLOAD(v + row + c + b * HV) - known) * token.beta;
          const hfloat out = by_q[b] * (token.kept * token.by_query) + u[b] * token.both;
          HSTORE(out, y + (size_t)t * (v_heads * DV) + c + b * HV);
          u[b] *= token.by_key;
          by_k[b] = by_q[b] = 0.0f;
        }
        const size_t next = t + 1 < stop ? row + WIDTH : row; // of the last its sums are not used
        _Pragma("unroll 4") for (int i = 0; i < DK; i++) {
          const float ki = k[row + i], next_k = k[next + i], next_q = q[next + i];
          EACH_PART(b) {
            __global float *at = state + i * DV + c + b * HV;
            const hfloat s = HLOAD(at) * token.kept + u[b] * ki;
            HSTORE(s, at);
            by_k[b] += s * next_k;
            by_q[b] += s * next_q;
          }
        }
      }
    }
    for (int t = start; t < stop; t++)
      finish(y + (size_t)t * (v_heads * DV), norm, gates, gates_table, gates_count, t,
             gates_at + head * DV, eps);
  }
}
