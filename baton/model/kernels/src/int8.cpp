// int8 linear: rows quantised one by one times an int8 weight in panels. Sums are exact in int32, so that a row's result
// has the same bits in any batch.
//
// Called through `baton/model/linears/int8.py`, which has zero-padded the weight's rows to whole steps. AVX2 alone has no
// exact product of u8 and s8: the sum of two pairs may exceed an int16 and saturates. With signs moved from the row to
// the weight, and both sides within 127, it is at most 2 * 127 * 127, which fits.
#include "panels.h"
#include "quantize.h"
#include "simd.h"
#include "thread_pool.h"
#include "workspace.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Four inputs a lane.
typedef int8_t ByteVec __attribute__((vector_size(BATON_VECTOR_BYTES)));

struct Int8Step {
    using Weight = int8_t;
    using Input = uint8_t;
    using Total = int32_t;
    using Sum = IntVec;
    static constexpr int kInputs = 4, kParts = 1, kMaxRows = kMaxTileRows;
    BATON_INLINE static ByteVec weights(const int8_t* at, int half, int) {
        return load_as<ByteVec>(at + half * kWidth * kInputs);
    }
    BATON_INLINE static ByteVec input(const uint8_t* at, int) { return (ByteVec)(IntVec{} + load_as<int32_t>(at)); }
    BATON_INLINE static IntVec add(IntVec sum, ByteVec w, ByteVec x);
};

#if defined(BATON_INT8_DOT)
// The instruction takes u8: rows are shifted by kShift, and kShift times the sum of the weights is subtracted at the end.
constexpr int kShift = 128;
BATON_INLINE IntVec Int8Step::add(IntVec sum, ByteVec w, ByteVec x) {
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#else  // the same in plain C++, so that the code around it can be tested without such a CPU
    for (int i = 0; i < BATON_VECTOR_BYTES; i++) sum[i / 4] += (uint8_t)x[i] * w[i];
    return sum;
#endif
}
#elif defined(__AVX2__)
constexpr int kShift = 0;
BATON_INLINE IntVec Int8Step::add(IntVec sum, ByteVec w, ByteVec x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)x), _mm256_sign_epi8((__m256i)w, (__m256i)x));
    return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr int kShift = 0;
BATON_INLINE IntVec Int8Step::add(IntVec sum, ByteVec w, ByteVec x) {
    for (int left = 24; left >= 0; left -= 8) sum += (((IntVec)w << left) >> 24) * (((IntVec)x << left) >> 24);
    return sum;
}
#endif

struct Int8Weight {
    const int8_t* panels;  // [panels, steps, kPanel, 4]
    const float* scales;   // [num_out]
    const int32_t* sums;   // [num_out], of what is in the panels
    const float* bias;     // [num_out] or null
    int64_t num_in, num_padded, num_out;
};

// Rescales sums [num_rows, kPanel] and stores them as the outputs from `first`.
template <typename T>
void store_outputs(const int32_t* sums, const Int8Weight& w, int64_t first, const float* row_scales, int64_t num_rows,
                   T* out) {
    const int64_t count = w.num_out - first < kPanel ? w.num_out - first : kPanel;
    float scales[kPanel], biases[kPanel] = {};
    int32_t shifts[kPanel];
    for (int64_t i = 0; i < count; i++) {
        scales[i] = w.scales[first + i], shifts[i] = kShift * w.sums[first + i];
        if (w.bias) biases[i] = w.bias[first + i];
    }
    for (int64_t row = 0; row < num_rows; row++, sums += kPanel) {
        T* to = out + row * w.num_out + first;
        for (int64_t i = 0; i < count; i++)
            narrow(fused_multiply_add((float)(sums[i] - shifts[i]) * scales[i], row_scales[row], biases[i]), to + i);
    }
}

thread_local Workspace rows_workspace, sums_workspace;

template <typename T>
void linear(const T* x, const Int8Weight& w, T* out, int64_t num_rows) {
    const int64_t num_steps = w.num_padded / Int8Step::kInputs, num_panels = (w.num_out + kPanel - 1) / kPanel;
    auto* rows = (uint8_t*)rows_workspace.get(kRowBlock * (w.num_padded + sizeof(float)));
    auto* row_scales = (float*)(rows + kRowBlock * w.num_padded);
    for (int64_t count; num_rows > 0; num_rows -= count, x += count * w.num_in, out += count * w.num_out) {
        count = num_rows < kRowBlock ? num_rows : kRowBlock;
        parallel_for_tokens(count, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++)
                row_scales[row] =
                    quantize_row<kShift>(x + row * w.num_in, w.num_in, w.num_padded, rows + row * w.num_padded);
        });
        parallel_for_ranges(num_panels, [&](int64_t first, int64_t last) {
            auto* sums = (int32_t*)sums_workspace.get(kRowBlock * kPanel * sizeof(int32_t));
            for (int64_t panel = first; panel < last; panel++) {
                const int8_t* weights = w.panels + panel * num_steps * kStepElements<Int8Step>;
                multiply_panel<Int8Step>(weights, num_steps, rows, w.num_padded, count, sums);
                store_outputs(sums, w, panel * kPanel, row_scales, count, out);
            }
        });
    }
}

}  // namespace

BATON_API void baton_linear_int8(bool is_bf16, const void* x, const Int8Weight* weight, void* out, int64_t num_rows) {
    if (is_bf16)
        linear((const bf16*)x, *weight, (bf16*)out, num_rows);
    else
        linear((const float*)x, *weight, (float*)out, num_rows);
}
