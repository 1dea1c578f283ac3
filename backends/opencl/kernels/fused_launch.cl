// Calls of a CPU device in one launch. Every work-group goes through all entries, one after the other,
// and claims groups of each until none is left; before an entry that `waits` it lets all groups of
// those before be done. It waits for groups alone that a running work-group has claimed, so it does
// not matter how many of them run at once, or when each begins. No thread sleeps in between.
//
// `entries` [count][ENTRY]: which kernel, its groups in dimension 0 and in all, whether it waits, its
// arguments, as 64-bit words. `state`, a line of words each: work-groups that left, then for each entry
// its claimed and done groups; zero before and after. `run_group` and the macros are from megakernel.py,
// RELEASE and ACQUIRE from fences.cl: what a group wrote is visible to all that saw it counted as done.

// A thread that claimed a group may have lost the core to another process. One that waits for longer
// than PATIENCE cycles, and than it has worked before, leaves: the driver's thread sleeps, which frees a
// core, and the others do the rest. (Elsewhere than on x86 there is no clock, and no thread leaves.)
#ifdef __x86_64__
#define NOW ((long)__builtin_readcyclecounter())
#else
#define NOW 0l
#endif
#define LINE 16
#define CLAIMED(e) state[LINE * ((e) + 1)]
#define DONE(e) state[LINE * ((e) + 1) + 1]

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void fused_launch(
    const int count, __global const ulong *entries, __global volatile int *state) {
  if (count == 0) return;
  int oldest = 0;  // the first entry that may not be done
  long began = NOW;
  for (int e = 0; e < count; e++) {
    __global const ulong *entry = entries + (size_t)e * ENTRY;
    const int which = (int)entry[0], wide = (int)entry[1], groups = (int)entry[2];
    if (entry[3]) {
      const long waits = NOW, until = waits + (waits - began) + PATIENCE;
      for (; oldest < e; oldest++) {
        const int all = (int)entries[(size_t)oldest * ENTRY + 2];
        while (DONE(oldest) < all && (began = NOW) <= until) PAUSE;
        if (DONE(oldest) < all) break;
      }
      if (oldest < e) break;
      ACQUIRE();
    }
    while (CLAIMED(e) < groups) {
      const int g = atomic_inc(&CLAIMED(e));
      if (g >= groups) break;
      run_group(which, (int2)(g % wide, g / wide), entry + 4);
      RELEASE();
      atomic_inc(&DONE(e));
    }
  }
  RELEASE();
  if (atomic_inc(state) + 1 == get_num_groups(0)) {
    ACQUIRE();
    for (int e = 0; e <= count; e++) state[LINE * e] = state[LINE * e + 1] = 0;
  }
}

// Addresses of buffers: `out` gets one for each.
#define EACH_BUFFER(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7)
#define PARAMETER(i) , __global char *b##i
#define ADDRESS(i) if (i < count) out[i] = (ulong)b##i;
__kernel void addresses(const int count, __global ulong *out EACH_BUFFER(PARAMETER)) {
  EACH_BUFFER(ADDRESS)
}
