// Products with a weight that is laid out in panels: [panels, steps, kPanel outputs, inputs of a step], so that what is
// multiplied next always lies next, and a sum never has to be added up across a vector's lanes.
//
// Called through `baton/model/kernels/panels.py`, which lays the weight out and fills its last panel up with zeros. Few
// rows read a panel once, at the speed of memory; many take it from the cache, kMaxRows at a time (Goto and van de Geijn,
// "Anatomy of high-performance matrix multiplication", 2008). Every sum goes through the inputs in order, so that a row's
// result has the same bits whatever rows stand beside it.
#include <array>

#include "room.h"
#include "simd.h"
#include "team.h"

namespace {

constexpr int kPanel = 2 * kWidth;  // outputs that are computed together
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxRows = 12;  // with a panel's two vectors: as many sums as registers hold, beside what they are made of
#else
constexpr int kMaxRows = 6;
#endif
constexpr int64_t kBlockSteps = 512;  // that are summed up before they are added to the rest: many rows read them again
                                      // from the cache, and sums of sums are more exact than one long sum
constexpr int64_t kAheadBytes = 8 * 1024;   // from which few rows fetch what they will read
constexpr int64_t kRowsAtOnce = 192;        // whose sums stay in the cache

// What is multiplied in a step of one panel: kInputs inputs in kParts products. `Input`: how a row is kept for it.
template <typename T>
struct Step {
    using Input = float;
    static constexpr int kInputs = 1, kParts = 1;
    BATON_INLINE static Vec weights(const float* at, int half, int) { return load(at + half * kWidth); }
    BATON_INLINE static Vec input(const float* at, int) { return splat(*at); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return sum + w * x; }
};
#if defined(BATON_BF16_PAIRS)
template <>
struct Step<bf16> {
    using Input = bf16;
    static constexpr int kInputs = 2, kParts = 1;
    BATON_INLINE static Vec weights(const bf16* at, int half, int) { return load_as<Vec>(at + half * kPanel); }
    BATON_INLINE static Vec input(const bf16* at, int) { return (Vec)(BitVec{} + load_as<uint32_t>(at)); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return Dot<bf16>::add(sum, w, x); }
};
#else
template <>
struct Step<bf16> {
    using Input = float;
    static constexpr int kInputs = 2, kParts = 2;
    BATON_INLINE static Vec weights(const bf16* at, int half, int part) {
        const Split pairs = load_split(at + half * kPanel);
        return part ? pairs.b : pairs.a;
    }
    BATON_INLINE static Vec input(const float* at, int part) { return splat(at[part]); }
    BATON_INLINE static Vec add(Vec sum, Vec w, Vec x) { return sum + w * x; }
};
#endif

template <typename T>
constexpr int64_t kStepElements = kPanel * Step<T>::kInputs;

// Some steps of one panel, and what is fetched meanwhile: `ahead_step` bytes a step.
template <typename T>
struct Block {
    const T* weights;
    int64_t num_steps;
    const char* ahead;
    int64_t ahead_step;
};

// sums: [kRows, kPanel], to which the block's are added unless it `is_first`.
template <typename T, int kRows>
void tile(const Block<T>& block, const typename Step<T>::Input* x, int64_t x_stride, float* sums, bool is_first) {
    using S = Step<T>;
    Vec a[kRows] = {}, b[kRows] = {};
    const T* weights = block.weights;
    const char* ahead = block.ahead;
    for (int64_t s = 0; s < block.num_steps; s++, weights += kStepElements<T>, x += S::kInputs) {
        for (int64_t line = 0; line < kStepElements<T> * (int64_t)sizeof(T); line += 64) __builtin_prefetch(ahead + line, 0, 2);
        ahead += block.ahead_step;
        for (int part = 0; part < S::kParts; part++) {
            const Vec low = S::weights(weights, 0, part), high = S::weights(weights, 1, part);
            for (int r = 0; r < kRows; r++) {
                const Vec input = S::input(x + r * x_stride, part);
                a[r] = S::add(a[r], low, input);
                b[r] = S::add(b[r], high, input);
            }
        }
    }
    for (int r = 0; r < kRows; r++, sums += kPanel) {
        store(sums, is_first ? a[r] : load(sums) + a[r]);
        store(sums + kWidth, is_first ? b[r] : load(sums + kWidth) + b[r]);
    }
}

template <typename T>
using Tile = void (*)(const Block<T>&, const typename Step<T>::Input*, int64_t, float*, bool);
template <typename T, int... kRows>
constexpr std::array<Tile<T>, sizeof...(kRows)> tiles_of(std::integer_sequence<int, kRows...>) {
    return {tile<T, kRows + 1>...};
}
template <typename T>
constexpr auto kTiles = tiles_of<T>(std::make_integer_sequence<int, kMaxRows>());  // [rows - 1]

// x: [num_rows, num_in]; out: [num_rows, num_out], of which `panel` has the outputs from panel * kPanel.
template <typename T>
struct Product {
    const T* panels;
    const T* bias;
    int64_t num_in, num_out;

