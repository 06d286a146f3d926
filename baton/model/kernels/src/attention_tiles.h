// How the segments of a step are cut into tiles, the unit of work of attention.cpp.
#pragma once

#include <cstdint>

#include "attention_step.h"

namespace {

constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kMinTileQueries = 48;  // a tile of a chunk packs its keys, which must stay cheap beside its products

// Tiles of at most `max_tokens()` adjacent tokens and one KV head, in the order of segments, tokens and heads. A segment's
// tiles have the same number of tokens, or one more. A step with few tiles has smaller ones, so that its threads have
// equal shares: of three tiles one of two threads would have two. Bits do not depend on it.
class TilePlan {
  public:
    struct Part {
        int64_t segment, kv_head, first_token, num_tokens;
    };

    TilePlan(const AttentionLayer& layer, const Segments& step, int64_t max_tokens, int64_t num_threads)
        : step_(step), num_heads_(layer.num_kv_heads), max_tokens_(max_tokens) {
        const int64_t wanted = num_threads == 1 ? 0 : kTilesPerThread * num_threads;
        const int64_t min_tokens = (kMinTileQueries * num_heads_ + layer.num_heads - 1) / layer.num_heads;
        while (size() < wanted && max_tokens_ / 2 >= min_tokens) max_tokens_ /= 2;
    }

    int64_t size() const {
        int64_t num_tiles = 0;
        for (int64_t s = 0; s < step_.num_segments; s++) num_tiles += num_parts(s);
        return num_tiles * num_heads_;
    }

    Part operator[](int64_t i) const {
        int64_t segment = 0, part = i / num_heads_;
        for (; part >= num_parts(segment); segment++) part -= num_parts(segment);
        const int64_t num_tokens = step_.num_tokens[segment], first = num_tokens * part / num_parts(segment);
        return {segment, i % num_heads_, first, num_tokens * (part + 1) / num_parts(segment) - first};
    }

  private:
    const Segments& step_;
    const int64_t num_heads_;
    int64_t max_tokens_;

    int64_t num_parts(int64_t segment) const { return (step_.num_tokens[segment] + max_tokens_ - 1) / max_tokens_; }
};

}  // namespace
