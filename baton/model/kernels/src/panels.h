// Products of rows with a weight that is laid out in panels: [panels, steps, kPanel outputs, inputs of a step], so that
// what is multiplied next always lies next, and a sum never has to be added up across a vector's lanes.
//
// Few rows read a panel once, at the speed of memory; many take it from the cache, kMaxRows at a time (Goto and van de
// Geijn, "Anatomy of high-performance matrix multiplication", 2008). Every sum goes through the inputs in order, so
// that a row's result has the same bits whatever rows stand beside it. What is multiplied in a step, and how, says a
// `Step`:
//
//   Weight, Input, Total: elements of a weight, of a row, and of a sum    Sum: a vector of sums
//   kInputs: inputs of a step    kParts: products that it takes    kMaxRows: rows that registers have room for
//   weights(at, half, part), input(at, part), add(sum, weights, input)
#pragma once

#include <array>

#include "simd.h"

namespace {

constexpr int kPanel = 2 * kWidth;  // outputs that are computed together
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kManyRegisters = 12;  // rows, of two vectors of sums each, that fit beside what they are made of
#else
constexpr int kManyRegisters = 6;
#endif
constexpr int64_t kBlockSteps = 512;       // that are summed up before they are added to the rest: many rows read them
                                           // again from the cache, and sums of sums are more exact than one long sum
constexpr int64_t kAheadBytes = 8 * 1024;  // from which few rows fetch what they will read
constexpr int64_t kRowsAtOnce = 192;       // whose sums stay in the cache

template <typename S>
constexpr int64_t kStepElements = kPanel * S::kInputs;
template <typename S>
constexpr int64_t kStepBytes = kStepElements<S> * sizeof(typename S::Weight);

// Some steps of one panel, and what is fetched meanwhile: `ahead_step` bytes a step. `is_read_once`: past the caches,
// where others keep what they will need again.
template <typename S>
struct Block {
    const typename S::Weight* weights;
    int64_t num_steps;
    const char* ahead;
    int64_t ahead_step;
    bool is_read_once;
};

template <typename S>
BATON_INLINE void fetch(const Block<S>& block, int64_t step) {
    const char* at = block.ahead + step * block.ahead_step;
    for (int64_t line = 0; line < kStepBytes<S>; line += 64)
        block.is_read_once ? __builtin_prefetch(at + line, 0, 0) : __builtin_prefetch(at + line, 0, 2);
}

// sums: [kRows, kPanel], to which the block's are added unless it `is_first`.
template <typename S, int kRows>
void tile(const Block<S>& block, const typename S::Input* x, int64_t x_stride, typename S::Total* sums, bool is_first) {
    using Sum = typename S::Sum;
    Sum a[kRows] = {}, b[kRows] = {};
    const auto* weights = block.weights;
    for (int64_t s = 0; s < block.num_steps; s++, weights += kStepElements<S>, x += S::kInputs) {
        fetch(block, s);
        for (int part = 0; part < S::kParts; part++) {
            const auto low = S::weights(weights, 0, part), high = S::weights(weights, 1, part);
            for (int r = 0; r < kRows; r++) {
                const auto input = S::input(x + r * x_stride, part);
                a[r] = S::add(a[r], low, input);
                b[r] = S::add(b[r], high, input);
            }
        }
    }
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

// Groups of rows as large as each other. One alone fetches what it will read soon itself; several, each their part of
// the block after this one.
template <typename S>
void multiply_block(const typename S::Weight* weights, int64_t num_steps, const typename S::Input* x, int64_t x_stride,
                    int64_t num_rows, typename S::Total* sums, bool is_first) {
    const int64_t num_groups = (num_rows + S::kMaxRows - 1) / S::kMaxRows, ahead_step = kStepBytes<S> / num_groups;
    const char* next = (const char*)weights + (num_groups == 1 ? kAheadBytes : num_steps * kStepBytes<S>);
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t row = num_rows * group / num_groups, rows = num_rows * (group + 1) / num_groups - row;
        const Block<S> block{weights, num_steps, next + group * num_steps * ahead_step, ahead_step, num_groups == 1};
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
