// RMSNorm, RoPE with the KV write into pages, and gated activation: the operations between a layer's matrix products.
//
// Each makes one pass over [tokens, features]: float or bfloat16 in and out, float inside, rounded once. Called through
// `baton/model/decoders/native_ops.py`, which has checked shapes, types and strides.
#include <cmath>

#include "quantize.h"
#include "rope_params.h"
#include "simd.h"
#include "thread_pool.h"
#include "workspace.h"

namespace {

template <typename T>
float square_sum(const T* x, int64_t num_features) {
    Vec sum{};
    int64_t i = 0;
    for (; i + kWidth <= num_features; i += kWidth) {
        Vec v = load(x + i);
        sum += v * v;
    }
    float total = reduce_add(sum);
    for (; i < num_features; i++) total += widen(x[i]) * widen(x[i]);
    return total;
}

// to = x * factor * weight; `to` may be x.
template <typename T, typename U>
void scale_row(const T* x, float factor, const float* weight, int64_t num_features, U* to) {
    int64_t i = 0;
    for (; i + kWidth <= num_features; i += kWidth) store(to + i, load(x + i) * factor * load(weight + i));
    for (; i < num_features; i++) narrow(widen(x[i]) * factor * weight[i], to + i);
}

template <typename T, typename U>
void rms_norm_row(const T* x, const float* weight, float eps, int64_t num_features, U* to) {
    scale_row(x, 1.0f / std::sqrt(square_sum(x, num_features) / (float)num_features + eps), weight, num_features, to);
}

template <typename T>
void add_row(T* residual, const T* x, int64_t num_features) {
    int64_t i = 0;
    for (; i + kWidth <= num_features; i += kWidth) store(residual + i, load(residual + i) + load(x + i));
    for (; i < num_features; i++) narrow(widen(residual[i]) + widen(x[i]), residual + i);
}

template <typename T>
void rms_norm(const T* x, T* residual, const float* weight, float eps, int64_t num_tokens, int64_t num_features,
              T* out) {
    parallel_for_tokens(num_tokens, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const T* row = x + token * num_features;
            if (residual) {
                T* sum = residual + token * num_features;
                add_row(sum, row, num_features);
                row = sum;
            }
            rms_norm_row(row, weight, eps, num_features, out + token * num_features);
        }
    });
}

thread_local Workspace workspace;

// Rotates one head from x to `to`, which do not overlap; `wide` [head_dim] is scratch.
template <typename T>
void rope_head(const RopeParams& r, const T* x, const float* weight, int64_t position, float* wide, T* to) {
    const int64_t half = r.rotary_dim / 2;
    const float *cosine = r.cosines + position * half, *sine = r.sines + position * half;
    if (weight) {
        rms_norm_row(x, weight, r.eps, r.head_dim, wide);
    } else {
        for (int64_t i = 0; i < r.head_dim; i++) wide[i] = widen(x[i]);
    }
    int64_t i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        Vec first = load(wide + i), second = load(wide + half + i), c = load(cosine + i), s = load(sine + i);
        store(to + i, first * c - second * s);
        store(to + half + i, second * c + first * s);
    }
    for (; i < half; i++) {
        narrow(wide[i] * cosine[i] - wide[half + i] * sine[i], to + i);
        narrow(wide[half + i] * cosine[i] + wide[i] * sine[i], to + half + i);
    }
    for (int64_t rest = r.rotary_dim; rest < r.head_dim; rest++) narrow(wide[rest], to + rest);
}

