// Matrix products of rows that lie anywhere: they are laid out as words first, then multiplied in registers.
//
// A word is what one lane of a multiply-add takes: a float, or a pair of bfloat16 numbers where BATON_BF16_PAIRS says
// that the level has their products. A product is the sum over words of a left row's word, in every lane, times a row
// of the right side. Words are kept as floats either way, so that there is one type of memory.
#pragma once

#include <type_traits>

#include "simd.h"

namespace {

constexpr int kProductRows = 6;                     // left rows that are multiplied together, at most
constexpr int kProductVecs = kWidth == 16 ? 4 : 2;  // by so many vectors of a right row: as registers allow
constexpr int kProductLanes = kProductVecs * kWidth;

BATON_INLINE Vec splat_word(const float* word) { return (Vec)(IntVec{} + load_as<int32_t>(word)); }

// ---- what a word is

template <typename T>
struct Words {  // one element
    static constexpr int kElements = 1;
    static constexpr bool kInPlace = std::is_same_v<T, float>;  // a row of values is one of words already
    static constexpr int kFewQueries = std::is_same_v<T, float> ? 2 : 12;  // not worth the laying out, as measured
    static constexpr int kPowerTerms = std::is_same_v<T, float> ? 6 : 4;  // as exact as its products need
    BATON_INLINE static Vec add(Vec sum, Vec x, Vec y) { return sum + x * y; }
    // kWidth words; with zeros behind where fewer elements are left.
    BATON_INLINE static Vec load_words(const T* from, int64_t) { return load(from); }
    BATON_INLINE static void copy(const T* from, int64_t num_elements, float* to) {
        for (int64_t i = 0; i < num_elements; i += kWidth) store(to + i, load(from + i));
    }
    // A row of values, as `load_split` splits it.
    BATON_INLINE static void lay_values(const T* row, const T*, int64_t dim, float* to) {
        int64_t d = 0;
        for (; d + kSpan <= dim; d += kSpan) store_split(to + d, load_split(row + d));
        if (d < dim) store(to + d, load(row + d));
    }
    BATON_INLINE static void put_weights(float* row, int64_t i, Vec weights) { store(row + i, weights); }
};
#if defined(BATON_BF16_PAIRS)
template <>
struct Words<bf16> {  // two adjacent elements; of values, those of two adjacent keys
    static constexpr int kElements = 2;
    static constexpr bool kInPlace = false;
    static constexpr int kFewQueries = 1;
    static constexpr int kPowerTerms = 4;
    BATON_INLINE static Vec add(Vec sum, Vec x, Vec y) { return Dot<bf16>::add(sum, x, y); }
    BATON_INLINE static Vec load_words(const bf16* from, int64_t num_elements) {
        return num_elements < kSpan ? Dot<bf16>::half(from) : Dot<bf16>::part(from, 0);
    }
    BATON_INLINE static void copy(const bf16* from, int64_t num_elements, float* to) {
        std::memcpy(to, from, num_elements * sizeof(bf16));
    }
    BATON_INLINE static void lay_values(const bf16* row, const bf16* next, int64_t dim, float* to) {
        const BitVec lower = BitVec{} + 0xffffu;
        int64_t d = 0;
        for (; d + kSpan <= dim; d += kSpan) {
            const BitVec a = load_as<BitVec>(row + d), b = load_as<BitVec>(next + d);
            store(to + d, (Vec)((a & lower) | (b << 16)));
            store(to + d + kWidth, (Vec)((a >> 16) | (b & ~lower)));
        }
        if (d < dim) {
            const BitVec a = (BitVec)load(row + d), b = (BitVec)load(next + d);
            store(to + d, (Vec)((a >> 16) | b));
        }
    }
    BATON_INLINE static void put_weights(float* row, int64_t i, Vec weights) {
#if defined(__AVX512BF16__)
        const __m256bh narrowed = _mm512_cvtneps_pbh((__m512)weights);
        std::memcpy((bf16*)row + i, &narrowed, sizeof narrowed);
#else
        store((bf16*)row + i, weights);
#endif
    }
};
#endif

// ---- rows across: lane i of row j becomes lane j of row i

constexpr int interleaved(int lane, int upper) {  // inside every quarter of four lanes
    return lane / 4 * 4 + 2 * upper + lane % 4 / 2 + (lane % 2 ? kWidth : 0);
}
constexpr int gathered(int lane, int odd) {  // even or odd quarters of one vector, then of the other
    constexpr int kTaken = kWidth > 4 ? kWidth / 8 : 1;
    return (lane / 4 % kTaken * 2 + odd) * 4 + lane % 4 + (lane / 4 >= kTaken ? kWidth : 0);
}
template <int kStride, int... kLane>
BATON_INLINE void exchange(Vec* rows, std::integer_sequence<int, kLane...>) {
    constexpr bool kInside = kStride < 4;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i++) {
        if (i & kStride) continue;
        const Vec a = rows[i], b = rows[i + kStride];
        rows[i] = __builtin_shufflevector(a, b, (kInside ? interleaved(kLane, 0) : gathered(kLane, 0))...);
        rows[i + kStride] = __builtin_shufflevector(a, b, (kInside ? interleaved(kLane, 1) : gathered(kLane, 1))...);
    }
}
// Each step swaps a bit of the row's number with one of the lane's, in an order that takes one instruction a vector.
BATON_INLINE void turn(Vec* rows) {
    constexpr auto kLanesInOrder = std::make_integer_sequence<int, kWidth>();
    exchange<2>(rows, kLanesInOrder);
    exchange<1>(rows, kLanesInOrder);
    if constexpr (kWidth > 4) exchange<4>(rows, kLanesInOrder);
    if constexpr (kWidth > 8) exchange<8>(rows, kLanesInOrder);
}

