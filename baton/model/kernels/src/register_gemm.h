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

constexpr int kColumns = 4;      // k steps that are transposed together
constexpr int kGroupsAtOnce = 2;  // of kWidth keys: each query's k step is broadcast once for them

// Quarter i of the result: kColumns k steps of rows[4 * i], from element `d` on.
template <typename T>
BATON_INLINE Vec load_quarters(const T* const* rows, int64_t d) {
#if defined(__AVX512BF16__)
    const auto quarter = [=](int i) { return _mm_loadu_ps((const float*)(rows[4 * i] + d)); };
    __m512 v = _mm512_castps128_ps512(quarter(0));
    v = _mm512_insertf32x4(v, quarter(1), 1);
    v = _mm512_insertf32x4(v, quarter(2), 2);
    return (Vec)_mm512_insertf32x4(v, quarter(3), 3);
#else
    Vec v;
    for (int i = 0; i < kWidth / 4; i++) std::memcpy((char*)&v + 16 * i, rows[4 * i] + d, 16);
    return v;
#endif
}

// Lane i of columns[k]: k step k of rows[i], from element `d` on. Loading rows by quarters leaves half of the shuffles of
// `transpose`, and so few of them at a time that the CPU makes them during the products before.
template <typename T>
BATON_INLINE void load_columns(const T* const* rows, int64_t d, Vec* columns) {
    constexpr auto kLanesInOrder = std::make_integer_sequence<int, kWidth>();
#pragma GCC unroll 4
    for (int k = 0; k < kColumns; k++) columns[k] = load_quarters(rows + k, d);
    transpose_step<2, kColumns>(columns, kLanesInOrder);
    transpose_step<1, kColumns>(columns, kLanesInOrder);
}

// Calls of `before_columns` in `register_scores`.
inline int64_t num_column_blocks(int64_t num_keys, int64_t num_k_steps) {
    constexpr int64_t kKeys = kGroupsAtOnce * kWidth;
    return (num_keys + kKeys - 1) / kKeys * (num_k_steps / kColumns);
}

template <typename T, int kQueries, int kGroups, typename BeforeColumns>
BATON_INLINE void score_groups(const AOperand& a, const T* const* keys, int64_t dim, float* scores, int64_t stride,
                               BeforeColumns before_columns) {
    constexpr int kElements = Packing<T>::kElements;
    Vec sums[kGroups][kQueries] = {};
    for (int64_t d = 0; d < dim; d += kColumns * kElements) {
        Vec columns[kGroups][kColumns];
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; g++) load_columns(keys + g * kWidth, d, columns[g]);
        before_columns();
        const float* query = a.steps + d / kElements;
#pragma GCC unroll 4
        for (int k = 0; k < kColumns; k++) {
#pragma GCC unroll 8
            for (int q = 0; q < kQueries; q++) {
                const Vec x = broadcast_step(query + q * a.stride + k);
#pragma GCC unroll 2
                for (int g = 0; g < kGroups; g++) sums[g][q] = Packing<T>::add(sums[g][q], x, columns[g][k]);
            }
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; q++)
        for (int g = 0; g < kGroups; g++) store(scores + q * stride + g * kWidth, sums[g][q]);
}

// c [queries, num_keys]: products of `a` with keys of `dim` elements. `num_keys`: a multiple of kWidth.
template <typename T, int kQueries, typename BeforeColumns>
void register_scores(const AOperand& a, const T* const* keys, int64_t num_keys, int64_t dim, const COperand& c,
                     BeforeColumns before_columns) {
    int64_t key = 0;
    for (; key + kGroupsAtOnce * kWidth <= num_keys; key += kGroupsAtOnce * kWidth)
        score_groups<T, kQueries, kGroupsAtOnce>(a, keys + key, dim, c.sums + key, c.stride, before_columns);
    if (key < num_keys) score_groups<T, kQueries, 1>(a, keys + key, dim, c.sums + key, c.stride, before_columns);
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
