// ShortConv: c[t] = Σ_j taps[j] u[t - L + 1 + j] in each channel. Work-item (chunk of channels, tile
// of tokens), token by token, so that rows are read from start to end. `count` is m.
// GATED: x is B | C | X, u = B X, and y = C act(c), else u = x.
//
// Of each channel the first tile alone reads the state, and then replaces it: where the call has
// fewer tokens than the state rows it is the only tile.
#define BACK (TAPS - 1)

#if GATED
#define INPUT(LOAD, t) \
  (LOAD(from[0] + (size_t)(t) * row[0] + i) * LOAD(from[2] + (size_t)(t) * row[2] + i))
#define OUTPUT(LOAD, t, c) (LOAD(from[1] + (size_t)(t) * row[1] + i) * (c))
#define SOURCES 3
#else
#define INPUT(LOAD, t) LOAD(from[0] + (size_t)(t) * row[0] + i)
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

// Columns i to i + the vector's width of u, `back` rows before token 0: of the state.
#define STATE(LOAD, back) (known ? LOAD(state + (BACK - (back)) * width + i) : 0.0f)

#define CONVOLVE(real, LOAD, STORE, ACT)                                              \
  {                                                                                   \
    real sum = BIASED(LOAD);                                                          \
    _Pragma("unroll") for (int j = 0; j < TAPS; j++) {                                \
      real u;                                                                         \
      if (t + j >= BACK) u = INPUT(LOAD, t + j - BACK);                               \
      else u = STATE(LOAD, BACK - t - j);                                             \
      sum += LOAD(taps + j * width + i) * u;                                          \
    }                                                                                 \
    STORE(OUTPUT(LOAD, t, ACT(sum)), y + (size_t)t * width + i);                      \
  }

// Rows that move in place: none is written before it is read.
#define KEEP(real, LOAD, STORE)                                                       \
  for (int j = 0; j < BACK; j++) {                                                    \
    const int t = count + j - BACK;                                                   \
    real kept;                                                                        \
    if (t >= 0) kept = INPUT(LOAD, t);                                                \
    else kept = STATE(LOAD, -t);                                                      \
    STORE(kept, state + j * width + i);                                               \
  }
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
  for (int run = start, stop; run < end; run = stop) { // runs of columns in which no panel ends
    __global const float *from[SOURCES];
    int row[SOURCES];
    stop = end;
    for (int s = 0; s < SOURCES; s++) {
      const int panel = panel_of(x_table, x_count, run + s * width);
      stop = min(stop, PANEL_STOP(x, panel) - s * width);
      from[s] = PANEL_ROW(x, panel, 0) + s * width;
      row[s] = x_table[4 * panel + 3];
    }
    for (int t = first; t < last; t++) {
      int i = run;
      for (; i + VEC <= stop; i += VEC) CONVOLVE(vfloat, VLOAD, VSTORE, ACT_VECTOR)
      for (; i < stop; i++) CONVOLVE(float, LOAD_SCALAR, STORE_SCALAR, ACT_SCALAR)
    }
    if (first == 0) {
      int i = run;
      for (; i + VEC <= stop; i += VEC) KEEP(vfloat, VLOAD, VSTORE)
      for (; i < stop; i++) KEEP(float, LOAD_SCALAR, STORE_SCALAR)
    }
  }
}
