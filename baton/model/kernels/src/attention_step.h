// What attention computes: one layer's call, and the segments of a step. `native_backend.py` mirrors both.
#pragma once

#include <cstdint>

namespace {

constexpr int kNoWindow = 0;

struct AttentionLayer {  // one layer's call; strides in elements
    const void* query;   // [tokens, num_heads, k_dim]
    int64_t query_token_stride, query_head_stride;
    const void *keys, *values;  // the layer's part of the first head group of page 0: [group_heads, page_size, dim];
                                // the values of a latent layer lie in its keys
    const float *key_scales, *value_scales;  // of page 0, [num_kv_heads, page_size]: pages are int8; or both null
    int64_t scale_page_stride;
    int64_t page_stride, page_size;
    int64_t group_heads, group_stride;  // KV heads of a head group, and the distance of two groups
    int64_t key_slot_stride, value_slot_stride;  // distance of two slots of a head
    void* out;  // [tokens, num_heads, v_dim], contiguous
    int64_t num_heads, num_kv_heads, k_dim, v_dim;
    int64_t window;      // keys that a query sees, itself included; kNoWindow: all
    const float* sinks;  // [num_heads] or null
    float scale, softcap;  // softcap 0: none
};

struct Segments {  // of the step; arrays of num_segments, and all their page tables one after another
    int64_t num_segments;
    const int64_t *offset, *start, *num_tokens, *first_page;
    const int32_t* pages;
    const int64_t* visible_ends;  // of each token of the step: one past the last key that it sees; null: its own
    const int64_t* parents;  // null: no trees. Of each token: the index in its segment of the one before it; -1 for the
                             // first token of a tree, and 0 for that of any other segment
};

// Tokens of a segment that are a tree in adjacent slots from `start` on: a token's position is `start` and the length of
// its path, and it sees what lies before `start` and its path.
struct Tree {
    const int64_t* parents;  // of the segment's tokens
    int64_t start, first_token;  // of the segment; the index in it of a tile's first token
};

}  // namespace
