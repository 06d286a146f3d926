// GEMM over rows at arbitrary addresses: operands are packed first, then multiplied in register tiles of kMr x kNr.
//
// A k step is what one lane of a multiply-add takes: a float, or a pair of bfloat16 numbers where BATON_BF16_DOT says
// that the level has their dot product. C += A[:, k] (broadcast to every lane) * B[k, :], for every k step. Packed
// operands are stored as floats in both cases, so that there is one buffer type.
#pragma once

#include <type_traits>

#include "simd.h"

namespace {

constexpr int kMr = 6;                         // rows of a register tile, at most
constexpr int kNrVecs = kWidth == 16 ? 4 : 2;  // vectors of a register tile's row, as registers allow
constexpr int kNr = kNrVecs * kWidth;

BATON_INLINE Vec broadcast_step(const float* step) { return (Vec)(IntVec{} + load_as<int32_t>(step)); }

// ---- k steps of each element type

template <typename T>
struct Packing {  // one element
    static constexpr int kElements = 1;
    static constexpr bool kIsPacked = std::is_same_v<T, float>;  // rows of values need no packing
    static constexpr int kMaxSmallM = std::is_same_v<T, float> ? 2 : 12;  // up to here packing costs more, as measured
    static constexpr int kExp2Terms = std::is_same_v<T, float> ? 6 : 4;  // as exact as its products need
    BATON_INLINE static Vec add(Vec sum, Vec x, Vec y) { return sum + x * y; }
    // kWidth k steps, zero-padded where fewer elements remain.
    BATON_INLINE static Vec load_steps(const T* from, int64_t) { return load(from); }
    BATON_INLINE static void copy(const T* from, int64_t num_elements, float* to) {
        for (int64_t i = 0; i < num_elements; i += kWidth) store(to + i, load(from + i));
    }
    BATON_INLINE static Split pair_values(const T* row, const T*) { return load_split(row); }
    // One row of values, split as `load_split` does.
    BATON_INLINE static void pack_values(const T* row, const T*, int64_t dim, float* to) {
        int64_t d = 0;
        for (; d + kSpan <= dim; d += kSpan) store_split(to + d, load_split(row + d));
        if (d < dim) store(to + d, load(row + d));
    }
    BATON_INLINE static void store_weights(float* row, int64_t i, Vec weights) { store(row + i, weights); }
};
#if defined(BATON_BF16_DOT)
template <>
struct Packing<bf16> {  // two adjacent elements; of values, those of two adjacent keys
    static constexpr int kElements = 2;
    static constexpr bool kIsPacked = false;
    static constexpr int kMaxSmallM = 1;
    static constexpr int kExp2Terms = 4;
    BATON_INLINE static Vec add(Vec sum, Vec x, Vec y) { return Dot<bf16>::add(sum, x, y); }
    BATON_INLINE static Vec load_steps(const bf16* from, int64_t num_elements) {
        return num_elements < kSpan ? Dot<bf16>::half(from) : Dot<bf16>::part(from, 0);
    }
    BATON_INLINE static void copy(const bf16* from, int64_t num_elements, float* to) {
        std::memcpy(to, from, num_elements * sizeof(bf16));
    }
    BATON_INLINE static Split pair_values(const bf16* row, const bf16* next) {  // kSpan elements of each
        const BitVec a = load_as<BitVec>(row), b = load_as<BitVec>(next), lower = BitVec{} + 0xffffu;
        return {(Vec)((a & lower) | (b << 16)), (Vec)((a >> 16) | (b & ~lower))};
    }
    BATON_INLINE static void pack_values(const bf16* row, const bf16* next, int64_t dim, float* to) {
        int64_t d = 0;
        for (; d + kSpan <= dim; d += kSpan) store_split(to + d, pair_values(row + d, next + d));
        if (d < dim) {
            const BitVec a = (BitVec)load(row + d), b = (BitVec)load(next + d);
            store(to + d, (Vec)((a >> 16) | b));
        }
    }
    BATON_INLINE static void store_weights(float* row, int64_t i, Vec weights) {
#if defined(__AVX512BF16__)
        const __m256bh narrowed = _mm512_cvtneps_pbh((__m512)weights);
        std::memcpy((bf16*)row + i, &narrowed, sizeof narrowed);
#else
        store((bf16*)row + i, weights);
#endif
    }
};
#endif

// ---- transpose: lane i of row j becomes lane j of row i

constexpr int interleaved(int lane, int upper) {  // within every quarter of four lanes
    return lane / 4 * 4 + 2 * upper + lane % 4 / 2 + (lane % 2 ? kWidth : 0);
}
constexpr int gathered(int lane, int odd) {  // even or odd quarters of one vector, then of the other
    constexpr int kTaken = kWidth > 4 ? kWidth / 8 : 1;
    return (lane / 4 % kTaken * 2 + odd) * 4 + lane % 4 + (lane / 4 >= kTaken ? kWidth : 0);
}
template <int kStride, int kRows = kWidth, int... kLane>
BATON_INLINE void transpose_step(Vec* rows, std::integer_sequence<int, kLane...>) {
    constexpr bool kWithinQuarter = kStride < 4;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; i++) {
        if (i & kStride) continue;
        const Vec a = rows[i], b = rows[i + kStride];
        rows[i] = __builtin_shufflevector(a, b, (kWithinQuarter ? interleaved(kLane, 0) : gathered(kLane, 0))...);
        rows[i + kStride] = __builtin_shufflevector(a, b, (kWithinQuarter ? interleaved(kLane, 1) : gathered(kLane, 1))...);
    }
}
// Each step swaps one bit of the row index with one bit of the lane index; this order takes one instruction a vector.
BATON_INLINE void transpose(Vec* rows) {
    constexpr auto kLanesInOrder = std::make_integer_sequence<int, kWidth>();
    transpose_step<2>(rows, kLanesInOrder);
    transpose_step<1>(rows, kLanesInOrder);
    if constexpr (kWidth > 4) transpose_step<4>(rows, kLanesInOrder);
    if constexpr (kWidth > 8) transpose_step<8>(rows, kLanesInOrder);
}

