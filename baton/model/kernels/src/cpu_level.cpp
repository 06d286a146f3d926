// The highest level that this CPU can run. Built into the portable library only, so that every CPU can call it.
#define BATON_API extern "C" __attribute__((visibility("default")))

// 0: portable; 1: AVX2 with FMA; 2: AVX512 with dot products of bfloat16 and of int8. The operating system must save the
// wide registers, too.
BATON_API int baton_cpu_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    return wide ? 2 : 1;
#else
    return 0;
#endif
}
