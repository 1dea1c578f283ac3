// One work-item counts up a word that the host watches. In an in-order queue it runs when everything
// before it is complete.
__kernel void raise_flag(const int count, ARRAY(volatile int, flag)) {
  AT(flag);
  if (count > 0) {
    RELEASE();
    flag[0] = flag[0] + 1;
  }
}

// A stream wait: tells the host that everything before it is complete, then blocks the queue until
// the host has signalled so many waits, or gives up after `patience` polls. `words`, a cache line
// each: waits that were signalled, waits that were reached, the last wait that gave up.
__kernel void wait_value(const int count, ARRAY(volatile uint, words), const int patience) {
  AT(words);
  if (count > 0) {
    const uint number = words[16] + 1;
    RELEASE();
    words[16] = number;
    int polls = 0;
    while ((int)(words[0] - number) < 0 && polls < patience) {
      polls++;
      PAUSE;
    }
    if (polls == patience) words[32] = number;
    ACQUIRE();
  }
}
