// One work-item counts up a word that the host watches. In an in-order queue it runs when everything
// before it is complete.
__kernel void raise_flag(const int count, ARRAY(volatile int, flag)) {
  AT(flag);
  if (count > 0) {
    mem_fence(CLK_GLOBAL_MEM_FENCE);
    flag[0] = flag[0] + 1;
  }
}
