// Causal attention over pages, for decode rows and prompt chunks alike, in any mixture.
//
// The unit of work is a tile: the query heads that share one KV head, of one or more adjacent tokens of one segment.
// A tile reads each of its keys and values once for all its queries, kTileKeys at a time, and keeps the running maximum
// and sum of every query's softmax (online softmax: arXiv:1805.02867, arXiv:2205.14135). Products and sums are float.
// A tile of few queries multiplies keys as they lie in the page; a tile of many lays them out across first, once for all.
// Called through `baton/model/attention/native_backend.py`, which has checked shapes, types and strides.
#include <cmath>

#include "room.h"
#include "simd.h"

namespace {

constexpr int kTileKeys = 64;
constexpr int kMaxTileQueries = 192;   // of a prompt chunk: queries, sums and scores then stay in the second cache
constexpr int kFewQueries = 12;        // up to here keys are multiplied as they lie
constexpr int kPanel = 6;              // queries that are multiplied together otherwise
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

template <typename T>
class Tile {
  public:
    explicit Tile(const Layer& layer)
        : layer_(layer), group_(layer.num_heads / layer.num_kv_heads), max_tokens_(most(1, kMaxTileQueries / group_)) {
        const int64_t n = round_up(max_tokens_ * group_, kPanel);
        char* at = (char*)room.of((n * (layer.k_dim + layer.v_dim + kTileKeys + 2) + kTileKeys * layer.k_dim) * 4 + 1024);
        const auto cut = [&at](int64_t num_floats) {
            float* cut_off = (float*)at;
            at += round_up(num_floats * 4, 64);
            return cut_off;
        };
        query_ = cut(n * layer.k_dim);
        sums_ = cut(n * layer.v_dim);
        scores_ = cut(n * kTileKeys);
        across_ = cut(kTileKeys * layer.k_dim);
        top_ = cut(n);
        mass_ = cut(n);
    }

    int64_t max_tokens() const { return max_tokens_; }

    // Answers `num_tokens` tokens, flat from `place`, at positions from `position`, for one KV head.
    void attend(const int32_t* pages, int64_t place, int64_t position, int64_t num_tokens, int64_t kv_head) {
        pages_ = pages, position_ = position, num_queries_ = num_tokens * group_, kv_head_ = kv_head;
        begin(place, num_tokens);
        const int64_t end = position + num_tokens;
        const int64_t oldest = layer_.window == kNoWindow ? 0 : most(0, position + 1 - layer_.window);
        // Few queries do little with a key, so their keys and values should still be in the first cache a moment later.
        const bool is_small = num_queries_ > kFewQueries || layer_.k_dim * (int64_t)sizeof(T) <= 256;
        const int64_t step = is_small ? kTileKeys : kTileKeys / 2;
        for (int64_t key = oldest; key < end; key += step) {
            const int64_t num_keys = least(step, end - key);
            num_ahead_ = least(step, end - key - num_keys);
            locate(layer_.keys, layer_.k_dim, key, num_keys, keys_);
            locate(layer_.values, layer_.v_dim, key, num_keys, values_);
            locate(layer_.keys, layer_.k_dim, key + num_keys, num_ahead_, ahead_);
            if (num_queries_ <= kFewQueries)
                score_as_they_lie(num_keys);
            else
                score_across(num_keys);
            weigh(key, num_keys);
            add_values(num_keys);
        }
        finish(place, num_tokens);
    }

  private:
    const Layer& layer_;
    const int64_t group_, max_tokens_;
    const int32_t* pages_;
    int64_t position_, num_queries_, kv_head_;
    float *query_, *sums_, *scores_, *across_;  // [queries, k_dim], [queries, v_dim], [queries, kTileKeys], keys
    float *top_, *mass_;                        // [queries]: the softmax's maximum and sum so far
    const T *keys_[kTileKeys], *values_[kTileKeys];
    const T* ahead_[kTileKeys];  // keys of the next tile
    int64_t num_ahead_;

    using D = Dot<T>;
    typename D::Prepared* prepared() const { return (typename D::Prepared*)query_; }

