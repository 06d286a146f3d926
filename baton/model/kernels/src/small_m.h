// Small-M products of queries with unpacked keys and values.
//
// Packing rows (packed_gemm.h) costs about as much as multiplying them by a few queries: `Packing<T>::kMaxSmallM`.
#pragma once

#include "simd.h"

namespace {

// Queries as `Dot` prepares them, `prepared_stride` floats apart, and their scores or weights.
struct SmallMQueries {
    const float* prepared;
    int64_t prepared_stride;
    float* scores;
    int64_t scores_stride;
};

template <typename T>
BATON_INLINE const typename Dot<T>::Prepared* prepared_query(const SmallMQueries& m, int64_t q) {
    return (const typename Dot<T>::Prepared*)(m.prepared + q * m.prepared_stride);
}

// ---- scores: dot products, kKeys keys at a time for kQueries queries

template <typename T, int kQueries, int kKeys>
BATON_INLINE void dots(const SmallMQueries& m, int64_t q, const T* const* keys, int64_t dim, Vec (*sums)[kWidth]) {
    using D = Dot<T>;
    Vec acc[kQueries][kKeys] = {};
    int64_t d = 0;
    for (; d + kSpan <= dim; d += kSpan) {
        for (int part = 0; part < D::kParts; part++) {
            Vec x[kQueries];
            for (int i = 0; i < kQueries; i++) x[i] = D::part_prepared(prepared_query<T>(m, q + i) + d, part);
            for (int k = 0; k < kKeys; k++) {
                const Vec key = D::part(keys[k] + d, part);
                for (int i = 0; i < kQueries; i++) acc[i][k] = D::add(acc[i][k], x[i], key);
            }
        }
    }
    if (d < dim) {
        Vec x[kQueries];
        for (int i = 0; i < kQueries; i++) x[i] = D::half_prepared(prepared_query<T>(m, q + i) + d);
        for (int k = 0; k < kKeys; k++) {
            const Vec key = D::half(keys[k] + d);
            for (int i = 0; i < kQueries; i++) acc[i][k] = D::add(acc[i][k], x[i], key);
        }
    }
    for (int i = 0; i < kQueries; i++)
        for (int k = 0; k < kKeys; k++) sums[i][k] = acc[i][k];
}

template <typename T, int kQueries, typename BeforeKeys>
void score_rows(
    const SmallMQueries& m, int64_t q, const T* const* keys, int64_t num_keys, int64_t dim, BeforeKeys before_keys) {
    constexpr int kKeys = 4;
    Vec sums[kQueries][kWidth];
    for (int64_t key = 0; key < num_keys; key += kWidth) {
        if (q == 0) before_keys(key);
        for (int k = 0; k < kWidth; k += kKeys) {
            const T* rows[kKeys];
            for (int i = 0; i < kKeys; i++) rows[i] = keys[key + k + i < num_keys ? key + k + i : num_keys - 1];
            Vec part[kQueries][kWidth];
            dots<T, kQueries, kKeys>(m, q, rows, dim, part);
            for (int i = 0; i < kQueries; i++)
                for (int j = 0; j < kKeys; j++) sums[i][k + j] = part[i][j];
        }
        for (int i = 0; i < kQueries; i++)
            store(m.scores + (q + i) * m.scores_stride + key, reduce_add_rows(sums[i]));
    }
}

// Scores of `num_keys` rows; the last one is repeated up to a multiple of kWidth. Queries go in threes, or in twos where
// one would remain. `before_keys(key)` is called once before each kWidth keys.
template <typename T, typename BeforeKeys>
void small_m_scores(const SmallMQueries& m, int64_t num_queries, const T* const* keys, int64_t num_keys, int64_t dim,
                    BeforeKeys before_keys) {
    for (int64_t q = 0; q < num_queries;) {
        const int64_t rest = num_queries - q;
        if (rest == 1) {
            score_rows<T, 1>(m, q, keys, num_keys, dim, before_keys);
            q += 1;
        } else if (rest == 2 || rest == 4) {
            score_rows<T, 2>(m, q, keys, num_keys, dim, before_keys);
            q += 2;
        } else {
            score_rows<T, 3>(m, q, keys, num_keys, dim, before_keys);
            q += 3;
        }
    }
}

// ---- sums of values, split as `load_split` gives them

// Accumulators [queries, dim].
struct Sums {
    float* sums;
    int64_t dim;
};

template <typename T, int kQueries, int kSplits>
void add_spans(const SmallMQueries& m, int64_t q, const T* const* values, int64_t num_keys, int64_t d, const Sums& out) {
    Vec sums[kQueries][2 * kSplits];
    float* to = out.sums + q * out.dim + d;
    for (int i = 0; i < kQueries; i++)
        for (int c = 0; c < 2 * kSplits; c++) sums[i][c] = load(to + i * out.dim + c * kWidth);
    for (int64_t key = 0; key < num_keys; key++) {
        Split value[kSplits];
        for (int c = 0; c < kSplits; c++) value[c] = load_split(values[key] + d + c * kSpan);
        for (int i = 0; i < kQueries; i++) {
            const Vec weight = broadcast(m.scores[(q + i) * m.scores_stride + key]);
            for (int c = 0; c < kSplits; c++) {
                sums[i][2 * c] += weight * value[c].a;
                sums[i][2 * c + 1] += weight * value[c].b;
            }
        }
    }
    for (int i = 0; i < kQueries; i++)
        for (int c = 0; c < 2 * kSplits; c++) store(to + i * out.dim + c * kWidth, sums[i][c]);
}

// Half a span at the end.
template <typename T, int kQueries>
void add_half(const SmallMQueries& m, int64_t q, const T* const* values, int64_t num_keys, int64_t d, const Sums& out) {
    Vec sums[kQueries];
    float* to = out.sums + q * out.dim + d;
    for (int i = 0; i < kQueries; i++) sums[i] = load(to + i * out.dim);
    for (int64_t key = 0; key < num_keys; key++) {
        const Vec value = load(values[key] + d);
        for (int i = 0; i < kQueries; i++) sums[i] += m.scores[(q + i) * m.scores_stride + key] * value;
    }
    for (int i = 0; i < kQueries; i++) store(to + i * out.dim, sums[i]);
}

template <typename T, int kQueries, int kSplits>
void add_rows(const SmallMQueries& m, int64_t q, const T* const* values, int64_t num_keys, const Sums& out) {
    int64_t d = 0;
    for (; d + kSplits * kSpan <= out.dim; d += kSplits * kSpan)
        add_spans<T, kQueries, kSplits>(m, q, values, num_keys, d, out);
    for (; d + kSpan <= out.dim; d += kSpan) add_spans<T, kQueries, 1>(m, q, values, num_keys, d, out);
    if (d < out.dim) add_half<T, kQueries>(m, q, values, num_keys, d, out);
}

// Adds every row of values times each query's weight, which is stored where its score was.
template <typename T>
void small_m_add_values(
    const SmallMQueries& m, int64_t num_queries, const T* const* values, int64_t num_keys, const Sums& out) {
    int64_t q = 0;
    for (; q + 6 <= num_queries; q += 6) add_rows<T, 6, 1>(m, q, values, num_keys, out);
    switch (num_queries - q) {
        case 5: add_rows<T, 5, 1>(m, q, values, num_keys, out); break;
        case 4: add_rows<T, 4, 1>(m, q, values, num_keys, out); break;
        case 3: add_rows<T, 3, 2>(m, q, values, num_keys, out); break;
        case 2: add_rows<T, 2, 2>(m, q, values, num_keys, out); break;
        case 1: add_rows<T, 1, 4>(m, q, values, num_keys, out); break;
        default: break;
    }
}

}  // namespace