    void panel(int64_t panel, const typename Step<T>::Input* x, int64_t num_rows, float* sums, T* out) const {
        const int64_t num_steps = num_in / Step<T>::kInputs, num_blocks = (num_steps + kBlockSteps - 1) / kBlockSteps;
        const T* weights = panels + panel * num_steps * kStepElements<T>;
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t first = num_steps * block / num_blocks, last = num_steps * (block + 1) / num_blocks;
            multiply(weights + first * kStepElements<T>, last - first, x + first * Step<T>::kInputs, num_rows, sums, !block);
        }
        finish(panel * kPanel, sums, num_rows, out);
    }

    // Groups of rows as large as each other. One alone fetches what it will read soon itself; several, each their part of
    // the block after this one.
    void multiply(const T* weights, int64_t num_steps, const typename Step<T>::Input* x, int64_t num_rows, float* sums,
                  bool is_first) const {
        const int64_t num_groups = (num_rows + kMaxRows - 1) / kMaxRows, num_bytes = kStepElements<T> * sizeof(T);
        const char* next = (const char*)weights + (num_groups == 1 ? kAheadBytes : num_steps * num_bytes);
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t row = num_rows * group / num_groups, rows = num_rows * (group + 1) / num_groups - row;
            const int64_t ahead_step = num_bytes / num_groups;
            const Block<T> block{weights, num_steps, next + group * num_steps * ahead_step, ahead_step};
            kTiles<T>[rows - 1](block, x + row * num_in, num_in, sums + row * kPanel, is_first);
        }
    }

    void finish(int64_t first, const float* sums, int64_t num_rows, T* out) const {
        const int64_t count = num_out - first < kPanel ? num_out - first : kPanel;
        for (int64_t row = 0; row < num_rows; row++, sums += kPanel) {
            T* to = out + row * num_out + first;
            for (int64_t i = 0; i < count; i++) narrow(bias ? sums[i] + widen(bias[first + i]) : sums[i], to + i);
        }
    }
};

thread_local Room sums_room, input_room;

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

template <typename T>
void multiply(const Product<T>& product, const T* x, T* out, int64_t num_rows) {
    const int64_t num_panels = (product.num_out + kPanel - 1) / kPanel;
    for (int64_t done = 0; done < num_rows; done += kRowsAtOnce) {
        const int64_t rows = num_rows - done < kRowsAtOnce ? num_rows - done : kRowsAtOnce;
        const auto* inputs = inputs_of(x + done * product.num_in, rows * product.num_in);
        for_runs(num_panels, [&](int64_t first, int64_t last) {
            auto* sums = (float*)sums_room.of(kRowsAtOnce * kPanel * sizeof(float));
            for (int64_t panel = first; panel < last; panel++)
                product.panel(panel, inputs, rows, sums, out + done * product.num_out);
        });
    }
}

}  // namespace

BATON_API int64_t baton_panel_outputs() { return kPanel; }

// num_in: even, and for float any.
BATON_API void baton_multiply(bool is_bf16, const void* x, const void* panels, const void* bias, void* out,
                              int64_t num_rows, int64_t num_in, int64_t num_out) {
    if (is_bf16)
        multiply(Product<bf16>{(const bf16*)panels, (const bf16*)bias, num_in, num_out}, (const bf16*)x, (bf16*)out, num_rows);
    else
        multiply(Product<float>{(const float*)panels, (const float*)bias, num_in, num_out}, (const float*)x, (float*)out, num_rows);
}
