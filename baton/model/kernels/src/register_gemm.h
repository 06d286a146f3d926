// Products of few queries with rows of keys and values that are transposed, or paired, in registers. Every sum takes its
// products in the order of packed_gemm.h and so has the same bits, without a packed copy in memory.
#pragma once

#include "packed_gemm.h"

namespace {

constexpr int kMaxRegisterQueries = 8;

// True if rows of `dim` elements can be multiplied here: a transposed block and the sums must fit in the registers, of
// which CPUs with vectors of 16 floats have 32.
template <typename T>
constexpr bool fits_registers(int64_t num_queries, int64_t dim) {
    return kWidth == 16 && num_queries <= kMaxRegisterQueries && dim % (kWidth * Packing<T>::kElements) == 0;
}

// c [queries, num_keys]: products of `a` with keys of `dim` elements. `num_keys`: a multiple of kWidth. `before_step` is
// called num_keys / kWidth * dim / Packing<T>::kElements times.
template <typename T, int kQueries, typename BeforeStep>
void register_scores(const AOperand& a, const T* const* keys, int64_t num_keys, int64_t dim, const COperand& c,
                     BeforeStep before_step) {
    constexpr int kElements = Packing<T>::kElements;
    for (int64_t key = 0; key < num_keys; key += kWidth) {
        Vec sums[kQueries] = {};
        for (int64_t d = 0; d < dim; d += kWidth * kElements) {
            Vec steps[kWidth];
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; i++) steps[i] = Packing<T>::load_steps(keys[key + i] + d, dim - d);
            transpose(steps);
            const float* query = a.steps + d / kElements;
#pragma GCC unroll 16
            for (int k = 0; k < kWidth; k++) {
                before_step();
#pragma GCC unroll 8
                for (int q = 0; q < kQueries; q++)
                    sums[q] = Packing<T>::add(sums[q], broadcast_step(query + q * a.stride + k), steps[k]);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < kQueries; q++) store(c.sums + q * c.stride + key, sums[q]);
    }
}

// c [queries, dim], split as `load_split` gives it: plus weights times values. Calls `before_step` a.num_steps * dim /
// kSpan times.
template <typename T, int kQueries, typename BeforeStep>
void register_add_values(const AOperand& a, const T* const* values, int64_t num_keys, int64_t dim, const COperand& c,
                         BeforeStep before_step) {
    constexpr int kElements = Packing<T>::kElements;
    for (int64_t d = 0; d < dim; d += kSpan) {
        Vec low[kQueries] = {}, high[kQueries] = {};
        float* to = c.sums + d;
        if (!c.overwrites)
#pragma GCC unroll 8
            for (int q = 0; q < kQueries; q++) low[q] = load(to + q * c.stride), high[q] = load(to + q * c.stride + kWidth);
        for (int64_t step = 0; step < a.num_steps; step++) {
            before_step();
            const int64_t key = step * kElements, last = key + kElements < num_keys ? key + kElements - 1 : num_keys - 1;
            const Split pair = Packing<T>::pair_values(values[key] + d, values[last] + d);
            const float* weight = a.steps + step;
#pragma GCC unroll 8
            for (int q = 0; q < kQueries; q++) {
                const Vec x = broadcast_step(weight + q * a.stride);
                low[q] = Packing<T>::add(low[q], x, pair.a), high[q] = Packing<T>::add(high[q], x, pair.b);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < kQueries; q++) store(to + q * c.stride, low[q]), store(to + q * c.stride + kWidth, high[q]);
    }
}

// Calls `multiply` with the number of queries as a constant.
template <int kQueries = kMaxRegisterQueries, typename Multiply>
void with_constant(int64_t num_queries, Multiply multiply) {
    if (num_queries == kQueries)
        multiply(std::integral_constant<int, kQueries>());
    else if constexpr (kQueries > 1)
        with_constant<kQueries - 1>(num_queries, multiply);
}

}  // namespace