// The words of kWidth rows of `dim` elements, across: row w of `to` (`stride` apart) gets every row's word w. `to` has
// rows for a multiple of kWidth words; those that there are not are zeros.
template <typename T>
BATON_INLINE void lay_across(const T* const* rows, int64_t dim, float* to, int64_t stride) {
    constexpr int kElements = Words<T>::kElements;
    for (int64_t d = 0; d < dim; d += kWidth * kElements, to += kWidth * stride) {
        Vec words[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) words[i] = Words<T>::load_words(rows[i] + d, dim - d);
        turn(words);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; i++) store(to + i * stride, words[i]);
    }
}

// ---- products: out [queries, lanes] (+)= left [queries, num_words] times right [num_words, lanes]

struct Left {
    const float* words;
    int64_t stride, num_words;
};
struct Out {
    float* sums;
    int64_t stride;
    bool is_new;  // set, rather than added to
};

template <typename T, int kQueries, int kVecs, typename RowOf>
BATON_INLINE void multiply_some(const Left& left, int64_t q, RowOf row_of, int64_t lane, const Out& out) {
    Vec sums[kQueries][kVecs] = {};
    float* to = out.sums + q * out.stride + lane;
    if (!out.is_new)
        for (int i = 0; i < kQueries; i++)
            for (int v = 0; v < kVecs; v++) sums[i][v] = load(to + i * out.stride + v * kWidth);
    const float* word = left.words + q * left.stride;
    for (int64_t w = 0; w < left.num_words; w++, word++) {
        const float* row = row_of(w) + lane;
        Vec y[kVecs];
        for (int v = 0; v < kVecs; v++) y[v] = load(row + v * kWidth);
        for (int i = 0; i < kQueries; i++) {
            const Vec x = splat_word(word + i * left.stride);
            for (int v = 0; v < kVecs; v++) sums[i][v] = Words<T>::add(sums[i][v], x, y[v]);
        }
    }
    for (int i = 0; i < kQueries; i++)
        for (int v = 0; v < kVecs; v++) store(to + i * out.stride + v * kWidth, sums[i][v]);
}

template <typename T, int kVecs, typename RowOf>
void multiply_lanes(const Left& left, int64_t num_queries, RowOf row_of, int64_t lane, const Out& out) {
    for (int64_t q = 0, some; q < num_queries; q += some) {
        const int64_t rest = num_queries - q;
        some = rest >= 2 * kProductRows ? kProductRows : rest > kProductRows ? (rest + 1) / 2 : rest;  // none alone
        switch (some) {
            case 1: multiply_some<T, 1, kVecs>(left, q, row_of, lane, out); break;
            case 2: multiply_some<T, 2, kVecs>(left, q, row_of, lane, out); break;
            case 3: multiply_some<T, 3, kVecs>(left, q, row_of, lane, out); break;
            case 4: multiply_some<T, 4, kVecs>(left, q, row_of, lane, out); break;
            case 5: multiply_some<T, 5, kVecs>(left, q, row_of, lane, out); break;
            default: multiply_some<T, 6, kVecs>(left, q, row_of, lane, out); break;
        }
    }
}

// `row_of(w)`: where row w of the right side is. `num_lanes`: a multiple of kWidth. Lanes are outermost, so that their
// part of the right side stays in the first cache.
template <typename T, typename RowOf>
void multiply(const Left& left, int64_t num_queries, RowOf row_of, int64_t num_lanes, const Out& out) {
    int64_t lane = 0;
    for (; lane + kProductLanes <= num_lanes; lane += kProductLanes)
        multiply_lanes<T, kProductVecs>(left, num_queries, row_of, lane, out);
    for (; lane < num_lanes; lane += kWidth) multiply_lanes<T, 1>(left, num_queries, row_of, lane, out);
}

}  // namespace
