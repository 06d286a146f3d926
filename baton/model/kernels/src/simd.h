// Float vectors as wide as the level that is being built, and conversions of the two element types, float and bfloat16.
//
// Everything uses the compiler's vector extensions (GCC and Clang), so one source serves every level: the build defines
// BATON_VECTOR_BYTES (16, 32 or 64) and the flags that enable its instructions. Code of a single level is marked.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define BATON_API extern "C" __attribute__((visibility("default")))
#define BATON_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kWidth = BATON_VECTOR_BYTES / 4;  // floats in a vector
constexpr int kSpan = 2 * kWidth;               // elements that are loaded, multiplied and stored together

typedef float Vec __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef uint32_t BitVec __attribute__((vector_size(BATON_VECTOR_BYTES)));
typedef int8_t QuarterVec __attribute__((vector_size(BATON_VECTOR_BYTES / 4)));
typedef int16_t SignedHalfVec __attribute__((vector_size(BATON_VECTOR_BYTES / 2)));
typedef uint16_t HalfVec __attribute__((vector_size(BATON_VECTOR_BYTES / 2)));

struct bf16 {
    uint16_t bits;
};

BATON_INLINE Vec broadcast(float x) { return x - Vec{}; }  // the compiler drops the subtraction of 0, not an addition
BATON_INLINE Vec vec_max(Vec a, Vec b) { return a > b ? a : b; }

template <typename V, typename P>
BATON_INLINE V load_as(const P* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

BATON_INLINE float widen(float x) { return x; }
BATON_INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}
BATON_INLINE void narrow(float x, float* to) { *to = x; }
BATON_INLINE void narrow(float x, bf16* to) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to->bits = x == x ? (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : (uint16_t)0x7fc0;
}

// kWidth adjacent elements.
BATON_INLINE Vec load(const float* from) { return load_as<Vec>(from); }
BATON_INLINE Vec load(const bf16* from) {
    return (Vec)(__builtin_convertvector(load_as<HalfVec>(from), BitVec) << 16);
}
BATON_INLINE Vec load(const int8_t* from) {  // twice as wide at a time: GCC 12 makes other conversions lane by lane
    const auto half = __builtin_convertvector(load_as<QuarterVec>(from), SignedHalfVec);
    return __builtin_convertvector(__builtin_convertvector(half, IntVec), Vec);
}
// Rounds to bfloat16; the bits are in the upper half of each lane.
BATON_INLINE BitVec round_to_bf16(Vec v) {
    BitVec bits = (BitVec)v;
    bits += 0x7fff + ((bits >> 16) & 1);
    return v == v ? bits : BitVec{} + 0x7fc00000u;
}
BATON_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
BATON_INLINE void store(bf16* to, Vec v) {
    HalfVec half = __builtin_convertvector(round_to_bf16(v) >> 16, HalfVec);
    std::memcpy(to, &half, sizeof half);
}

// kSpan adjacent elements as two vectors. Float: the first half and the second. Bfloat16: the even ones and the odd ones,
// which takes two instructions where keeping the order takes four. Sums do not mind, and `store_split` undoes it.
struct Split {
    Vec a, b;
};
BATON_INLINE Split load_split(const float* from) { return {load(from), load(from + kWidth)}; }
BATON_INLINE Split load_split(const bf16* from) {
    BitVec pairs = load_as<BitVec>(from);
    return {(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000u)};
}
BATON_INLINE void store_split(float* to, Split s) {
    store(to, s.a);
    store(to + kWidth, s.b);
}
BATON_INLINE void store_split(bf16* to, Split s) {
    BitVec pairs = (round_to_bf16(s.a) >> 16) | (round_to_bf16(s.b) & 0xffff0000u);
    std::memcpy(to, &pairs, sizeof pairs);
}

// A dot product of T, kSpan elements at a time in kParts steps, with half a span at the end where there is one. One of
// the operands is converted once, by `prepare`.
template <typename T>
struct Dot {
    using Prepared = float;
    static constexpr int kParts = 2;
    BATON_INLINE static Vec part(const T* from, int part) { return part ? load_split(from).b : load_split(from).a; }
    BATON_INLINE static Vec part_prepared(const float* from, int part) { return load(from + part * kWidth); }
    BATON_INLINE static Vec add(Vec sum, Vec x, Vec y) { return sum + x * y; }
    BATON_INLINE static void prepare(const T* from, int64_t num_elements, float* to) {
        int64_t i = 0;
        for (; i + kSpan <= num_elements; i += kSpan) store_split(to + i, load_split(from + i));
        if (i < num_elements) store(to + i, load(from + i));
    }
    BATON_INLINE static Vec half(const T* from) { return load(from); }
    BATON_INLINE static Vec half_prepared(const float* from) { return load(from); }
};
#if defined(BATON_BF16_DOT)
template <>
struct Dot<bf16> {  // AVX512-BF16's sums of products of adjacent pairs, without widening
    using Prepared = bf16;
    static constexpr int kParts = 1;
    BATON_INLINE static Vec part(const bf16* from, int) { return load_as<Vec>(from); }
    BATON_INLINE static Vec part_prepared(const bf16* from, int) { return load_as<Vec>(from); }
    BATON_INLINE static Vec half(const bf16* from) {
        Vec pairs{};  // zeros behind it
        std::memcpy(&pairs, from, sizeof pairs / 2);
        return pairs;
    }
    BATON_INLINE static Vec half_prepared(const bf16* from) { return half(from); }
    BATON_INLINE static Vec add(Vec sum, Vec x, Vec y) {
#if defined(__AVX512BF16__)
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else  // the same in plain C++, so that the code around it can be tested without such a CPU
        const BitVec a = (BitVec)x, b = (BitVec)y, upper = BitVec{} + 0xffff0000u;
        return sum + (Vec)(a << 16) * (Vec)(b << 16) + (Vec)(a & upper) * (Vec)(b & upper);
#endif
    }
    BATON_INLINE static void prepare(const bf16* from, int64_t num_elements, bf16* to) {
        std::memcpy(to, from, num_elements * sizeof(bf16));
    }
};
#endif

