// One float in, one float out; after activations.cl. A work-item takes `chunk` floats.

// y = act(y) over `count` floats.
__kernel void act_in_place(const int count, ARRAY(float, y), const int chunk) {
  AT(y);
  const int start = (int)get_global_id(0) * chunk;
  const int stop = min(count, start + chunk);
  int i = start;
  for (; i + VEC <= stop; i += VEC) VSTORE(activate(VLOAD(y + i)), y + i);
  for (; i < stop; i++) y[i] = activate_scalar(y[i]);
}
