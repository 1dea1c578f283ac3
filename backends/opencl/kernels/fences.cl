// Memory order between threads of a processor, and between its kernels and the host, for kernels that
// synchronise within a launch. OpenCL 1.2's atomics are relaxed and PoCL's mem_fence is empty: where
// the compiler is Clang, its own fences order memory (none is an instruction on x86; `dmb` on arm64).
#ifdef __has_builtin
#if __has_builtin(__atomic_thread_fence)
#define ACQUIRE() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define RELEASE() __atomic_thread_fence(__ATOMIC_RELEASE)
#endif
#endif
#ifndef ACQUIRE
#define ACQUIRE() mem_fence(CLK_GLOBAL_MEM_FENCE)
#define RELEASE() mem_fence(CLK_GLOBAL_MEM_FENCE)
#endif

#ifdef __x86_64__
#define PAUSE __builtin_ia32_pause()
#else
#define PAUSE
#endif