// The sum of a vector's lanes.
BATON_INLINE float reduce_add(Vec v) {
    float lanes[kWidth];
    store(lanes, v);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
template <int kStride, int... kLane>
BATON_INLINE Vec swapped(Vec v, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(v, v, (kLane ^ kStride)...);
}
template <int kStride = kWidth / 2>
BATON_INLINE float reduce_max(Vec v) {
    v = vec_max(v, swapped<kStride>(v, std::make_integer_sequence<int, kWidth>()));
    if constexpr (kStride > 1) return reduce_max<kStride / 2>(v);
    return v[0];
}
// True if any lane is greater than `limit`.
BATON_INLINE bool any_greater(Vec v, float limit) {
#if defined(__AVX512BF16__)
    return _mm512_cmp_ps_mask((__m512)v, (__m512)broadcast(limit), _CMP_GT_OQ) != 0;
#else
    return reduce_max(v) > limit;
#endif
}

// Lane i of the result is the sum of the lanes of rows[i]; `rows` are kWidth. Pairs of rows are added crosswise by halves
// until one remains.
template <int kStride, int... kLane>
BATON_INLINE Vec add_crosswise(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(a, b, (kLane & kStride ? kLane + kWidth : kLane)...) +
           __builtin_shufflevector(a, b, ((kLane & kStride ? kLane + kWidth : kLane) ^ kStride)...);
}
template <int kStride>
BATON_INLINE void add_pairs(Vec* rows) {
    for (int i = 0; i < kStride; i++)
        rows[i] = add_crosswise<kStride>(rows[i], rows[i + kStride], std::make_integer_sequence<int, kWidth>());
    if constexpr (kStride > 1) add_pairs<kStride / 2>(rows);
}
BATON_INLINE Vec reduce_add_rows(Vec* rows) {
    add_pairs<kWidth / 2>(rows);
    return rows[0];
}

// e^x to about 1e-7 of the result: e^-87 below -87, infinite above 88, and a NaN stays one. Cephes' polynomial.
BATON_INLINE Vec vec_exp(Vec x) {
    const IntVec too_large = x > 88.0f;
    x = x < -87.0f ? broadcast(-87.0f) : x;
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Vec shifted = x * 1.44269504088896341f + magic;
    Vec integer = shifted - magic;
    Vec part = x - integer * 0.693359375f + integer * 2.12194440e-4f;
    Vec poly = broadcast(1.9875691500e-4f);
    poly = poly * part + 1.3981999507e-3f;
    poly = poly * part + 8.3334519073e-3f;
    poly = poly * part + 4.1665795894e-2f;
    poly = poly * part + 1.6666665459e-1f;
    poly = poly * part + 5.0000001201e-1f;
    poly = poly * part * part + part + 1.0f;
    BitVec power = ((BitVec)shifted - (BitVec)magic + 127) << 23;
    return too_large ? broadcast(__builtin_inff()) : poly * (Vec)power;
}
// 2^x for x below 128, at least 2^-126; a NaN stays one. kTerms 4: to 3e-6 of the result; 6: to a float's precision.
template <int kTerms>
constexpr float kExp2Coefficients[kTerms] = {0.6931241751f, 0.2402409911f, 0.05590642616f, 0.009582852945f};
template <>
constexpr float kExp2Coefficients<6>[6] = {0.6931471825f,   0.2402264774f,   0.05550332367f,
                                     0.009618436918f, 0.001339887385f, 0.0001535336196f};
template <int kTerms>
BATON_INLINE Vec vec_exp2(Vec x) {
    x = vec_max(broadcast(-126.0f), x);
#if defined(__AVX512BF16__)
    const Vec integer = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec part = x - integer;
#else
    const Vec magic = broadcast(12582912.0f), shifted = x + magic, part = x - (shifted - magic);
#endif
    Vec poly = broadcast(kExp2Coefficients<kTerms>[kTerms - 1]);
    for (int i = kTerms - 2; i >= 0; i--) poly = poly * part + kExp2Coefficients<kTerms>[i];
    poly = poly * part + 1.0f;
#if defined(__AVX512BF16__)
    return (Vec)_mm512_scalef_ps((__m512)poly, (__m512)integer);  // the same bits
#else
    return poly * (Vec)(((BitVec)shifted - (BitVec)magic + 127) << 23);
#endif
}
// Lanes whose index, counted from `first`, is in [begin, end).
BATON_INLINE IntVec range_mask(int first, int64_t begin, int64_t end) {
    IntVec number;
    for (int i = 0; i < kWidth; i++) number[i] = first + i;
    return (number >= (int)begin) & (number < (int)end);
}
BATON_INLINE Vec vec_tanh(Vec x) { return 1.0f - 2.0f / (vec_exp(x * 2.0f) + 1.0f); }

}  // namespace
