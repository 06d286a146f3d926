// Products of rows that are quantised one by one with a weight of int8: exact sums in int32, so that a row's result has
// the same bits whatever rows stand beside it.
//
// Called through `baton/model/quantized.py`, which has padded the weight's rows with zeros to a multiple of kPadding.
// AVX2 alone has no exact product of u8 and s8: the sum of two pairs may exceed an int16 and saturates. With signs moved
// from the row to the weight, and both sides within 127, it is at most 2 * 127 * 127, which fits.
#include "room.h"
#include "simd.h"
#include "team.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPadding = 64;

#if defined(BATON_BYTE_PRODUCTS)
constexpr int kBytes = 64;  // of the weight at a time
constexpr int32_t kShift = 128;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
constexpr int32_t kShift = 0;
#else
constexpr int kBytes = 4;
constexpr int32_t kShift = 0;
#endif
typedef int32_t Sums __attribute__((vector_size(kBytes < 16 ? 16 : kBytes)));

// `kBytes` of a row, made ready for the products with several weights.
#if defined(BATON_BYTE_PRODUCTS)
typedef int8_t Bytes __attribute__((vector_size(kBytes)));
BATON_INLINE Sums add_products(Sums sums, Bytes u8, Bytes s8) {
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)u8, (__m512i)s8);
#else  // the same in words, so that everything around it can be tested without such a CPU
    for (int i = 0; i < kBytes; i++) sums[i / 4] += (uint8_t)u8[i] * s8[i];
    return sums;
#endif
}
// The instruction takes u8: rows are moved up by kShift, and that times the sum of the weights is taken off at the end.
struct Part {
    Bytes moved;
    Part() = default;
    BATON_INLINE explicit Part(const int8_t* from) : moved(load_as<Bytes>(from) ^ (int8_t)-128) {}
    BATON_INLINE Sums add(Sums sums, Bytes weight) const { return add_products(sums, moved, weight); }
};
BATON_INLINE Bytes load_weights(const int8_t* from) { return load_as<Bytes>(from); }
#elif defined(__AVX2__)
struct Part {
    __m256i signs, size;
    Part() = default;
    BATON_INLINE explicit Part(const int8_t* from) : signs(load_as<__m256i>(from)), size(_mm256_abs_epi8(signs)) {}
    BATON_INLINE Sums add(Sums sums, __m256i weight) const {
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(weight, signs));
        return sums + (Sums)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
};
BATON_INLINE __m256i load_weights(const int8_t* from) { return load_as<__m256i>(from); }
#else
typedef int8_t FourBytes __attribute__((vector_size(4)));
BATON_INLINE Sums load_weights(const int8_t* from) { return __builtin_convertvector(load_as<FourBytes>(from), Sums); }
struct Part {
    Sums numbers;
    Part() = default;
    BATON_INLINE explicit Part(const int8_t* from) : numbers(load_weights(from)) {}
    BATON_INLINE Sums add(Sums sums, Sums weight) const { return sums + numbers * weight; }
};
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
    const int8_t* values;    // [num_out, num_padded]
    const float* scales;     // [num_out]
    const int32_t* sums;     // [num_out], of values
    const float* bias;       // [num_out] or null
    int64_t num_in, num_padded, num_out;
};

// A row as int8 [num_padded] and its scale. A row with a NaN or an infinity has a NaN for a scale, and one of hardly
// more than nothing is nothing: the inverse of its scale would be infinite.
template <typename T>
float quantize(const T* x, int64_t num_in, int64_t num_padded, int8_t* to) {
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
    std::memset(to, 0, num_padded);
    if (wrong != wrong) return wrong;
    if (size < 1e-30f) return 0.0f;
    const float factor = 127.0f / size, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    for (i = 0; i < num_in; i++) {
        const float rounded = multiply_add(widen(x[i]), factor, magic);
        int32_t bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        to[i] = (int8_t)bits;  // the low byte is the integer, in two's complement
    }
    return size / 127.0f;
}

template <typename T>
BATON_INLINE void finish(int32_t sum, const Weight& w, int64_t output, float row_scale, T* out) {
    const float product = (float)(sum - kShift * w.sums[output]) * w.scales[output];
    narrow(multiply_add(product, row_scale, w.bias ? w.bias[output] : 0.0f), out + output);
}

