// Causal attention over pages, for decode rows and prompt chunks alike, in any mixture.
//
// The unit of work is a tile: the query heads that share one KV head, of one or more adjacent tokens of one segment.
// A tile reads each of its keys and values once for all its queries, kTileKeys at a time, and keeps the running maximum
// and sum of every query's softmax (online softmax: arXiv:1805.02867, arXiv:2205.14135). Sums are float.
// A tile of few queries multiplies keys and values as they lie in the page (in_place.h). A tile of many lays them out
// first, keys across, and then computes matrix products in registers (words.h); where the CPU has products of bfloat16
// pairs, the softmax's weights are rounded for them.
// Called through `baton/model/attention/native_backend.py`, which has checked shapes, types and strides.
#include <cmath>

#include "in_place.h"
#include "room.h"
#include "team.h"
#include "words.h"

namespace {

constexpr int kTileKeys = 64;
constexpr int kMaxTileQueries = 192;  // of a prompt chunk: queries, sums and scores then stay in the second cache
constexpr float kLog2E = 1.44269504088896341f;
constexpr int kNoWindow = 0;

struct Layer {  // one layer's call; strides in elements
    const void* query;   // [tokens, num_heads, k_dim]
    int64_t query_token_stride, query_head_stride;
    const void *keys, *values;  // the layer's part of page 0: [num_kv_heads, page_size, dim]
    int64_t page_stride, page_size;
    void* out;  // [tokens, num_heads, v_dim], contiguous
    int64_t num_heads, num_kv_heads, k_dim, v_dim;
    int64_t window;      // keys that a query sees, itself included; kNoWindow: all
    const float* sinks;  // [num_heads] or null
    float scale, softcap;  // softcap 0: none
};

struct Segments {  // of the step; arrays of num_segments, and all their page tables one after another
    int64_t num_segments;
    const int64_t *first, *start, *num_tokens, *first_page;
    const int32_t* pages;
};

BATON_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
BATON_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

thread_local Room room;

// Rows that will be read soon, asked for in even parts between the steps of a product. Pages lie anywhere, so the
// machine cannot guess them; and asked for all at once, they would hold up what is computed meanwhile.
template <typename T>
class Ahead {
  public:
    Ahead(const T* const* rows, int64_t num_rows, int64_t dim, int64_t num_parts)
        : row_(rows), end_(rows + num_rows), dim_(dim) {
        const int64_t num_lines = num_rows * ((dim + kLine - 1) / kLine);
        num_at_once_ = (num_lines + num_parts - 1) / num_parts;
    }

    BATON_INLINE void fetch_part() {
        for (int64_t i = 0; i < num_at_once_ && row_ != end_; i++) {
            __builtin_prefetch(*row_ + at_);
            at_ += kLine;
            if (at_ >= dim_) at_ = 0, row_++;
        }
    }

  private:
    static constexpr int64_t kLine = 64 / sizeof(T);
    const T *const *row_, *const *end_;
    int64_t dim_, num_at_once_, at_ = 0;
};

template <typename T>
class Tile {
  public:
    explicit Tile(const Layer& layer)
        : layer_(layer),
          group_(layer.num_heads / layer.num_kv_heads),
          max_tokens_(most(1, kMaxTileQueries / group_)),
          num_words_(layer.k_dim / W::kElements),
          factor_(layer.softcap > 0.0f ? layer.scale / layer.softcap : layer.scale * kLog2E) {
        const int64_t n = max_tokens_ * group_;
        const int64_t num_value_words = W::kInPlace ? 0 : kTileKeys / W::kElements * layer.v_dim;
        const int64_t num_key_words = kTileKeys * round_up(num_words_, kWidth);
        const int64_t num_of_queries = n * (num_words_ + layer.v_dim + kTileKeys + kWidth + 1);
        char* at = (char*)room.of((num_of_queries + num_key_words + num_value_words) * 4 + 1024);
        const auto cut = [&at](int64_t num_floats) {
            float* cut_off = (float*)at;
            at += round_up(num_floats * 4, 64);
            return cut_off;
        };
        query_ = cut(n * num_words_);
        sums_ = cut(n * layer.v_dim);
        scores_ = cut(n * kTileKeys);
        mass_ = cut(n * kWidth);
        top_ = cut(n);
        key_words_ = cut(num_key_words);
        value_words_ = cut(num_value_words);
    }

