// Argmax, masks, and sampling with temperature, top-k, top-p and min-p.
//
// Called through `baton/model/sampling/native.py`. The filters are those of `baton/model/sampling/distribution.py`, the
// noise that of `baton/model/sampling/gumbel.py`. Nothing is sorted: a filter's threshold is found by radix select.
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "thread_pool.h"
#include "workspace.h"

namespace {

float row_max(const float* x, int64_t n) {
    Vec best = broadcast(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) best = vec_max(load(x + i), best);
    float max = reduce_max(best);
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

// The lowest index of the maximum; 0 for a row of NaNs. One pass finds the first block that holds the maximum.
template <typename T>
int64_t argmax(const T* logits, int64_t n) {
    constexpr int64_t kChains = 4, kBlock = 32 * kSpan;  // a comparison waits for the one before it in its chain only
    float max = -std::numeric_limits<float>::infinity();
    int64_t begin = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
        float block_max = max;
        if (first + kBlock <= n) {
            Vec best[2 * kChains];
            for (Vec& chain : best) chain = broadcast(max);
            for (int64_t i = 0; i < kBlock; i += kChains * kSpan)
                for (int64_t chain = 0; chain < kChains; chain++) {
                    const Split parts = load_split(logits + first + i + chain * kSpan);
                    best[2 * chain] = vec_max(parts.a, best[2 * chain]);
                    best[2 * chain + 1] = vec_max(parts.b, best[2 * chain + 1]);
                }
            for (int64_t chain = 1; chain < 2 * kChains; chain++) best[0] = vec_max(best[0], best[chain]);
            block_max = reduce_max(best[0]);
        } else {
            for (int64_t i = first; i < n; i++)
                block_max = widen(logits[i]) > block_max ? widen(logits[i]) : block_max;
        }
        if (block_max > max) max = block_max, begin = first;
    }
    for (int64_t i = begin; i < std::min(begin + kBlock, n); i++)
        if (widen(logits[i]) == max) return i;
    return 0;
}

// e^((logit - max) / temperature): the most probable token's weight is 1; a weight too small for a float is 0.
BATON_INLINE Vec exp_weight(Vec logits, Vec max, Vec temperature) {
    const Vec x = (logits - max) / temperature;
    return x < -87.0f ? Vec{} : vec_exp(x);
}
void exp_weights(const float* logits, int64_t n, float temperature, float* weights) {
    const Vec max = broadcast(row_max(logits, n)), divisor = broadcast(temperature);
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(weights + i, exp_weight(load(logits + i), max, divisor));
    if (i == n) return;
    float last[kWidth] = {};
    std::copy(logits + i, logits + n, last);
    store(last, exp_weight(load(last), max, divisor));
    std::copy(last, last + (n - i), weights + i);
}

double sum_at_least(const float* weights, int64_t n, float least) {
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

// The smallest weight that is kept. A weight is kept while all larger ones together measure less than `limit`; the
// largest always is. Weights below `least` and zeros are ignored. Radix select: the bits of positive floats are ordered
// like their values, so three passes each count, by their next bits, the weights that match the bits found so far.
template <Measure kMeasure>
float find_threshold(const float* weights, int64_t n, float least, double limit) {
    constexpr int kShifts[] = {21, 10, 0}, kBits[] = {11, 11, 10};
    uint32_t found = 0;
    double above = 0.0;
    for (int level = 0; level < 3; level++) {
        const int shift = kShifts[level], bits = kBits[level];
        const int known = shift + bits;  // bits from this one up are known
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
    float threshold;
    std::memcpy(&threshold, &found, sizeof threshold);
    return threshold;
}

// 32 bits of a token under a key: a permutation with two rounds, as in `gumbel.py`.
BATON_INLINE uint32_t token_bits(uint64_t key, int64_t token) {
    uint32_t bits = (uint32_t)token * 0x9E3779B9u + (uint32_t)key;
    bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
    bits = ((bits ^ (bits >> 15)) + (uint32_t)(key >> 32)) * 0x846CA68Bu;
    return bits ^ (bits >> 16);
}

// Gumbel-max: the token with the largest weight / exponential number; ties go to the lowest id. The number of a token is
// -log(1 - u), which is above u. So a weight below `best * u` cannot win, and few logarithms are computed. In the first
// test, `u` lacks its last bits, which makes it no larger. `u` is above 2^-34, so very light tokens need no bits at all.
int64_t sample(const float* weights, int64_t n, float least, uint64_t key) {
    constexpr int64_t kBlock = 64;
    double best = 0.0;
    int64_t token = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t end = std::min(first + kBlock, n);
        const float bound = (float)(best * (1.0 - 1e-6));  // rounding must not exclude a winner
        const float lightest = std::max({least, bound * 0x1p-34f, std::numeric_limits<float>::min()});
        int candidates = 0;
        for (int64_t i = first; i < end; i++) candidates |= weights[i] >= lightest;
        if (!candidates) continue;
        candidates = 0;
        for (int64_t i = first; i < end; i++) {
            const float u = (float)(int32_t)(token_bits(key, i) >> 8) * 0x1p-24f;
            candidates |= (weights[i] >= lightest) & (weights[i] >= bound * u);
        }
        if (!candidates) continue;
        for (int64_t i = first; i < end; i++) {
            const double u = ((double)token_bits(key, i) + 0.5) * 0x1p-32;
            if (weights[i] < lightest || weights[i] <= best * u) continue;
            const double score = weights[i] / -std::log1p(-u);
            if (score > best) best = score, token = i;
        }
    }
    return token;
}

// Bit t % 32 of word t / 32 set: token t stays. The others become minus infinity.
template <typename T>
void mask(T* logits, int64_t n, const uint32_t* bits, T minus_infinity) {
    for (int64_t first = 0; first < n; first += 32) {
        const uint32_t word = bits[first / 32];
        if (word == ~0u) continue;
        const int64_t end = std::min<int64_t>(32, n - first);
        for (int64_t i = 0; i < end; i++) logits[first + i] = word >> i & 1 ? logits[first + i] : minus_infinity;
    }
}

thread_local Workspace workspace;

}  // namespace

BATON_API void baton_argmax(bool is_bf16, const void* logits, int64_t num_rows, int64_t vocab_size, int64_t* tokens) {
    parallel_for(num_rows, [=](int64_t row) {
        const int64_t first = row * vocab_size;
        tokens[row] = is_bf16 ? argmax((const bf16*)logits + first, vocab_size)
                              : argmax((const float*)logits + first, vocab_size);
    });
}

// One row, in place.
BATON_API void baton_mask(bool is_bf16, void* logits, int64_t vocab_size, const uint32_t* bits) {
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    bf16 narrowed;
    narrow(kMinusInfinity, &narrowed);
    if (is_bf16)
        mask((bf16*)logits, vocab_size, bits, narrowed);
    else
        mask((float*)logits, vocab_size, bits, kMinusInfinity);
}

// One row. top_k: at most vocab_size, 0 for no limit; top_p of 1 or more and min_p of 0 keep every token.
BATON_API void baton_sample(const float* logits, int64_t vocab_size, float temperature, int64_t top_k, float top_p,
                            float min_p, uint64_t key, int64_t* token) {
    auto* weights = (float*)workspace.get(vocab_size * sizeof(float));
    exp_weights(logits, vocab_size, temperature, weights);
    float least = 0.0f;
    if (top_k > 0 && top_k < vocab_size)
        least = find_threshold<Measure::kCount>(weights, vocab_size, least, (double)top_k);
    if (top_p < 1.0f) {
        const double mass = sum_at_least(weights, vocab_size, least);
        least = find_threshold<Measure::kMass>(weights, vocab_size, least, mass * top_p);
    }
    *token = sample(weights, vocab_size, std::max(least, min_p), key);
}
