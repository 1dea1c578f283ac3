// One work-item counts up a word that the host watches. In an in-order queue it runs when everything
// before it is complete.
__kernel void raise_flag(const int count, ARRAY(volatile int, flag)) {
  AT(flag);
  if (count > 0) {
    RELEASE();
    flag[0] = flag[0] + 1;
  }
}

// The queue's gate: tells the host that everything before it is complete, then lets nothing pass
// until the host has opened so many gates, or gives up after `patience` looks. `words`, a cache line
// each: gates that were opened, gates that were reached, the last gate that gave up.
__kernel void gate(const int count, ARRAY(volatile uint, words), const int patience) {
  AT(words);
  if (count > 0) {
    const uint number = words[16] + 1;
    RELEASE();
    words[16] = number;
    int looks = 0;
    while ((int)(words[0] - number) < 0 && looks < patience) {
      looks++;
      PAUSE;
    }
    if (looks == patience) words[32] = number;
    ACQUIRE();
  }
}