    int64_t max_tokens() const { return max_tokens_; }

    // Answers `num_tokens` tokens, flat from `place`, at positions from `position`, for one KV head.
    void attend(const int32_t* pages, int64_t place, int64_t position, int64_t num_tokens, int64_t kv_head) {
        pages_ = pages, position_ = position, num_queries_ = num_tokens * group_, kv_head_ = kv_head;
        is_few_ = num_queries_ <= W::kFewQueries;
        begin(place, num_tokens);
        const int64_t end = position + num_tokens;
        const int64_t oldest = layer_.window == kNoWindow ? 0 : most(0, position + 1 - layer_.window);
        // Few queries do little with a key, so their keys and values should still be in the first cache a moment later.
        const bool is_small = !is_few_ || layer_.k_dim * (int64_t)sizeof(T) <= 256;
        const int64_t step = is_small ? kTileKeys : kTileKeys / 2;
        for (int64_t key = oldest; key < end; key += step) {
            const int64_t num_keys = least(step, end - key);
            num_ahead_ = least(step, end - key - num_keys);
            locate(layer_.keys, layer_.k_dim, key, num_keys, keys_);
            locate(layer_.values, layer_.v_dim, key, num_keys, values_);
            locate(layer_.keys, layer_.k_dim, key + num_keys, num_ahead_, ahead_);
            score(num_keys);
            weigh(key, num_keys);
            add_values(num_keys, key == oldest);
        }
        finish(place, num_tokens);
    }

  private:
    using W = Words<T>;
    const Layer& layer_;
    const int64_t group_, max_tokens_, num_words_;
    const float factor_;  // of a product, to be capped, or to be the exponent of two
    const int32_t* pages_;
    int64_t position_, num_queries_, kv_head_;
    bool is_few_;  // then keys and values are multiplied in place, otherwise laid out
    float *query_, *sums_, *scores_;         // [queries, num_words_], [queries, v_dim], [queries, kTileKeys]
    float *mass_, *top_;                     // [queries, kWidth], [queries]: the softmax's sum and maximum so far
    float *key_words_, *value_words_;        // [num_words_ and some, kTileKeys], [kTileKeys / W::kElements, v_dim]
    const T *keys_[kTileKeys], *values_[kTileKeys];
    const T* ahead_[kTileKeys];  // keys of the next tile
    int64_t num_ahead_;

    void begin(int64_t place, int64_t num_tokens) {
        for (int64_t token = 0, q = 0; token < num_tokens; token++) {
            const T* heads = (const T*)layer_.query + (place + token) * layer_.query_token_stride;
            for (int64_t h = kv_head_ * group_; h < (kv_head_ + 1) * group_; h++, q++) {
                const T* from = heads + h * layer_.query_head_stride;
                float* to = query_ + q * num_words_;
                if (is_few_)
                    Dot<T>::prepare(from, layer_.k_dim, (typename Dot<T>::Prepared*)to);
                else
                    W::copy(from, layer_.k_dim, to);
            }
        }
        if (is_few_) std::memset(sums_, 0, num_queries_ * layer_.v_dim * sizeof(float));
        std::memset(mass_, 0, num_queries_ * kWidth * sizeof(float));
        for (int64_t q = 0; q < num_queries_; q++) top_[q] = -INFINITY;
    }

    // Where each of `num_rows` positions from `position` has its row of this KV head.
    void locate(const void* tensor, int64_t dim, int64_t position, int64_t num_rows, const T** rows) const {
        const T* head = (const T*)tensor + kv_head_ * layer_.page_size * dim;
        const int32_t* page = pages_ + position / layer_.page_size;
        for (int64_t slot = position % layer_.page_size, i = 0; i < num_rows; slot = 0, page++) {
            const T* row = head + *page * layer_.page_stride + slot * dim;
            for (; slot < layer_.page_size && i < num_rows; slot++, i++, row += dim) rows[i] = row;
        }
    }