// keys and values: the layer's part of the first head group of page 0, [group_heads, page_size, head_dim], of T or int8.
template <typename T>
void rope_and_write_kv(const RopeParams& r, const T* qkv, const int64_t* positions, const int64_t* pages,
                      const int64_t* slots, int64_t num_tokens, void* keys, void* values, T* query) {
    const int64_t dim = r.head_dim, num_rotated = r.num_heads + r.num_kv_heads;
    parallel_for_tokens(num_tokens, [=, &r](int64_t first, int64_t last) {
        float* wide = (float*)workspace.get(2 * dim * sizeof(float));
        T* rotated = (T*)(wide + dim);
        for (int64_t token = first; token < last; token++) {
            const T* heads = qkv + token * (num_rotated + r.num_kv_heads) * dim;
            const int64_t base = pages[token] * r.page_stride + slots[token] * dim, at = positions[token];
            for (int64_t h = 0; h < r.num_heads; h++)
                rope_head(r, heads + h * dim, r.query_norm, at, wide, query + (token * r.num_heads + h) * dim);
            for (int64_t h = 0; h < r.num_kv_heads; h++) {
                const int64_t group = h / r.group_heads, in_group = h % r.group_heads;
                const int64_t slot = base + group * r.group_stride + in_group * r.page_size * dim;
                const T *key = heads + (r.num_heads + h) * dim, *value = heads + (num_rotated + h) * dim;
                if (r.key_scales) {
                    const int64_t scale = pages[token] * r.scale_page_stride + h * r.page_size + slots[token];
                    rope_head(r, key, r.key_norm, at, wide, rotated);
                    r.key_scales[scale] = quantize_row<0>(rotated, dim, dim, (uint8_t*)keys + slot);
                    r.value_scales[scale] = quantize_row<0>(value, dim, dim, (uint8_t*)values + slot);
                    continue;
                }
                rope_head(r, key, r.key_norm, at, wide, (T*)keys + slot);
                std::memcpy((T*)values + slot, value, dim * sizeof(T));
            }
        }
    });
}

BATON_INLINE Vec silu(Vec x) { return x / (1.0f + vec_exp(-x)); }
// x / 2 * (1 + tanh(inner)), without cancellation.
BATON_INLINE Vec gelu_tanh(Vec x) {
    Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + vec_exp(-2.0f * inner));
}

template <bool kGelu, typename T>
void act_and_mul(const T* gate_up, int64_t num_tokens, int64_t width, T* out) {
    const auto apply = [](Vec x) { return kGelu ? gelu_tanh(x) : silu(x); };
    parallel_for_tokens(num_tokens, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const T *g = gate_up + token * 2 * width, *up = g + width;
            T* to = out + token * width;
            int64_t i = 0;
            for (; i + kWidth <= width; i += kWidth) store(to + i, apply(load(g + i)) * load(up + i));
            for (; i < width; i++) narrow(apply(broadcast(widen(g[i])))[0] * widen(up[i]), to + i);
        }
    });
}

}  // namespace

BATON_API void baton_rms_norm(bool is_bf16, const void* x, void* residual, const float* weight, float eps,
                              int64_t num_tokens, int64_t num_features, void* out) {
    if (is_bf16)
        rms_norm((const bf16*)x, (bf16*)residual, weight, eps, num_tokens, num_features, (bf16*)out);
    else
        rms_norm((const float*)x, (float*)residual, weight, eps, num_tokens, num_features, (float*)out);
}

BATON_API void baton_rope_and_write_kv(bool is_bf16, const RopeParams* rope, const void* qkv, const int64_t* positions,
                                       const int64_t* pages, const int64_t* slots, int64_t num_tokens, void* keys,
                                       void* values, void* query) {
    if (is_bf16)
        rope_and_write_kv(*rope, (const bf16*)qkv, positions, pages, slots, num_tokens, keys, values, (bf16*)query);
    else
        rope_and_write_kv(*rope, (const float*)qkv, positions, pages, slots, num_tokens, keys, values,
                         (float*)query);
}

BATON_API void baton_act_and_mul(bool is_bf16, bool is_gelu, const void* gate_up, int64_t num_tokens, int64_t width,
                                 void* out) {
    if (is_bf16) {
        const auto kernel = is_gelu ? act_and_mul<true, bf16> : act_and_mul<false, bf16>;
        kernel((const bf16*)gate_up, num_tokens, width, (bf16*)out);
    } else {
        const auto kernel = is_gelu ? act_and_mul<true, float> : act_and_mul<false, float>;
        kernel((const float*)gate_up, num_tokens, width, (float*)out);
    }
}
