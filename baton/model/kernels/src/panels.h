// GEMM with a weight packed in panels: [panels, steps, kPanel outputs, inputs of a step]. Memory is read in order, and no
// sum is reduced across a vector's lanes.
//
// Few rows read a panel once, at memory bandwidth; many read it from the cache, kMaxRows at a time (Goto and van de
// Geijn, "Anatomy of high-performance matrix multiplication", 2008). Every sum goes through the inputs in order, so
// that a row's result has the same bits in any batch. A `Step` defines the products of one step:
//
//   Weight, Input, Total: elements of a weight, of a row, and of a sum    Sum: a vector of sums
//   kInputs: inputs of a step    kParts: products that it takes    kMaxRows: rows that fit in registers
//   weights(at, half, part), input(at, part), add(sum, weights, input)
#pragma once

#include <array>

#include "prefetch_plan.h"
#include "simd.h"

namespace {

constexpr int kPanel = 2 * kWidth;  // outputs of a panel
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxTileRows = 12;  // rows of two accumulators each that fit beside the operands
#else
constexpr int kMaxTileRows = 6;
#endif
constexpr int64_t kBlockSteps = 512;  // steps summed before they are added to the total: a block of weights stays in
                                      // the cache for many rows, and sums of sums are more exact than one long sum
constexpr int64_t kRowBlock = 192;            // rows whose sums stay in the cache

template <typename S>
constexpr int64_t kStepElements = kPanel * S::kInputs;
template <typename S>
constexpr int64_t kStepBytes = kStepElements<S> * sizeof(typename S::Weight);

// Some steps of one panel, and what is prefetched meanwhile: `prefetch_stride` bytes a step.
template <typename S>
struct Block {
    const typename S::Weight* weights;
    int64_t num_steps;
    const char* prefetch_from;
    int64_t prefetch_stride;
    WeightPrefetch how;
};

template <typename S>
BATON_INLINE void prefetch(const Block<S>& block, int64_t step) {
    if (block.how == WeightPrefetch::kNone) return;
    const char* at = block.prefetch_from + step * block.prefetch_stride;
    if (block.how == WeightPrefetch::kSecondCacheByPairs) {
        for (int64_t line = 0; line < kStepBytes<S>; line += 128) __builtin_prefetch(at + line, 0, 2);
        return;
    }
    const bool is_second_cache = block.how == WeightPrefetch::kSecondCache;
    for (int64_t line = 0; line < kStepBytes<S>; line += 64)
        is_second_cache ? __builtin_prefetch(at + line, 0, 2) : __builtin_prefetch(at + line, 0, 0);
}

// sums [kRows, kPanel]: the block's are added, or stored if it `is_first`.
template <typename S, int kRows>
void tile(const Block<S>& block, const typename S::Input* x, int64_t x_stride, typename S::Total* sums, bool is_first) {
    using Sum = typename S::Sum;
    Sum a[kRows] = {}, b[kRows] = {};
    const auto* weights = block.weights;
    for (int64_t s = 0; s < block.num_steps; s++, weights += kStepElements<S>, x += S::kInputs) {
        prefetch(block, s);
#pragma GCC unroll 16
        for (int part = 0; part < S::kParts; part++) {
            const auto low = S::weights(weights, 0, part), high = S::weights(weights, 1, part);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) {
                const auto input = S::input(x + r * x_stride, part);
                a[r] = S::add(a[r], low, input);
                b[r] = S::add(b[r], high, input);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++, sums += kPanel) {
        if (!is_first) a[r] += load_as<Sum>(sums), b[r] += load_as<Sum>(sums + kWidth);
        std::memcpy(sums, &a[r], sizeof(Sum));
        std::memcpy(sums + kWidth, &b[r], sizeof(Sum));
    }
}

template <typename S>
using Tile = void (*)(const Block<S>&, const typename S::Input*, int64_t, typename S::Total*, bool);
template <typename S, int... kRows>
constexpr std::array<Tile<S>, sizeof...(kRows)> tiles_of(std::integer_sequence<int, kRows...>) {
    return {tile<S, kRows + 1>...};
}
template <typename S>
constexpr auto kTiles = tiles_of<S>(std::make_integer_sequence<int, S::kMaxRows>());  // [rows - 1]

// Rows go in groups of equal size. A single group prefetches its own weights; several share the prefetch of the next
// block.
template <typename S>
void multiply_block(const typename S::Weight* weights, int64_t num_steps, const typename S::Input* x, int64_t x_stride,
                    int64_t num_rows, typename S::Total* sums, bool is_first) {
    const int64_t num_groups = (num_rows + S::kMaxRows - 1) / S::kMaxRows;
    const int64_t prefetch_stride = kStepBytes<S> / num_groups;
    const WeightPrefetchPlan plan = num_groups == 1
        ? plan_weight_prefetch(num_rows)
        : WeightPrefetchPlan{WeightPrefetch::kSecondCache, num_steps * kStepBytes<S>};
    const char* next = (const char*)weights + plan.bytes_ahead;
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t row = num_rows * group / num_groups, rows = num_rows * (group + 1) / num_groups - row;
        const char* from = next + group * num_steps * prefetch_stride;
        const Block<S> block{weights, num_steps, from, prefetch_stride, plan.how};
        kTiles<S>[rows - 1](block, x + row * x_stride, x_stride, sums + row * kPanel, is_first);
    }
}

// sums: [num_rows, kPanel], of x [num_rows, x_stride] and one panel of `num_steps`.
template <typename S>
void multiply_panel(const typename S::Weight* panel, int64_t num_steps, const typename S::Input* x, int64_t x_stride,
                    int64_t num_rows, typename S::Total* sums) {
    const int64_t num_blocks = (num_steps + kBlockSteps - 1) / kBlockSteps;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first = num_steps * block / num_blocks, last = num_steps * (block + 1) / num_blocks;
        const auto* weights = panel + first * kStepElements<S>;
        multiply_block<S>(weights, last - first, x + first * S::kInputs, x_stride, num_rows, sums, !block);
    }
}

}  // namespace
