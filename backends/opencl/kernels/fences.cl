// Memory order between threads of a device, and between its kernels and the host, for kernels that
// synchronise within a launch. OpenCL 1.2's atomics are relaxed and PoCL's mem_fence is empty: on a
// processor Clang's own fences order memory (none is an instruction on x86; `dmb` on arm64). GPUs
// have fences whose scope includes the host from OpenCL C 2.0 on, an optional feature of 3.0.
#if defined(__x86_64__) || defined(__aarch64__) || defined(__arm__)
#ifdef __has_builtin
#if __has_builtin(__atomic_thread_fence)
#define ACQUIRE() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define RELEASE() __atomic_thread_fence(__ATOMIC_RELEASE)
#endif
#endif
#elif __OPENCL_C_VERSION__ >= 200
#if __OPENCL_C_VERSION__ < 300 || \
    (defined(__opencl_c_atomic_scope_all_devices) && defined(__opencl_c_atomic_order_acq_rel))
#define ACQUIRE() \
  atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_acquire, memory_scope_all_svm_devices)
#define RELEASE() \
  atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_release, memory_scope_all_svm_devices)
#endif
#endif
#ifndef ACQUIRE
#define ACQUIRE() mem_fence(CLK_GLOBAL_MEM_FENCE)
#define RELEASE() mem_fence(CLK_GLOBAL_MEM_FENCE)
#endif

#ifdef __x86_64__
#define PAUSE __builtin_ia32_pause()
#elif defined(__aarch64__) && defined(__has_builtin)
#if __has_builtin(__builtin_arm_yield)
#define PAUSE __builtin_arm_yield()
#endif
#endif
#ifndef PAUSE
#define PAUSE
#endif
