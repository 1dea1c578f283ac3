// AddPositions: y[t] = x[t] + table[min(position + t + offset, rows - 1)], rows of D floats.
// Work-item (chunk of features, token). `count` is m.

__kernel void add_positions(const int count, ARRAY(const float, x), ARRAY(const int, position),
                            ARRAY(float, y), __global const float *restrict table,
                            const int offset, const int rows, const int chunk) {
  const int token = get_global_id(1);
  if (token >= count) return;
  AT(x); AT(position); AT(y);
  table += (size_t)min(position[0] + token + offset, rows - 1) * D;
  x += (size_t)token * D;
  y += (size_t)token * D;
  const int start = (int)get_global_id(0) * chunk;
  const int stop = min(D, start + chunk);
  int i = start;
  for (; i + VEC <= stop; i += VEC) VSTORE(VLOAD(x + i) + VLOAD(table + i), y + i);
  for (; i < stop; i++) y[i] = x[i] + table[i];
}
