// Linear layers with float and bfloat16 weights in panels. Called through `baton/model/linears/panels.py`, which packs the
// weight and zero-pads its last panel.
#include "panels.h"

#include "simd.h"
#include "thread_pool.h"
#include "workspace.h"

namespace {

template <typename T>
struct Step {
    using Weight = float;
    using Input = float;
    using Total = float;
    using Sum = Vec;
    static constexpr int kInputs = 1, kParts = 1, kMaxRows = kMaxTileRows;
    BATON_INLINE static Vec weights(const float* at, int half, int) { return load(at + half * kWidth); }
    BATON_INLINE static Vec input(const float* at, int) { return broadcast(*at); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return sum + w * x; }
};
#if defined(BATON_BF16_DOT)
template <>
struct Step<bf16> {
    using Weight = bf16;
    using Input = bf16;
    using Total = float;
    using Sum = Vec;
    static constexpr int kInputs = 2, kParts = 1, kMaxRows = kMaxTileRows;
    BATON_INLINE static Vec weights(const bf16* at, int half, int) { return load_as<Vec>(at + half * kPanel); }
    BATON_INLINE static Vec input(const bf16* at, int) { return (Vec)(BitVec{} + load_as<uint32_t>(at)); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return Dot<bf16>::add(sum, w, x); }
};
#else
template <>
struct Step<bf16> {  // the even inputs and the odd ones, widened
    using Weight = bf16;
    using Input = float;
    using Total = float;
    using Sum = Vec;
    static constexpr int kInputs = 2, kParts = 2, kMaxRows = kMaxTileRows;
    BATON_INLINE static Vec weights(const bf16* at, int half, int part) {
        const Split pairs = load_split(at + half * kPanel);
        return part ? pairs.b : pairs.a;
    }
    BATON_INLINE static Vec input(const float* at, int part) { return broadcast(at[part]); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return sum + w * x; }
};
#endif

thread_local Workspace sums_workspace, input_workspace;

// Rows converted to the step's input type.
BATON_INLINE const float* as_inputs(const float* x, int64_t) { return x; }
#if defined(BATON_BF16_DOT)
BATON_INLINE const bf16* as_inputs(const bf16* x, int64_t) { return x; }
#else
BATON_INLINE const float* as_inputs(const bf16* x, int64_t num_elements) {
    auto* wide = (float*)input_workspace.get(num_elements * sizeof(float));
    for (int64_t i = 0; i < num_elements; i++) wide[i] = widen(x[i]);
    return wide;
}
#endif

// Stores sums [num_rows, kPanel], plus bias, as the outputs from `first`.
template <typename T>
void store_outputs(const float* sums, const T* bias, int64_t first, int64_t num_rows, int64_t num_out, T* out) {
    const int64_t count = num_out - first < kPanel ? num_out - first : kPanel;
    for (int64_t row = 0; row < num_rows; row++, sums += kPanel) {
        T* to = out + row * num_out + first;
        for (int64_t i = 0; i < count; i++) narrow(bias ? sums[i] + widen(bias[first + i]) : sums[i], to + i);
    }
}

// x: [num_rows, num_in]; out: [num_rows, num_out].
template <typename T>
void linear(const T* x, const T* panels, const T* bias, T* out, int64_t num_rows, int64_t num_in, int64_t num_out) {
    const int64_t num_steps = num_in / Step<T>::kInputs, num_panels = (num_out + kPanel - 1) / kPanel;
    for (int64_t rows; num_rows > 0; num_rows -= rows, x += rows * num_in, out += rows * num_out) {
        rows = num_rows < kRowBlock ? num_rows : kRowBlock;
        const auto* inputs = as_inputs(x, rows * num_in);
        parallel_for_ranges(num_panels, [&](int64_t first, int64_t last) {
            auto* sums = (float*)sums_workspace.get(kRowBlock * kPanel * sizeof(float));
            for (int64_t panel = first; panel < last; panel++) {
                const T* weights = panels + panel * num_steps * kStepElements<Step<T>>;
                multiply_panel<Step<T>>(weights, num_steps, inputs, num_in, rows, sums);
                store_outputs(sums, bias, panel * kPanel, rows, num_out, out);
            }
        });
    }
}

}  // namespace

BATON_API int64_t baton_panel_outputs() { return kPanel; }

// num_in: even for bfloat16, any for float.
BATON_API void baton_linear(bool is_bf16, const void* x, const void* panels, const void* bias, void* out,
                              int64_t num_rows, int64_t num_in, int64_t num_out) {
    if (is_bf16)
        linear((const bf16*)x, (const bf16*)panels, (const bf16*)bias, (bf16*)out, num_rows, num_in, num_out);
    else
        linear((const float*)x, (const float*)panels, (const float*)bias, (float*)out, num_rows, num_in, num_out);
}
