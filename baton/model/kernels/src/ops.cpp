// Normalisation, rotation with the write into pages, and gating: what a layer does between its matrix products.
//
// One pass each over [tokens, features], float or bfloat16 in and out, float inside, rounded once. Called through
// `baton/model/kernels/ops.py`, which has checked shapes, types and strides.
#include <cmath>

#include "room.h"
#include "simd.h"
#include "team.h"

namespace {

template <typename T>
float square_sum(const T* x, int64_t num_features) {
    Vec sum{};
    int64_t i = 0;
    for (; i + kWidth <= num_features; i += kWidth) {
        Vec v = load(x + i);
        sum += v * v;
    }
    float total = sum_of(sum);
    for (; i < num_features; i++) total += widen(x[i]) * widen(x[i]);
    return total;
}

// to = x * factor * weight; `to` may be x.
template <typename T, typename U>
void scale_by(const T* x, float factor, const float* weight, int64_t num_features, U* to) {
    int64_t i = 0;
    for (; i + kWidth <= num_features; i += kWidth) store(to + i, load(x + i) * factor * load(weight + i));
    for (; i < num_features; i++) narrow(widen(x[i]) * factor * weight[i], to + i);
}

template <typename T, typename U>
void norm_row(const T* x, const float* weight, float eps, int64_t num_features, U* to) {
    scale_by(x, 1.0f / std::sqrt(square_sum(x, num_features) / (float)num_features + eps), weight, num_features, to);
}

template <typename T>
void add_row(T* residual, const T* x, int64_t num_features) {
    int64_t i = 0;
    for (; i + kWidth <= num_features; i += kWidth) store(residual + i, load(residual + i) + load(x + i));
    for (; i < num_features; i++) narrow(widen(residual[i]) + widen(x[i]), residual + i);
}

template <typename T>
void norm(const T* x, T* residual, const float* weight, float eps, int64_t num_tokens, int64_t num_features, T* out) {
    for_tokens(num_tokens, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const T* row = x + token * num_features;
            if (residual) {
                T* sum = residual + token * num_features;
                add_row(sum, row, num_features);
                row = sum;
            }
            norm_row(row, weight, eps, num_features, out + token * num_features);
        }
    });
}

struct Rotation {  // how heads are cut and turned; strides in elements
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    const float *cosines, *sines;           // [max_positions, rotary_dim / 2]
    const float *query_norm, *key_norm;     // [head_dim], or both null
    float eps;
    int64_t page_size, page_stride;
};

thread_local Room room;

// One head, from x to `to`, which do not overlap; `wide` has room for a head.
template <typename T>
void rotate_head(const Rotation& r, const T* x, const float* weight, int64_t position, float* wide, T* to) {
    const int64_t half = r.rotary_dim / 2;
    const float *cosine = r.cosines + position * half, *sine = r.sines + position * half;
    if (weight) {
        norm_row(x, weight, r.eps, r.head_dim, wide);
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

// keys and values: the layer's part of page 0, [num_kv_heads, page_size, head_dim].
template <typename T>
void rotate_and_write(const Rotation& r, const T* qkv, const int64_t* positions, const int64_t* pages,
                      const int64_t* slots, int64_t num_tokens, T* keys, T* values, T* query) {
    const int64_t dim = r.head_dim, num_rotated = r.num_heads + r.num_kv_heads;
    for_tokens(num_tokens, [=, &r](int64_t first, int64_t last) {
        float* wide = (float*)room.of(dim * sizeof(float));
        for (int64_t token = first; token < last; token++) {
            const T* heads = qkv + token * (num_rotated + r.num_kv_heads) * dim;
            const int64_t place = pages[token] * r.page_stride + slots[token] * dim, at = positions[token];
            for (int64_t h = 0; h < r.num_heads; h++)
                rotate_head(r, heads + h * dim, r.query_norm, at, wide, query + (token * r.num_heads + h) * dim);
            for (int64_t h = 0; h < r.num_kv_heads; h++) {
                const int64_t slot = place + h * r.page_size * dim;
                rotate_head(r, heads + (r.num_heads + h) * dim, r.key_norm, at, wide, keys + slot);
                std::memcpy(values + slot, heads + (num_rotated + h) * dim, dim * sizeof(T));
            }
        }
    });
}

BATON_INLINE Vec silu(Vec x) { return x / (1.0f + exp_of(-x)); }
// x / 2 * (1 + tanh(inner)), written so that nothing cancels.
BATON_INLINE Vec gelu_tanh(Vec x) {
    Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_of(-2.0f * inner));
}

template <bool kGelu, typename T>
void gate(const T* gate_up, int64_t num_tokens, int64_t width, T* out) {
    const auto apply = [](Vec x) { return kGelu ? gelu_tanh(x) : silu(x); };
    for_tokens(num_tokens, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const T *g = gate_up + token * 2 * width, *up = g + width;
            T* to = out + token * width;
            int64_t i = 0;
            for (; i + kWidth <= width; i += kWidth) store(to + i, apply(load(g + i)) * load(up + i));
            for (; i < width; i++) narrow(apply(splat(widen(g[i])))[0] * widen(up[i]), to + i);
        }
    });
}

}  // namespace

BATON_API void baton_norm(bool is_bf16, const void* x, void* residual, const float* weight, float eps,
                          int64_t num_tokens, int64_t num_features, void* out) {
    if (is_bf16)
        norm((const bf16*)x, (bf16*)residual, weight, eps, num_tokens, num_features, (bf16*)out);
    else
        norm((const float*)x, (float*)residual, weight, eps, num_tokens, num_features, (float*)out);
}

BATON_API void baton_rotate_and_write(bool is_bf16, const Rotation* rotation, const void* qkv, const int64_t* positions,
                                      const int64_t* pages, const int64_t* slots, int64_t num_tokens, void* keys,
                                      void* values, void* query) {
    if (is_bf16)
        rotate_and_write(*rotation, (const bf16*)qkv, positions, pages, slots, num_tokens, (bf16*)keys, (bf16*)values,
                         (bf16*)query);
    else
        rotate_and_write(*rotation, (const float*)qkv, positions, pages, slots, num_tokens, (float*)keys,
                         (float*)values, (float*)query);
}

BATON_API void baton_gate(bool is_bf16, bool is_gelu, const void* gate_up, int64_t num_tokens, int64_t width, void* out) {
    if (is_bf16)
        (is_gelu ? gate<true, bf16> : gate<false, bf16>)((const bf16*)gate_up, num_tokens, width, (bf16*)out);
    else
        (is_gelu ? gate<true, float> : gate<false, float>)((const float*)gate_up, num_tokens, width, (float*)out);
}
