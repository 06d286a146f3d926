// What is prefetched, how, and how far ahead: it differs between CPUs (docs/results/kernels.md has the measurements).
#pragma once

#include <cstdint>

#include "simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

// Zen 4: AMD's family 0x19 with AVX512. Few lines can be on their way into its first cache at a time, so prefetches into
// it, non-temporal ones included, hold up reading.
inline bool is_zen4() {
#if defined(__x86_64__) && defined(__AVX512F__)
    unsigned version = 0, b, c, d;
    if (!(__builtin_cpu_init(), __builtin_cpu_is("amd")) || !__get_cpuid(1, &version, &b, &c, &d)) return false;
    return (version >> 8 & 0xf) + (version >> 20 & 0xff) == 0x19;
#else
    return false;
#endif
}
const bool kIsZen4 = is_zen4();

// On Intel CPUs non-temporal prefetches read at half the speed (measured on Sapphire Rapids: 5.5 GB/s against 13.9).
#if defined(__x86_64__)
const bool kHasFastNonTemporalReads = (__builtin_cpu_init(), !__builtin_cpu_is("intel"));
#else
const bool kHasFastNonTemporalReads = true;
#endif

// Rows of keys and values at scattered places, which the hardware cannot predict.
BATON_INLINE void prefetch_line(const void* at) {
    kIsZen4 ? __builtin_prefetch(at, 0, 2) : __builtin_prefetch(at);
}

// Weights that are read in order, once. Non-temporal prefetches leave the caches to data that is reused.
// `kSecondCacheByPairs`: every other line; the hardware fetches the other one of its pair.
enum class WeightPrefetch { kNone, kNonTemporal, kSecondCache, kSecondCacheByPairs };

struct WeightPrefetchPlan {
    WeightPrefetch how;
    int64_t bytes_ahead;
};

// For a group of rows. The more rows, the less time is left to wait for a line; the fewer, the better the hardware does.
inline WeightPrefetchPlan plan_weight_prefetch(int64_t num_rows) {
    constexpr int64_t kNear = 4 * 1024, kFar = 8 * 1024;
    if (!kIsZen4) return {kHasFastNonTemporalReads ? WeightPrefetch::kNonTemporal : WeightPrefetch::kSecondCache, kFar};
    if (num_rows <= 3) return {WeightPrefetch::kNone, 0};
    if (num_rows <= 5) return {WeightPrefetch::kSecondCacheByPairs, kNear};
    return {WeightPrefetch::kSecondCache, kFar};
}

}  // namespace
