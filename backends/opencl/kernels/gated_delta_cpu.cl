// GatedDelta on a processor. Work-item: a value head. `count` is m.
//
// The state of a head [DK, DV] is taken in blocks of columns that stay in the first cache while a
// tile of tokens passes. A token reads and writes a block once: the pass that adds what token t
// leaves also sums the products of token t + 1 with the new state.
//
// With kᵣ and qᵣ as they come, k = kᵣ / |kᵣ|, q = qᵣ / (|qᵣ| sqrt(DK)), and S before the token:
//   u = β (v - e^g Sᵀk);  o = (e^g S + k uᵀ)ᵀ q = e^g Sᵀq + (k·q) u
#define BLOCK (BV * HV)
#define KEYS (K_HEADS * DK)
#define WIDTH (2 * KEYS + V_HEADS * DV)
#define TILE 32
#define EACH_PART(b) _Pragma("unroll") for (int b = 0; b < BV; b++)

typedef struct {
  float kept;    // e^g
  float beta;
  float by_key;    // 1 / |kᵣ|
  float by_query;  // 1 / (|qᵣ| sqrt(DK))
  float both;    // k · q
} token_t;

INLINE float dot(__global const float *a, __global const float *b) {
  hfloat sum = 0.0f;
  for (int i = 0; i < DK; i += HV) sum += HLOAD(a + i) * HLOAD(b + i);
  return HSUM(sum);
}

INLINE token_t token_of(__global const float *q, __global const float *k, const float b,
                        const float a, const float decay) {
  token_t token;
  token.kept = kept_of(a, decay);
  token.beta = SIGMOID(exp2_scalar, b);
  token.by_key = 1.0f / sqrt(dot(k, k) + L2_EPS);
  token.by_query = BY_DIM / sqrt(dot(q, q) + L2_EPS);
  token.both = dot(k, q) * token.by_key * token.by_query;
  return token;
}

// y = o / sqrt(mean(o²) + EPS) · norm · silu(z) of one head, in place.
INLINE void finish(__global float *y, __global const float *norm, PANELS(const float, gates),
                   const int token, const int column) {
  hfloat squares = 0.0f;
  for (int j = 0; j < DV; j += HV) squares += HLOAD(y + j) * HLOAD(y + j);
  const float scale = 1.0f / sqrt(HSUM(squares) / DV + EPS);
  for (int j = 0; j < DV;) { // runs of columns in which no panel ends
    const int panel = panel_of(gates_table, gates_count, column + j);
    const int stop = min(DV, PANEL_STOP(gates, panel) - column);
    __global const float *z = PANEL_ROW(gates, panel, token) + column;
    for (; j + VEC <= stop; j += VEC)
      VSTORE(VLOAD(y + j) * scale * VLOAD(norm + j) * activate(VLOAD(z + j)), y + j);
    for (; j < stop; j++) y[j] = y[j] * scale * norm[j] * activate_scalar(z[j]);
  }
}

__kernel void gated_delta(const int count, ARRAY(const float, x), PANELS(const float, gates),
                          ARRAY(const int, position), ARRAY(float, state), ARRAY(float, y),
                          __global const float *restrict decay,
                          __global const float *restrict dt_bias,
                          __global const float *restrict norm) {
  if (count == 0) return;
  AT(x);
  AT(state);
  AT(y);
  const int head = get_global_id(0);
  __global const float *q = x + head % K_HEADS * DK;
  __global const float *k = q + KEYS;
  __global const float *v = x + 2 * KEYS + head * DV;
  state += (size_t)head * DK * DV;
  y += head * DV;
  if (position[position_at] == 0)
    for (int i = 0; i < DK * DV; i += HV) HSTORE((hfloat)(0.0f), state + i);
  token_t tokens[TILE];
  for (int start = 0; start < count; start += TILE) {
    const int stop = min(count, start + TILE);
    for (int t = start; t < stop; t++)
      tokens[t - start] = token_of(q + (size_t)t * WIDTH, k + (size_t)t * WIDTH,
                                   GATE_B(t, head), GATE_A(t, head) + dt_bias[head], decay[head]);
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
          HSTORE(out, y + (size_t)t * (V_HEADS * DV) + c + b * HV);
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
      finish(y + (size_t)t * (V_HEADS * DV), norm, gates, gates_table, gates_count, t,
             GATES + head * DV);
  }
}
