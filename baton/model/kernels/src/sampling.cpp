// Chooses tokens: the likeliest, or one drawn after temperature, top-k, top-p and min-p.
//
// Called through `baton/model/kernels/sampling.py`; what the filters mean, and the order of the draw, are those of
// `baton/model/distribution.py`. Nothing is sorted: where a filter cuts is found by counting, as radix sort does.
#include <algorithm>
#include <cmath>
#include <limits>

#include "room.h"
#include "simd.h"
#include "team.h"

namespace {

float largest(const float* x, int64_t n) {
    Vec best = splat(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) best = larger(load(x + i), best);
    float most = largest_of(best);
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// The first of the largest; 0 where nothing is larger than anything, as among NaNs. One pass finds the first block that
// has it.
template <typename T>
int64_t likeliest(const T* logits, int64_t n) {
    constexpr int64_t kBlock = 16 * kSpan;
    float most = -std::numeric_limits<float>::infinity();
    int64_t begin = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
        float best = most;
        if (first + kBlock <= n) {
            Split parts = load_split(logits + first);
            Vec even = larger(parts.a, splat(most)), odd = larger(parts.b, splat(most));
            for (int64_t i = kSpan; i < kBlock; i += kSpan) {
                parts = load_split(logits + first + i);
                even = larger(parts.a, even), odd = larger(parts.b, odd);
            }
            best = largest_of(larger(even, odd));
        } else {
            for (int64_t i = first; i < n; i++) best = widen(logits[i]) > best ? widen(logits[i]) : best;
        }
        if (best > most) most = best, begin = first;
    }
    for (int64_t i = begin; i < std::min(begin + kBlock, n); i++)
        if (widen(logits[i]) == most) return i;
    return 0;
}

// e^((logit - best) / temperature): the likeliest token's weight is 1, and what is too small for a float is nothing.
BATON_INLINE Vec weight_of(Vec logits, Vec best, Vec temperature) {
    const Vec x = (logits - best) / temperature;
    return x < -87.0f ? Vec{} : exp_of(x);
}
void weigh(const float* logits, int64_t n, float temperature, float* weights) {
    const Vec best = splat(largest(logits, n)), divisor = splat(temperature);
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(weights + i, weight_of(load(logits + i), best, divisor));
    if (i == n) return;
    float last[kWidth] = {};
    std::copy(logits + i, logits + n, last);
    store(last, weight_of(load(last), best, divisor));
    std::copy(last, last + (n - i), weights + i);
}

double sum_from(const float* weights, int64_t n, float least) {
    constexpr int kLanes = 8;
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int lane = 0; lane < kLanes; lane++) lanes[lane] += weights[i + lane] >= least ? weights[i + lane] : 0.0f;
    for (; i < n; i++) lanes[0] += weights[i] >= least ? weights[i] : 0.0f;
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    return sum;
}

enum class Measure { kCount, kMass };

// The least weight that stays if a weight stays while all larger ones together measure less than `limit`; the largest
// always stays. Weights below `least`, and those of nothing, are not there. The bits of positive floats are in the order of their values: three
// times all weights that agree with the bits found so far are counted by their next ones.
template <Measure kMeasure>
float cut(const float* weights, int64_t n, float least, double limit) {
    constexpr int kShifts[] = {21, 10, 0}, kBits[] = {11, 11, 10};
    uint32_t found = 0;
    double above = 0.0;
    for (int level = 0; level < 3; level++) {
        const int shift = kShifts[level], bits = kBits[level];
        const int known = shift + bits;  // from this bit on
        double bins[1 << 11] = {};
        for (int64_t i = 0; i < n; i++) {
            const float weight = weights[i];
            uint32_t pattern;
            std::memcpy(&pattern, &weight, sizeof pattern);
            const bool agrees = known >= 32 || pattern >> (known & 31) == found >> (known & 31);
            if (agrees && weight > 0.0f && weight >= least)
                bins[pattern >> shift & ((1u << bits) - 1)] += kMeasure == Measure::kMass ? weight : 1.0;
        }
        int chosen = -1;
        double above_chosen = above;
        for (int bin = (1 << bits) - 1; bin >= 0; bin--) {
            if (bins[bin] == 0.0) continue;
            if (chosen >= 0 && above >= limit) break;
            chosen = bin, above_chosen = above;
            above += bins[bin];
        }
        if (chosen < 0) return least;
        found |= (uint32_t)chosen << shift;
        above = above_chosen;
    }
    float edge;
    std::memcpy(&edge, &found, sizeof edge);
    return edge;
}

// The first token, in order of id, at which the weights that are at least `least` add up to more than `share` of all.
int64_t draw(const float* weights, int64_t n, float least, double share) {
    constexpr int64_t kBlock = 512;
    double total = 0.0;
    for (int64_t first = 0; first < n; first += kBlock)
        total += sum_from(weights + first, std::min(kBlock, n - first), least);
    const double target = std::min(share * total, std::nextafter(total, 0.0));
    double passed = 0.0;
    int64_t last = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t end = std::min(first + kBlock, n);
        const double sum = sum_from(weights + first, end - first, least);
        if (passed + sum <= target) {
            passed += sum;
            continue;
        }
        for (int64_t i = first; i < end; i++) {
            if (weights[i] < least || weights[i] == 0.0f) continue;
            passed += weights[i], last = i;
            if (passed > target) return i;
        }
    }
    return last;  // where sums in another order were smaller by a rounding
}

thread_local Room room;

}  // namespace

BATON_API void baton_likeliest(bool is_bf16, const void* logits, int64_t num_rows, int64_t vocab_size,
                               int64_t* tokens) {
    for_parts(num_rows, [=](int64_t row) {
        const int64_t first = row * vocab_size;
        tokens[row] = is_bf16 ? likeliest((const bf16*)logits + first, vocab_size)
                              : likeliest((const float*)logits + first, vocab_size);
    });
}

// One row. top_k: at most vocab_size, 0 for all; top_p from 1 on and min_p 0 let everything through.
BATON_API void baton_draw(const float* logits, int64_t vocab_size, float temperature, int64_t top_k, float top_p,
                          float min_p, double share, int64_t* token) {
    auto* weights = (float*)room.of(vocab_size * sizeof(float));
    weigh(logits, vocab_size, temperature, weights);
    float least = 0.0f;
    if (top_k > 0 && top_k < vocab_size) least = cut<Measure::kCount>(weights, vocab_size, least, (double)top_k);
    if (top_p < 1.0f)
        least = cut<Measure::kMass>(weights, vocab_size, least, sum_from(weights, vocab_size, least) * top_p);
    *token = draw(weights, vocab_size, std::max(least, min_p), share);
}
