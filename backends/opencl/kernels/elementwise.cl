// Add: y = x + residual, over `count` floats; one work-item takes `chunk` of them.

__kernel void add(const int count, ARRAY(const float, x), ARRAY(const float, residual),
                  ARRAY(float, y), const int chunk) {
  AT(x); AT(residual); AT(y);
  const int start = get_global_id(0) * chunk;
  const int stop = min(count, start + chunk);
  int i = start;
  for (; i + VEC <= stop; i += VEC) {
    VSTORE(VLOAD(x + i) + VLOAD(residual + i), y + i);
  }
  for (; i < stop; i++) y[i] = x[i] + residual[i];
}
