// Online softmax in powers of two: scores of a tile of keys become weights, and sums so far follow a new maximum.
//
// The maximum follows late: only when a score's exponent passes it by more than `kMaxExponent` (FlashAttention-4 does so).
// Nearly all tiles of a row then need neither the largest of their scores nor a new scale of the sums. Weights stay below
// 2^kMaxExponent, and a quotient of sums does not depend on the maximum. Whether it moves depends on the query's own
// scores alone.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMaxExponent = 8.0f;

struct ScoreScale {
    float scale, softcap;  // of a product, to be capped, or, with softcap 0, to be the exponent of two
};

// A query's softmax over the keys so far. `sums` [dim]: of weighted values, uninitialised until there is a maximum.
struct RunningSoftmax {
    float* sums;
    int64_t dim;
    float *row_sum, *row_max;  // [kWidth], [1]

    __attribute__((noinline)) void rescale(float new_max) const {
        const float factor = std::exp2(*row_max - new_max);
        if (*row_max > -INFINITY)
            for (int64_t i = 0; i < dim; i += kWidth) store(sums + i, load(sums + i) * factor);
        store(row_sum, load(row_sum) * factor);
        *row_max = new_max;
    }
};

// The scores of kVecs * kWidth keys in `row`, of which [begin, end) are visible, become weights.
template <int kTerms, int kVecs>
BATON_INLINE void weigh(Vec* row, int64_t begin, int64_t end, const ScoreScale& scale, const RunningSoftmax& so_far) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) row[v] *= scale.scale;
    if (scale.softcap > 0.0f)
        for (int v = 0; v < kVecs; v++) row[v] = scale.softcap * kLog2E * vec_tanh(row[v]);
    if (begin > 0 || end < kVecs * kWidth)
        for (int v = 0; v < kVecs; v++) row[v] = range_mask(v * kWidth, begin, end) ? row[v] : broadcast(-INFINITY);
    Vec best = row[0];
    for (int v = 1; v < kVecs; v++) best = vec_max(best, row[v]);
    if (any_greater(best, *so_far.row_max + kMaxExponent)) so_far.rescale(reduce_max(best));
    const Vec row_max = broadcast(*so_far.row_max);
    Vec row_sum = load(so_far.row_sum);
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) {
        row[v] = vec_exp2<kTerms>(row[v] - row_max);
        row_sum += row[v];
    }
    store(so_far.row_sum, row_sum);
}

}  // namespace
