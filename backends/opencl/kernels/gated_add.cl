// y = residual + sigmoid(gates · weight) · x over rows of D floats (`GatedAdd` in ops.py). One
// work-group of LANES work-items per row. `count` is m; with 0 the rows have no floats, because
// PoCL 3.0 miscompiles a return in front of a barrier.

__kernel void gated_add(const int count, PANELS(const float, x), ARRAY(const float, gates),
                        ARRAY(const float, residual), ARRAY(float, y),
                        __global const float *restrict weight) {
  LANES_SCRATCH(scratch);
  AT(gates); AT(residual); AT(y);
  const int n = count > 0 ? D : 0;
  const int token = get_group_id(0);
  gates += (size_t)token * D;
  residual += (size_t)token * D;
  y += (size_t)token * D;
  vfloat sum = 0;
  EACH_VECTOR_OF(i, 0, n) sum = VLOAD(gates + i) * VLOAD(weight + i) + sum;
  float mine = VSUM(sum);
  EACH_REST_OF(i, 0, n) mine += gates[i] * weight[i];
  const float share = 1.0f / (1.0f + exp2_scalar(-1.4426950408889634f * lanes_sum(mine, scratch)));
  for (int p = 0; p < (n ? x_count : 0); p++) {
    const int start = PANEL_START(x, p), stop = PANEL_STOP(x, p);
    __global const float *from = PANEL_ROW(x, p, token);
    EACH_VECTOR_OF(i, start, stop) {
      VSTORE(share * VLOAD(from + i) + VLOAD(residual + i), y + i);
    }
    EACH_REST_OF(i, start, stop) y[i] = share * from[i] + residual[i];
  }
}
