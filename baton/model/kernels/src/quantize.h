// Rounds a row of numbers to int8 by its own maximum: rows of x for int8 products, and K and V of a token in pages.
#pragma once

#include "simd.h"

namespace {

// Explicit: a compiler may fuse in one copy of a loop and not in another, and rows would differ.
BATON_INLINE float fused_multiply_add(float x, float y, float z) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(x, y, z);
#else
    return x * y + z;  // no fused multiply-add here
#endif
}

// Quantises a row to int8 [num_padded], shifted by kShift, and returns its scale: NaN for a row with a NaN or an infinity,
// 0 for a row so small that the inverse of its scale would be infinite.
template <int kShift, typename T>
float quantize_row(const T* x, int64_t num_in, int64_t num_padded, uint8_t* to) {
    Vec absmax{}, nonfinite{};
    int64_t i = 0;
    for (; i + kWidth <= num_in; i += kWidth) {
        const Vec v = load(x + i);
        absmax = vec_max(absmax, vec_max(v, -v));
        nonfinite += v - v;
    }
    float row_absmax = reduce_max(absmax), nonfinite_sum = reduce_add(nonfinite);
    for (int64_t rest = i; rest < num_in; rest++) {
        const float v = widen(x[rest]), positive = v < 0.0f ? -v : v;
        row_absmax = positive > row_absmax ? positive : row_absmax;
        nonfinite_sum += v - v;
    }
    std::memset(to, kShift, num_padded);
    if (nonfinite_sum != nonfinite_sum) return nonfinite_sum;
    if (row_absmax < 1e-30f) return 0.0f;
    const float factor = 127.0f / row_absmax, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    for (i = 0; i < num_in; i++) {
        const float rounded = fused_multiply_add(widen(x[i]), factor, magic);
        int32_t bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        to[i] = (uint8_t)(bits + kShift);  // the low byte is the integer, in two's complement
    }
    return row_absmax / 127.0f;
}

}  // namespace