// The outputs are `apart` of each other.
template <typename T, int kOutputs, int kRows>
void block(const Weight& w, int64_t first, int64_t apart, const int8_t* rows, const float* row_scales, T* out) {
    constexpr int kSums = kOutputs * kRows;
    const int8_t* weight = w.values + first * w.num_padded;
    Sums sums[kSums] = {};
    for (int64_t i = 0; i < w.num_padded; i += kBytes) {
        Part parts[kRows];
        for (int r = 0; r < kRows; r++) parts[r] = Part(rows + r * w.num_padded + i);
        for (int o = 0; o < kOutputs; o++) {
            const auto bytes = load_weights(weight + o * apart * w.num_padded + i);
            for (int r = 0; r < kRows; r++) sums[r * kOutputs + o] = parts[r].add(sums[r * kOutputs + o], bytes);
        }
    }
    int32_t totals[kSums + kLanes<Sums>];
    for (int done = 0; done < kSums; done += kLanes<Sums>) {
        Sums some[kLanes<Sums>] = {};
        for (int i = 0; i < kLanes<Sums> && done + i < kSums; i++) some[i] = sums[done + i];
        some[0] = sums_of_rows(some);
        std::memcpy(totals + done, some, sizeof(Sums));
    }
    for (int r = 0; r < kRows; r++)
        for (int o = 0; o < kOutputs; o++) finish(totals[r * kOutputs + o], w, first + o * apart, row_scales[r], out + r * w.num_out);
}

// All rows for `kOutputs` outputs, at most `kRows` at a time.
template <typename T, int kOutputs, int kRows>
void outputs(const Weight& w, int64_t first, int64_t apart, const int8_t* rows, const float* row_scales, T* out,
             int64_t num_rows) {
    for (; num_rows >= kRows; num_rows -= kRows) {
        block<T, kOutputs, kRows>(w, first, apart, rows, row_scales, out);
        rows += kRows * w.num_padded, row_scales += kRows, out += kRows * w.num_out;
    }
    if constexpr (kRows > 1)
        if (num_rows > 0) outputs<T, kOutputs, kRows / 2>(w, first, apart, rows, row_scales, out, num_rows);
}

template <typename T, int kOutputs, int kRows>
void product(const Weight& w, const int8_t* rows, const float* row_scales, T* out, int64_t num_rows) {
    const int64_t apart = w.num_out / kOutputs;  // as far as can be, for the reason that linear.cpp gives
    for_runs(apart, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin; first < end; first++)
            outputs<T, kOutputs, kRows>(w, first, apart, rows, row_scales, out, num_rows);
    });
    for (int64_t first = apart * kOutputs; first < w.num_out; first++)
        outputs<T, 1, kRows>(w, first, 0, rows, row_scales, out, num_rows);
}

thread_local Room room;

// As many rows at once as stay in the second cache; more read the weight again.
template <typename T>
void linear(const T* x, const Weight& w, T* out, int64_t num_rows) {
    constexpr int64_t kCacheBytes = 256 * 1024;
    const int64_t fitting = kCacheBytes / w.num_padded / 4 * 4, rows_at_once = fitting < 4 ? 4 : fitting;
    auto* rows = (int8_t*)room.of(rows_at_once * (w.num_padded + (int64_t)sizeof(float)));
    auto* scales = (float*)(rows + rows_at_once * w.num_padded);
    for (int64_t first = 0; first < num_rows; first += rows_at_once) {
        const int64_t count = num_rows - first < rows_at_once ? num_rows - first : rows_at_once;
        for_tokens(count, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++)
                scales[row] = quantize(x + (first + row) * w.num_in, w.num_in, w.num_padded, rows + row * w.num_padded);
        });
        T* to = out + first * w.num_out;
        if (count == 1)
            product<T, 4, 1>(w, rows, scales, to, count);
        else
            product<T, 4, 2>(w, rows, scales, to, count);
    }
}

}  // namespace

BATON_API int64_t baton_int8_padding() { return kPadding; }

BATON_API void baton_linear_int8(bool is_bf16, const void* x, const Weight* weight, void* out, int64_t num_rows) {
    if (is_bf16)
        linear((const bf16*)x, *weight, (bf16*)out, num_rows);
    else
        linear((const float*)x, *weight, (float*)out, num_rows);
}