    // Of few queries, the values of a tile are asked for while its scores are computed, and the keys of the next one
    // while its softmax is.
    static void fetch(const T* const* rows, int64_t first, int64_t last, int64_t dim) {
        for (int64_t i = first; i < last; i++)
            for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(rows[i] + d);
    }

    Few few() const { return {query_, num_words_, scores_, kTileKeys}; }

    // Of keys past the end the scores are of what lies there; `weigh` drops them.
    void score(int64_t num_keys) {
        if (is_few_) {
            const auto fetch_values = [this, num_keys](int64_t key) {
                fetch(values_, key, least(key + kWidth, num_keys), layer_.v_dim);
            };
            score_in_place(few(), num_queries_, keys_, num_keys, layer_.k_dim, fetch_values);
            return;
        }
        const int64_t padded = round_up(num_keys, kWidth);
        for (int64_t key = num_keys; key < padded; key++) keys_[key] = keys_[num_keys - 1];
        for (int64_t key = 0; key < padded; key += kWidth)
            lay_across(keys_ + key, layer_.k_dim, key_words_ + key, kTileKeys);
        Ahead<T> ahead(values_, num_keys, layer_.v_dim, num_steps(num_words_));
        const auto row_of = [this, &ahead](int64_t word) {
            ahead.fetch_part();
            return key_words_ + word * kTileKeys;
        };
        const Left queries{query_, num_words_, num_words_};
        multiply<T>(queries, num_queries_, row_of, round_up(num_keys, kProductLanes), {scores_, kTileKeys, true});
    }

    // How often a product of these queries asks for a row of its right side, at least.
    int64_t num_steps(int64_t num_words) const { return (num_queries_ + kProductRows - 1) / kProductRows * num_words; }

    // ---- the softmax so far, in powers of two: scores become weights; older sums shrink where the maximum has grown

    void weigh(int64_t key, int64_t num_keys) {
        for (int64_t q = 0; q < num_queries_; q++) {
            const int64_t first = q * num_ahead_ / num_queries_, last = (q + 1) * num_ahead_ / num_queries_;
            if (is_few_) fetch(ahead_, first, last, layer_.k_dim);
            const int64_t position = position_ + q / group_;
            const int64_t end = most(0, least(num_keys, position + 1 - key));
            const int64_t oldest = layer_.window == kNoWindow ? 0 : position + 1 - layer_.window;
            const int64_t begin = least(end, most(0, oldest - key));
            if (begin == end)
                std::memset(scores_ + q * kTileKeys, 0, kTileKeys * sizeof(float));
            else if (num_keys <= kTileKeys / 2)
                weigh_row<kTileKeys / 2>(begin, end, q);
            else
                weigh_row<kTileKeys>(begin, end, q);
        }
    }

    template <int kKeys>
    void weigh_row(int64_t begin, int64_t end, int64_t q) {
        constexpr int kRowVecs = kKeys / kWidth;
        float* row = scores_ + q * kTileKeys;
        Vec scores[kRowVecs];
        for (int v = 0; v < kRowVecs; v++) scores[v] = load(row + v * kWidth) * factor_;
        if (layer_.softcap > 0.0f)
            for (int v = 0; v < kRowVecs; v++) scores[v] = layer_.softcap * kLog2E * tanh_of(scores[v]);
        if (begin > 0 || end < kKeys)
            for (int v = 0; v < kRowVecs; v++)
                scores[v] = inside(v * kWidth, begin, end) ? scores[v] : splat(-INFINITY);
        Vec best = scores[0];
        for (int v = 1; v < kRowVecs; v++) best = larger(best, scores[v]);
        const float top = largest_of(best);
        Vec mass = load(mass_ + q * kWidth);
        if (top > top_[q]) {
            const float shrink = std::exp2(top_[q] - top);
            float* sums = sums_ + q * layer_.v_dim;
            if (top_[q] > -INFINITY)  // else they may not be there yet
                for (int64_t i = 0; i < layer_.v_dim; i += kWidth) store(sums + i, load(sums + i) * shrink);
            mass *= shrink;
            top_[q] = top;
        }
        for (int v = 0; v < kRowVecs; v++) {
            const Vec weight = power_of_two<W::kPowerTerms>(scores[v] - top_[q]);
            if (is_few_)
                store(row + v * kWidth, weight);
            else
                W::put_weights(row, v * kWidth, weight);
            mass += weight;
        }
        store(mass_ + q * kWidth, mass);
    }

