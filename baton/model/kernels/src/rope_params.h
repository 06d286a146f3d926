// Rotary embedding of one layer, and where its keys and values are written. `native_ops.py` mirrors it.
#pragma once

#include <cstdint>

namespace {

struct RopeParams {  // strides in elements
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    const float *cosines, *sines;        // [max_positions, rotary_dim / 2]
    const float *query_norm, *key_norm;  // [head_dim], or both null
    float eps;
    int64_t page_size, page_stride;
    int64_t group_heads, group_stride;  // KV heads of a head group, and the distance of two groups
    float *key_scales, *value_scales;   // of page 0, [num_kv_heads, page_size]: pages are int8; or both null
    int64_t scale_page_stride;
};

}  // namespace