    void begin(int64_t place, int64_t num_tokens) {
        for (int64_t token = 0, q = 0; token < num_tokens; token++) {
            const T* heads = (const T*)layer_.query + (place + token) * layer_.query_token_stride;
            for (int64_t h = kv_head_ * group_; h < (kv_head_ + 1) * group_; h++, q++) {
                const T* from = heads + h * layer_.query_head_stride;
                if (num_queries_ <= kFewQueries)
                    D::prepare(from, layer_.k_dim, prepared() + q * layer_.k_dim);
                else
                    lay_query_across(from, q);
            }
        }
        std::memset(sums_, 0, num_queries_ * layer_.v_dim * sizeof(float));
        for (int64_t q = 0; q < num_queries_; q++) top_[q] = -INFINITY, mass_[q] = 0.0f;
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

    // Pages lie anywhere, so the machine cannot guess what comes next: the values of a tile are asked for while its
    // scores are computed, and the keys of the next one while its softmax is.
    static void fetch(const T* const* rows, int64_t first, int64_t last, int64_t dim) {
        for (int64_t i = first; i < last; i++)
            for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(rows[i] + d);
    }

    // ---- scores of few queries: dot products with keys in place, kKeys of them at a time for kQueries queries

    template <int kQueries, int kKeys>
    void dots(int64_t q, const T* const* keys, Vec (*sums)[kWidth]) {
        Vec held[kQueries][kKeys] = {};
        for (int64_t d = 0; d + kSpan <= layer_.k_dim; d += kSpan) {
            for (int part = 0; part < D::kParts; part++) {
                Vec x[kQueries];
                for (int i = 0; i < kQueries; i++) x[i] = D::part_prepared(prepared() + (q + i) * layer_.k_dim + d, part);
                for (int k = 0; k < kKeys; k++) {
                    const Vec key = D::part(keys[k] + d, part);
                    for (int i = 0; i < kQueries; i++) held[i][k] = D::add(held[i][k], x[i], key);
                }
            }
        }
        if (const int64_t d = layer_.k_dim / kSpan * kSpan; d < layer_.k_dim) {
            Vec x[kQueries];
            for (int i = 0; i < kQueries; i++) x[i] = D::half_prepared(prepared() + (q + i) * layer_.k_dim + d);
            for (int k = 0; k < kKeys; k++) {
                const Vec key = D::half(keys[k] + d);
                for (int i = 0; i < kQueries; i++) held[i][k] = D::add(held[i][k], x[i], key);
            }
        }
        for (int i = 0; i < kQueries; i++)
            for (int k = 0; k < kKeys; k++) sums[i][k] = held[i][k];
    }

    template <int kQueries>
    void score_queries(int64_t q, int64_t num_keys) {
        constexpr int kKeys = 4;
        Vec sums[kQueries][kWidth];
        for (int64_t key = 0; key < num_keys; key += kWidth) {
            if (q == 0) fetch(values_, key, least(key + kWidth, num_keys), layer_.v_dim);
            for (int k = 0; k < kWidth; k += kKeys) {
                const T* some[kKeys];  // past the end: the last key again; `weigh` drops what it scores
                for (int i = 0; i < kKeys; i++) some[i] = keys_[least(key + k + i, num_keys - 1)];
                Vec part[kQueries][kWidth];
                dots<kQueries, kKeys>(q, some, part);
                for (int i = 0; i < kQueries; i++)
                    for (int j = 0; j < kKeys; j++) sums[i][k + j] = part[i][j];
            }
            for (int i = 0; i < kQueries; i++) store(scores_ + (q + i) * kTileKeys + key, sums_of_rows(sums[i]));
        }
    }

    // By threes, and by twos where one would be left alone.
    void score_as_they_lie(int64_t num_keys) {
        for (int64_t q = 0; q < num_queries_;) {
            const int64_t left = num_queries_ - q;
            if (left == 1) {
                score_queries<1>(q, num_keys);
                q += 1;
            } else if (left == 2 || left == 4) {
                score_queries<2>(q, num_keys);
                q += 2;
            } else {
                score_queries<3>(q, num_keys);
                q += 3;
            }
        }
    }

    // ---- scores of many queries: queries and keys across, then a matrix product in registers

    // query_: [queries / kPanel, k_dim, kPanel]; what fills up the last panel is whatever was there, and is not used.
    void lay_query_across(const T* from, int64_t q) {
        float* panel = query_ + q / kPanel * kPanel * layer_.k_dim + q % kPanel;
        for (int64_t d = 0; d < layer_.k_dim; d++) panel[d * kPanel] = widen(from[d]);
    }

    // across_: [keys / kSpan, k_dim, kSpan].
    void lay_keys_across(int64_t num_keys) {
        for (int64_t key = 0; key < num_keys; key++) {
            float* panel = across_ + key / kSpan * kSpan * layer_.k_dim + key % kSpan;
            for (int64_t d = 0; d < layer_.k_dim; d++) panel[d * kSpan] = widen(keys_[key][d]);
        }
    }

    void score_panels(const float* query, const float* keys, float* scores) {
        Vec sums[kPanel][2] = {};
        for (int64_t d = 0; d < layer_.k_dim; d++, query += kPanel, keys += kSpan) {
            const Vec a = load(keys), b = load(keys + kWidth);
            for (int i = 0; i < kPanel; i++) {
                const Vec x = splat(query[i]);
                sums[i][0] += x * a;
                sums[i][1] += x * b;
            }
        }
        for (int i = 0; i < kPanel; i++) {
            store(scores + i * kTileKeys, sums[i][0]);
            store(scores + i * kTileKeys + kWidth, sums[i][1]);
        }
    }

    void score_across(int64_t num_keys) {
        lay_keys_across(num_keys);
        for (int64_t key = 0; key < num_keys; key += kSpan) {
            fetch(values_, key, least(key + kSpan, num_keys), layer_.v_dim);
            for (int64_t q = 0; q < num_queries_; q += kPanel)
                score_panels(query_ + q * layer_.k_dim, across_ + key * layer_.k_dim, scores_ + q * kTileKeys + key);
        }
    }

    // ---- the softmax so far: scores become weights, and older sums are scaled where the maximum has grown

    void weigh(int64_t key, int64_t num_keys) {
        const int64_t padded = round_up(num_keys, kWidth);
        for (int64_t q = 0; q < num_queries_; q++) {
            fetch(ahead_, q * num_ahead_ / num_queries_, (q + 1) * num_ahead_ / num_queries_, layer_.k_dim);
            const int64_t position = position_ + q / group_;
            const int64_t end = most(0, least(num_keys, position + 1 - key));
            const int64_t begin = layer_.window == kNoWindow ? 0 : least(end, most(0, position + 1 - layer_.window - key));
            float* row = scores_ + q * kTileKeys;
            scale_row(row, padded);
            for (int64_t i = 0; i < begin; i++) row[i] = -INFINITY;
            for (int64_t i = end; i < padded; i++) row[i] = -INFINITY;
            if (begin < end)
                weigh_row(row, padded, q);
            else
                std::memset(row, 0, num_keys * sizeof(float));
        }
    }

    void scale_row(float* row, int64_t padded) {
        for (int64_t i = 0; i < padded; i += kWidth) {
            const Vec score = load(row + i) * layer_.scale;
            store(row + i, layer_.softcap > 0.0f ? layer_.softcap * tanh_of(score / layer_.softcap) : score);
        }
    }

    void weigh_row(float* row, int64_t padded, int64_t q) {
        Vec best = splat(-INFINITY);
        for (int64_t i = 0; i < padded; i += kWidth) best = larger(best, load(row + i));
        const float top = std::fmax(top_[q], largest_of(best));
        Vec mass{};
        for (int64_t i = 0; i < padded; i += kWidth) {
            const Vec score = load(row + i);
            const Vec weight = score == -INFINITY ? Vec{} : exp_of(score - top);
            store(row + i, weight);
            mass += weight;
        }
        if (top > top_[q]) {
            const float shrink = std::exp(top_[q] - top);
            for (int64_t i = 0; i < layer_.v_dim; i += kWidth)
                store(sums_ + q * layer_.v_dim + i, load(sums_ + q * layer_.v_dim + i) * shrink);
            mass_[q] *= shrink;
            top_[q] = top;
        }
        mass_[q] += sum_of(mass);
    }

    // ---- sums of values, split as `load_split` gives them

    template <int kQueries, int kSplits>
    void add_part(int64_t q, int64_t d, int64_t num_keys) {
        Vec sums[kQueries][2 * kSplits];
        float* to = sums_ + q * layer_.v_dim + d;
        for (int i = 0; i < kQueries; i++)
            for (int c = 0; c < 2 * kSplits; c++) sums[i][c] = load(to + i * layer_.v_dim + c * kWidth);
        for (int64_t key = 0; key < num_keys; key++) {
            Split value[kSplits];
            for (int c = 0; c < kSplits; c++) value[c] = load_split(values_[key] + d + c * kSpan);
            for (int i = 0; i < kQueries; i++) {
                const Vec weight = splat(scores_[(q + i) * kTileKeys + key]);
                for (int c = 0; c < kSplits; c++) {
                    sums[i][2 * c] += weight * value[c].a;
                    sums[i][2 * c + 1] += weight * value[c].b;
                }
            }
        }
        for (int i = 0; i < kQueries; i++)
            for (int c = 0; c < 2 * kSplits; c++) store(to + i * layer_.v_dim + c * kWidth, sums[i][c]);
    }

    // The last half of a span, where there is one.
    template <int kQueries>
    void add_half(int64_t q, int64_t d, int64_t num_keys) {
        Vec sums[kQueries];
        float* to = sums_ + q * layer_.v_dim + d;
        for (int i = 0; i < kQueries; i++) sums[i] = load(to + i * layer_.v_dim);
        for (int64_t key = 0; key < num_keys; key++) {
            const Vec value = load(values_[key] + d);
            for (int i = 0; i < kQueries; i++) sums[i] += scores_[(q + i) * kTileKeys + key] * value;
        }
        for (int i = 0; i < kQueries; i++) store(to + i * layer_.v_dim, sums[i]);
    }

    template <int kQueries, int kSplits>
    void add_queries(int64_t q, int64_t num_keys) {
        int64_t d = 0;
        for (; d + kSplits * kSpan <= layer_.v_dim; d += kSplits * kSpan) add_part<kQueries, kSplits>(q, d, num_keys);
        for (; d + kSpan <= layer_.v_dim; d += kSpan) add_part<kQueries, 1>(q, d, num_keys);
        if (d < layer_.v_dim) add_half<kQueries>(q, d, num_keys);
    }

    void add_values(int64_t num_keys) {
        int64_t q = 0;
        for (; q + 6 <= num_queries_; q += 6) add_queries<6, 1>(q, num_keys);
        switch (num_queries_ - q) {
            case 5: add_queries<5, 1>(q, num_keys); break;
            case 4: add_queries<4, 1>(q, num_keys); break;
            case 3: add_queries<3, 2>(q, num_keys); break;
            case 2: add_queries<2, 2>(q, num_keys); break;
            case 1: add_queries<1, 4>(q, num_keys); break;
            default: break;
        }
    }

    void finish(int64_t place, int64_t num_tokens) {
        for (int64_t token = 0, q = 0; token < num_tokens; token++) {
            T* heads = (T*)layer_.out + (place + token) * layer_.num_heads * layer_.v_dim;
            for (int64_t h = kv_head_ * group_; h < (kv_head_ + 1) * group_; h++, q++) {
                float mass = mass_[q];
                if (layer_.sinks) mass += std::exp(layer_.sinks[h] - top_[q]);
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
    Tile<T> tile(layer);
    for (int64_t s = 0; s < step.num_segments; s++)
        for (int64_t done = 0; done < step.num_tokens[s]; done += tile.max_tokens())
            for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; kv_head++)
                tile.attend(step.pages + step.first_page[s], step.first[s] + done, step.start[s] + done,
                            least(tile.max_tokens(), step.num_tokens[s] - done), kv_head);
}

}  // namespace

// Sizes of heads that the attention takes are multiples of this.
BATON_API int64_t baton_head_unit() { return kWidth; }

// k_dim and v_dim are multiples of `baton_head_unit()`; every page of a segment up to its last new token is in its table.
BATON_API void baton_attend(bool is_bf16, const Layer* layer, const Segments* step) {
    if (is_bf16)
        attend<bf16>(*layer, *step);
    else
        attend<float>(*layer, *step);
}