    // ---- sums of values, split as `load_split` gives them

    void add_values(int64_t num_keys, bool is_first) {
        const int64_t dim = layer_.v_dim;
        const Left weights{scores_, kTileKeys, (num_keys + W::kElements - 1) / W::kElements};
        const Out sums{sums_, dim, is_first};
        if (is_few_) {
            add_in_place(few(), num_queries_, values_, num_keys, {sums_, dim});
            return;
        }
        if constexpr (!W::kInPlace) {
            for (int64_t word = 0; word < weights.num_words; word++) {
                const int64_t key = word * W::kElements, next = least(key + W::kElements, num_keys) - 1;
                W::lay_values(values_[key], values_[next], dim, value_words_ + word * dim);
            }
        }
        Ahead<T> ahead(ahead_, num_ahead_, layer_.k_dim, num_steps(weights.num_words));
        const auto row_of = [this, dim, &ahead](int64_t word) {
            ahead.fetch_part();
            if constexpr (W::kInPlace)
                return values_[word];
            else
                return value_words_ + word * dim;
        };
        multiply<T>(weights, num_queries_, row_of, dim, sums);
    }

    void finish(int64_t place, int64_t num_tokens) {
        for (int64_t token = 0, q = 0; token < num_tokens; token++) {
            T* heads = (T*)layer_.out + (place + token) * layer_.num_heads * layer_.v_dim;
            for (int64_t h = kv_head_ * group_; h < (kv_head_ + 1) * group_; h++, q++) {
                float mass = sum_of(load(mass_ + q * kWidth));
                if (layer_.sinks) mass += std::exp2(layer_.sinks[h] * kLog2E - top_[q]);
                const float share = 1.0f / mass;
                const float* sum = sums_ + q * layer_.v_dim;
                T* to = heads + h * layer_.v_dim;
                int64_t i = 0;
                for (; i + kSpan <= layer_.v_dim; i += kSpan)
                    store_split(to + i, {load(sum + i) * share, load(sum + i + kWidth) * share});
                if (i < layer_.v_dim) store(to + i, load(sum + i) * share);
            }
        }
    }
};

template <typename T>
void attend(const Layer& layer, const Segments& step) {
    const int64_t most_tokens = Tile<T>(layer).max_tokens();
    const auto num_tiles = [&](int64_t s) { return (step.num_tokens[s] + most_tokens - 1) / most_tokens; };
    int64_t num_all = 0;
    for (int64_t s = 0; s < step.num_segments; s++) num_all += num_tiles(s);
    for_runs(num_all * layer.num_kv_heads, [&](int64_t first, int64_t last) {
        Tile<T> tile(layer);
        for (int64_t i = first; i < last; i++) {
            int64_t s = 0, index = i / layer.num_kv_heads;
            for (; index >= num_tiles(s); s++) index -= num_tiles(s);
            const int64_t done = index * most_tokens, num_tokens = least(most_tokens, step.num_tokens[s] - done);
            tile.attend(step.pages + step.first_page[s], step.first[s] + done, step.start[s] + done, num_tokens,
                        i % layer.num_kv_heads);
        }
    });
}

}  // namespace

// Sizes of heads that the attention takes are multiples of this.
BATON_API int64_t baton_head_unit() { return kWidth; }

// k_dim and v_dim are multiples of `baton_head_unit()`; every page of a segment up to its last new token is in its
// table.
BATON_API void baton_attend(bool is_bf16, const Layer* layer, const Segments* step) {
    if (is_bf16)
        attend<bf16>(*layer, *step);
    else
        attend<float>(*layer, *step);
}
