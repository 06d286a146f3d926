// Products of rows that are quantised one by one with a weight of int8 in panels: exact sums in int32, so that a row's
// result has the same bits whatever rows stand beside it.
//
// Called through `baton/model/quantized.py`, which has filled the weight's rows up with zeros to whole steps. AVX2
// alone has no exact product of u8 and s8: the sum of two pairs may exceed an int16 and saturates. With signs moved
// from the row to the weight, and both sides within 127, it is at most 2 * 127 * 127, which fits.
#include "panels.h"
#include "room.h"
#include "simd.h"
#include "team.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Four inputs a lane.
typedef int8_t Bytes __attribute__((vector_size(BATON_VECTOR_BYTES)));

struct ByteStep {
    using Weight = int8_t;
    using Input = uint8_t;
    using Total = int32_t;
    using Sum = IntVec;
    static constexpr int kInputs = 4, kParts = 1, kMaxRows = kManyRegisters;
    BATON_INLINE static Bytes weights(const int8_t* at, int half, int) {
        return load_as<Bytes>(at + half * kWidth * kInputs);
    }
    BATON_INLINE static Bytes input(const uint8_t* at, int) { return (Bytes)(IntVec{} + load_as<int32_t>(at)); }
    BATON_INLINE static IntVec add(IntVec sum, Bytes w, Bytes x);
};

#if defined(BATON_BYTE_PRODUCTS)
// The instruction takes u8: rows are moved up by kShift, and that times the sum of the weights is taken off at the end.
constexpr int kShift = 128;
BATON_INLINE IntVec ByteStep::add(IntVec sum, Bytes w, Bytes x) {
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#else  // the same in words, so that everything around it can be tested without such a CPU
    for (int i = 0; i < BATON_VECTOR_BYTES; i++) sum[i / 4] += (uint8_t)x[i] * w[i];
    return sum;
#endif
}
#elif defined(__AVX2__)
constexpr int kShift = 0;
BATON_INLINE IntVec ByteStep::add(IntVec sum, Bytes w, Bytes x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)x), _mm256_sign_epi8((__m256i)w, (__m256i)x));
    return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr int kShift = 0;
BATON_INLINE IntVec ByteStep::add(IntVec sum, Bytes w, Bytes x) {
    for (int left = 24; left >= 0; left -= 8) sum += (((IntVec)w << left) >> 24) * (((IntVec)x << left) >> 24);
    return sum;
}
#endif

// Said and not left to the compiler, which would fuse in one copy of a loop and not in another: rows would differ.
BATON_INLINE float multiply_add(float x, float y, float z) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(x, y, z);
#else
    return x * y + z;  // such a machine has nothing to fuse with
#endif
}

struct Weight {
    const int8_t* panels;  // [panels, steps, kPanel, 4]
    const float* scales;   // [num_out]
    const int32_t* sums;   // [num_out], of what is in the panels
    const float* bias;     // [num_out] or null
    int64_t num_in, num_padded, num_out;
};

// A row as int8 [num_padded] and its scale. A row with a NaN or an infinity has a NaN for a scale, and one of hardly
// more than nothing is nothing: the inverse of its scale would be infinite.
template <typename T>
float quantize(const T* x, int64_t num_in, int64_t num_padded, uint8_t* to) {
    Vec most{}, strange{};
    int64_t i = 0;
    for (; i + kWidth <= num_in; i += kWidth) {
        const Vec v = load(x + i);
        most = larger(most, larger(v, -v));
        strange += v - v;
    }
    float size = largest_of(most), wrong = sum_of(strange);
    for (int64_t rest = i; rest < num_in; rest++) {
        const float v = widen(x[rest]), positive = v < 0.0f ? -v : v;
        size = positive > size ? positive : size;
        wrong += v - v;
    }
    std::memset(to, kShift, num_padded);
    if (wrong != wrong) return wrong;
    if (size < 1e-30f) return 0.0f;
    const float factor = 127.0f / size, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    for (i = 0; i < num_in; i++) {
        const float rounded = multiply_add(widen(x[i]), factor, magic);
        int32_t bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        to[i] = (uint8_t)(bits + kShift);  // the low byte is the integer, in two's complement
    }
    return size / 127.0f;
}

// The outputs from `first` of rows whose sums are [num_rows, kPanel].
template <typename T>
void finish(const int32_t* sums, const Weight& w, int64_t first, const float* row_scales, int64_t num_rows, T* out) {
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
            narrow(multiply_add((float)(sums[i] - shifts[i]) * scales[i], row_scales[row], biases[i]), to + i);
    }
}

thread_local Room rows_room, sums_room;

template <typename T>
void linear(const T* x, const Weight& w, T* out, int64_t num_rows) {
    const int64_t num_steps = w.num_padded / ByteStep::kInputs, num_panels = (w.num_out + kPanel - 1) / kPanel;
    auto* rows = (uint8_t*)rows_room.of(kRowsAtOnce * (w.num_padded + sizeof(float)));
    auto* row_scales = (float*)(rows + kRowsAtOnce * w.num_padded);
    for (int64_t count; num_rows > 0; num_rows -= count, x += count * w.num_in, out += count * w.num_out) {
        count = num_rows < kRowsAtOnce ? num_rows : kRowsAtOnce;
        for_tokens(count, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++)
                row_scales[row] = quantize(x + row * w.num_in, w.num_in, w.num_padded, rows + row * w.num_padded);
        });
        for_runs(num_panels, [&](int64_t first, int64_t last) {
            auto* sums = (int32_t*)sums_room.of(kRowsAtOnce * kPanel * sizeof(int32_t));
            for (int64_t panel = first; panel < last; panel++) {
                const int8_t* weights = w.panels + panel * num_steps * kStepElements<ByteStep>;
                multiply_panel<ByteStep>(weights, num_steps, rows, w.num_padded, count, sums);
                finish(sums, w, panel * kPanel, row_scales, count, out);
            }
        });
    }
}

}  // namespace

BATON_API void baton_linear_int8(bool is_bf16, const void* x, const Weight* weight, void* out, int64_t num_rows) {
    if (is_bf16)
        linear((const bf16*)x, *weight, (bf16*)out, num_rows);
    else
        linear((const float*)x, *weight, (float*)out, num_rows);
}
