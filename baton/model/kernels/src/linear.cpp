// Products of a few rows with a weight as models keep it, [out, in] row by row: every weight is read once for all rows.
//
// Called through `baton/model/kernels/linear.py`. For one to sixteen rows such a product is little more than the reading
// of its weight, and what counts is that nothing else is read or written on the way.
#include <type_traits>

#include "room.h"
#include "simd.h"

namespace {

// outputs x rows sums in registers: enough independent ones to hide an FMA's latency, few enough not to spill. The
// outputs are `apart` of each other.
template <typename T, int kOutputs, int kRows>
void block(const T* weight, int64_t num_in, const typename Dot<T>::Prepared* x, int64_t x_stride, const T* bias, T* out,
           int64_t out_stride, int64_t apart) {
    using D = Dot<T>;
    constexpr int64_t kAhead = 64;  // elements: a few lines, which is as much as pays
    Vec sums[kOutputs][kRows] = {};
    for (int64_t i = 0; i < num_in; i += kSpan) {
        for (int o = 0; o < kOutputs; o++) __builtin_prefetch(weight + o * apart * num_in + i + kAhead);
        for (int part = 0; part < D::kParts; part++) {
            Vec w[kOutputs];
            for (int o = 0; o < kOutputs; o++) w[o] = D::part(weight + o * apart * num_in + i, part);
            for (int r = 0; r < kRows; r++) {
                const Vec v = D::part_prepared(x + r * x_stride + i, part);
                for (int o = 0; o < kOutputs; o++) sums[o][r] = D::add(sums[o][r], w[o], v);
            }
        }
    }
    constexpr int kSums = kOutputs * kRows;
    float totals[kSums + kWidth];
    for (int first = 0; first < kSums; first += kWidth) {
        Vec some[kWidth] = {};
        for (int i = 0; i < kWidth && first + i < kSums; i++) some[i] = sums[(first + i) % kOutputs][(first + i) / kOutputs];
        store(totals + first, sums_of_rows(some));
    }
    for (int r = 0; r < kRows; r++)
        for (int o = 0; o < kOutputs; o++)
            narrow(totals[r * kOutputs + o] + (bias ? widen(bias[o * apart]) : 0.0f), out + r * out_stride + o * apart);
}

// All rows for `kOutputs` outputs, at most `kRows` at a time; the weights come from memory once and then from the cache.
template <typename T, int kOutputs, int kRows>
void outputs(const T* weight, int64_t num_in, const typename Dot<T>::Prepared* x, int64_t x_stride, const T* bias,
             T* out, int64_t out_stride, int64_t num_rows, int64_t apart) {
    if (num_rows >= kRows) {
        block<T, kOutputs, kRows>(weight, num_in, x, x_stride, bias, out, out_stride, apart);
        x += kRows * x_stride, out += kRows * out_stride, num_rows -= kRows;
        if (num_rows > 0)
            outputs<T, kOutputs, kRows>(weight, num_in, x, x_stride, bias, out, out_stride, num_rows, apart);
    } else if constexpr (kRows > 1) {
        outputs<T, kOutputs, kRows / 2>(weight, num_in, x, x_stride, bias, out, out_stride, num_rows, apart);
    }
}

// The outputs that are computed together are as far apart as they can be: each then reads on through memory without a
// break, row after row, as the machine guesses it will. Adjacent rows, when they are short, end before it has guessed.
template <typename T, int kOutputs, int kRows>
void product(const T* weight, int64_t num_in, int64_t num_out, const typename Dot<T>::Prepared* x, const T* bias, T* out,
             int64_t num_rows) {
    const int64_t apart = num_out / kOutputs;
    int64_t o = 0;
    for (; o < apart; o++)
        outputs<T, kOutputs, kRows>(weight + o * num_in, num_in, x, num_in, bias ? bias + o : nullptr, out + o, num_out,
                                    num_rows, apart);
    for (o *= kOutputs; o < num_out; o++)
        outputs<T, 1, kRows>(weight + o * num_in, num_in, x, num_in, bias ? bias + o : nullptr, out + o, num_out,
                             num_rows, 0);
}

constexpr int64_t kRowsAtOnce = 16;  // their prepared numbers stay in the second cache

thread_local Room room;

// More than kRowsAtOnce rows read the weight again.
template <typename T>
void linear(const T* x, const T* weight, const T* bias, T* out, int64_t num_rows, int64_t num_in, int64_t num_out) {
    auto* prepared = (typename Dot<T>::Prepared*)room.of(kRowsAtOnce * num_in * sizeof(float));
    for (int64_t row = 0; row < num_rows; row += kRowsAtOnce, x += kRowsAtOnce * num_in, out += kRowsAtOnce * num_out) {
        const int64_t rows = num_rows - row < kRowsAtOnce ? num_rows - row : kRowsAtOnce;
        Dot<T>::prepare(x, rows * num_in, prepared);
        if (rows == 1)
            product<T, 8, 1>(weight, num_in, num_out, prepared, bias, out, rows);
        else if (rows <= 8 || std::is_same_v<T, bf16>)  // two and two rows of what the first two have left in the cache
            product<T, 4, 2>(weight, num_in, num_out, prepared, bias, out, rows);
        else
            product<T, 3, 4>(weight, num_in, num_out, prepared, bias, out, rows);
    }
}

}  // namespace

BATON_API void baton_linear(bool is_bf16, const void* x, const void* weight, const void* bias, void* out,
                            int64_t num_rows, int64_t num_in, int64_t num_out) {
    if (is_bf16)
        linear((const bf16*)x, (const bf16*)weight, (const bf16*)bias, (bf16*)out, num_rows, num_in, num_out);
    else
        linear((const float*)x, (const float*)weight, (const float*)bias, (float*)out, num_rows, num_in, num_out);
}
