// Products with weights of float and bfloat16 in panels. Called through `baton/model/kernels/panels.py`, which lays the
// weight out and fills its last panel up with zeros.
#include "panels.h"

#include "room.h"
#include "simd.h"
#include "team.h"

namespace {

template <typename T>
struct Step {
    using Weight = float;
    using Input = float;
    using Total = float;
    using Sum = Vec;
    static constexpr int kInputs = 1, kParts = 1, kMaxRows = kManyRegisters;
    BATON_INLINE static Vec weights(const float* at, int half, int) { return load(at + half * kWidth); }
    BATON_INLINE static Vec input(const float* at, int) { return splat(*at); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return sum + w * x; }
};
#if defined(BATON_BF16_PAIRS)
template <>
struct Step<bf16> {
    using Weight = bf16;
    using Input = bf16;
    using Total = float;
    using Sum = Vec;
    static constexpr int kInputs = 2, kParts = 1, kMaxRows = kManyRegisters;
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
    static constexpr int kInputs = 2, kParts = 2, kMaxRows = kManyRegisters;
    BATON_INLINE static Vec weights(const bf16* at, int half, int part) {
        const Split pairs = load_split(at + half * kPanel);
        return part ? pairs.b : pairs.a;
    }
    BATON_INLINE static Vec input(const float* at, int part) { return splat(at[part]); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return sum + w * x; }
};
#endif

thread_local Room sums_room, input_room;

// Rows as the step takes them.
BATON_INLINE const float* inputs_of(const float* x, int64_t) { return x; }
#if defined(BATON_BF16_PAIRS)
BATON_INLINE const bf16* inputs_of(const bf16* x, int64_t) { return x; }
#else
BATON_INLINE const float* inputs_of(const bf16* x, int64_t num_elements) {
    auto* wide = (float*)input_room.of(num_elements * sizeof(float));
    for (int64_t i = 0; i < num_elements; i++) wide[i] = widen(x[i]);
    return wide;
}
#endif

// The outputs from `first` of rows whose sums are [num_rows, kPanel].
template <typename T>
void finish(const float* sums, const T* bias, int64_t first, int64_t num_rows, int64_t num_out, T* out) {
    const int64_t count = num_out - first < kPanel ? num_out - first : kPanel;
    for (int64_t row = 0; row < num_rows; row++, sums += kPanel) {
        T* to = out + row * num_out + first;
        for (int64_t i = 0; i < count; i++) narrow(bias ? sums[i] + widen(bias[first + i]) : sums[i], to + i);
    }
}

// x: [num_rows, num_in]; out: [num_rows, num_out].
template <typename T>
void multiply(const T* x, const T* panels, const T* bias, T* out, int64_t num_rows, int64_t num_in, int64_t num_out) {
    const int64_t num_steps = num_in / Step<T>::kInputs, num_panels = (num_out + kPanel - 1) / kPanel;
    for (int64_t rows; num_rows > 0; num_rows -= rows, x += rows * num_in, out += rows * num_out) {
        rows = num_rows < kRowsAtOnce ? num_rows : kRowsAtOnce;
        const auto* inputs = inputs_of(x, rows * num_in);
        for_runs(num_panels, [&](int64_t first, int64_t last) {
            auto* sums = (float*)sums_room.of(kRowsAtOnce * kPanel * sizeof(float));
            for (int64_t panel = first; panel < last; panel++) {
                const T* weights = panels + panel * num_steps * kStepElements<Step<T>>;
                multiply_panel<Step<T>>(weights, num_steps, inputs, num_in, rows, sums);
                finish(sums, bias, panel * kPanel, rows, num_out, out);
            }
        });
    }
}

}  // namespace

BATON_API int64_t baton_panel_outputs() { return kPanel; }

// num_in: even, and for float any.
BATON_API void baton_multiply(bool is_bf16, const void* x, const void* panels, const void* bias, void* out,
                              int64_t num_rows, int64_t num_in, int64_t num_out) {
    if (is_bf16)
        multiply((const bf16*)x, (const bf16*)panels, (const bf16*)bias, (bf16*)out, num_rows, num_in, num_out);
    else
        multiply((const float*)x, (const float*)panels, (const float*)bias, (float*)out, num_rows, num_in, num_out);
}