// Packs kWidth rows of `dim` elements, transposed: row k of `to` (`stride` apart) gets k step k of every row. `to` has
// rows for a multiple of kWidth k steps; the excess is zeros.
template <typename T>
BATON_INLINE void pack_transposed(const T* const* rows, int64_t dim, float* to, int64_t stride) {
    constexpr int kElements = Packing<T>::kElements;
    for (int64_t d = 0; d < dim; d += kWidth * kElements, to += kWidth * stride) {
        Vec steps[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) steps[i] = Packing<T>::load_steps(rows[i] + d, dim - d);
        transpose(steps);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) store(to + i * stride, steps[i]);
    }
}

// ---- GEMM: c [queries, lanes] (+)= a [queries, num_steps] times b [num_steps, lanes]

struct AOperand {
    const float* steps;
    int64_t stride, num_steps;
};
struct COperand {
    float* sums;
    int64_t stride;
    bool overwrites;  // c = a * b, rather than c += a * b
};

template <typename T, int kQueries, int kVecs, typename RowOf>
BATON_INLINE void gemm_tile(const AOperand& a, int64_t q, RowOf row_of, int64_t lane, const COperand& c) {
    Vec sums[kQueries][kVecs] = {};
    float* to = c.sums + q * c.stride + lane;
    if (!c.overwrites)
        for (int i = 0; i < kQueries; i++)
            for (int v = 0; v < kVecs; v++) sums[i][v] = load(to + i * c.stride + v * kWidth);
    const float* step = a.steps + q * a.stride;
    for (int64_t k = 0; k < a.num_steps; k++, step++) {
        const float* row = row_of(k) + lane;
        Vec y[kVecs];
        for (int v = 0; v < kVecs; v++) y[v] = load(row + v * kWidth);
        for (int i = 0; i < kQueries; i++) {
            const Vec x = broadcast_step(step + i * a.stride);
            for (int v = 0; v < kVecs; v++) sums[i][v] = Packing<T>::add(sums[i][v], x, y[v]);
        }
    }
    for (int i = 0; i < kQueries; i++)
        for (int v = 0; v < kVecs; v++) store(to + i * c.stride + v * kWidth, sums[i][v]);
}

template <typename T, int kVecs, typename RowOf>
void gemm_columns(const AOperand& a, int64_t num_queries, RowOf row_of, int64_t lane, const COperand& c) {
    for (int64_t q = 0, num_rows; q < num_queries; q += num_rows) {
        const int64_t rest = num_queries - q;
        num_rows = rest >= 2 * kMr ? kMr : rest > kMr ? (rest + 1) / 2 : rest;  // no tile of one row
        switch (num_rows) {
            case 1: gemm_tile<T, 1, kVecs>(a, q, row_of, lane, c); break;
            case 2: gemm_tile<T, 2, kVecs>(a, q, row_of, lane, c); break;
            case 3: gemm_tile<T, 3, kVecs>(a, q, row_of, lane, c); break;
            case 4: gemm_tile<T, 4, kVecs>(a, q, row_of, lane, c); break;
            case 5: gemm_tile<T, 5, kVecs>(a, q, row_of, lane, c); break;
            default: gemm_tile<T, 6, kVecs>(a, q, row_of, lane, c); break;
        }
    }
}

// `row_of(k)`: the address of row k of b. `num_lanes`: a multiple of kWidth. Lanes are the outer loop, so that their part
// of b stays in the L1 cache.
template <typename T, typename RowOf>
void gemm(const AOperand& a, int64_t num_queries, RowOf row_of, int64_t num_lanes, const COperand& c) {
    int64_t lane = 0;
    for (; lane + kNr <= num_lanes; lane += kNr) gemm_columns<T, kNrVecs>(a, num_queries, row_of, lane, c);
    for (; lane < num_lanes; lane += kWidth) gemm_columns<T, 1>(a, num_queries, row_of, lane, c);
}

}  // namespace
