// ShortConv: c[t] = Σ_j taps[j] u[t - L + 1 + j] in each channel. Work-item (chunk of channels, tile
// of tokens). `count` is m. GATED: x is B | C | X, u = B X, and y = C act(c), else u = x.
//
// Of each channel the first tile alone reads the state, and then replaces it: where the call has
// fewer tokens than the state rows it is the only tile.
#define BACK (TAPS - 1)

#if GATED
#define INPUT(LOAD, t) \
  (LOAD(in + (size_t)(t) * in_row) * LOAD(value + (size_t)(t) * value_row))
#define OUTPUT(LOAD, t, c) (LOAD(gate + (size_t)(t) * gate_row) * (c))
#define SOURCES 3
#else
#define INPUT(LOAD, t) LOAD(in + (size_t)(t) * in_row)
#define OUTPUT(LOAD, t, c) (c)
#define SOURCES 1
#endif
#ifdef ACTIVATION
#define ACT_VECTOR activate
#define ACT_SCALAR activate_scalar
#else
#define ACT_VECTOR
#define ACT_SCALAR
#endif
#if BIAS
#define BIASED(LOAD) LOAD(bias + i)
#else
#define BIASED(LOAD) 0.0f
#endif

// The row of u that is `back` rows before token 0: of the state.
#define STATE(LOAD, back) (known ? LOAD(state + (BACK - (back)) * width + i) : 0.0f)

// Columns i to i + the vector's width of a tile's tokens.
#define CONVOLVE(real, LOAD, STORE, ACT)                                                    \
  {                                                                                         \
    __global const float *in = from[0] + i;                                                 \
    const int in_row = row[0];                                                              \
    COLUMNS_OF_GATE                                                                         \
    real past[BACK], tap[TAPS];                                                             \
    for (int j = 0; j < TAPS; j++) tap[j] = LOAD(taps + j * width + i);                     \
    const real offset = BIASED(LOAD);                                                       \
    for (int j = 0; j < BACK; j++) {                                                        \
      const int t = first + j - BACK;                                                       \
      if (t >= 0) past[j] = INPUT(LOAD, t);                                                 \
      else past[j] = STATE(LOAD, -t);                                                       \
    }                                                                                       \
    for (int t = first; t < last; t++) {                                                    \
      const real now = INPUT(LOAD, t);                                                      \
      real sum = now * tap[BACK] + offset;                                                  \
      for (int j = 0; j < BACK; j++) sum += past[j] * tap[j];                               \
      for (int j = 0; j + 1 < BACK; j++) past[j] = past[j + 1];                             \
      past[BACK - 1] = now;                                                                 \
      STORE(OUTPUT(LOAD, t, ACT(sum)), y + (size_t)t * width + i);                          \
    }                                                                                       \
    if (first == 0)                                                                         \
      for (int j = 0; j < BACK; j++) {                                                      \
        const int t = count + j - BACK;                                                     \
        real kept;                                                                          \
        if (t >= 0) kept = INPUT(LOAD, t);                                                  \
        else kept = STATE(LOAD, -t);                                                        \
        STORE(kept, state + j * width + i);                                                 \
      }                                                                                     \
  }
#if GATED
#define COLUMNS_OF_GATE                                                 \
  __global const float *gate = from[1] + i, *value = from[2] + i;       \
  const int gate_row = row[1], value_row = row[2];
#else
#define COLUMNS_OF_GATE
#endif
#define LOAD_SCALAR(p) (*(p))
#define STORE_SCALAR(v, p) (*(p) = (v))

__kernel void short_conv(const int count, PANELS(const float, x), ARRAY(const int, position),
                         ARRAY(float, state), ARRAY(float, y), __global const float *restrict taps,
                         __global const float *restrict bias, const int width, const int chunk,
                         const int tile) {
  AT(state);
  AT(y);
  const int first = (int)get_global_id(1) * tile;
  const int last = min(count, first + tile);
  if (first >= last) return;
  const int known = position[position_at] > 0;
  const int start = (int)get_global_id(0) * chunk;
  const int end = min(width, start + chunk);
  for (int i = start, stop; i < end;) {
    __global const float *from[SOURCES];
    int row[SOURCES];
    stop = end;
    for (int s = 0; s < SOURCES; s++) { // runs of columns in which no panel ends
      const int panel = panel_of(x_table, x_count, i + s * width);
      stop = min(stop, PANEL_STOP(x, panel) - s * width);
      from[s] = PANEL_ROW(x, panel, 0) + s * width;
      row[s] = x_table[4 * panel + 3];
    }
    for (; i + VEC <= stop; i += VEC) CONVOLVE(vfloat, VLOAD, VSTORE, ACT_VECTOR)
    for (; i < stop; i++) CONVOLVE(float, LOAD_SCALAR, STORE_SCALAR, ACT_SCALAR)
  }
}
