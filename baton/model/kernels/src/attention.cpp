// Attention over pages, for decode rows and prompt chunks alike, in any mixture: causal, or with blocks whose tokens
// see all of their block, or with trees of drafts whose tokens see their path.
//
// The unit of work is a tile: the query heads that share one KV head, of one or more adjacent tokens of one segment.
// A tile reads each of its keys and values once for all its queries, kTileKeys at a time, and keeps the running maximum
// and sum of every query's softmax (online_softmax.h: arXiv:1805.02867, arXiv:2205.14135). Sums are float.
// A tile of very few queries multiplies keys and values where they are in the page (small_m.h), one of a few transposes
// them in registers (register_gemm.h). A tile of many packs them first and then runs a register-blocked GEMM
// (packed_gemm.h), with the same bits. Where the CPU has dot products of bfloat16 pairs, softmax weights are rounded to
// bfloat16 for them. Keys and values of int8 pages become numbers of the query's type as they are found, a tile at a
// time.
// Called through `baton/model/attention/native_backend.py`, which has checked shapes, types and strides.
#include <algorithm>
#include <cmath>

#include "attention_step.h"
#include "attention_tiles.h"
#include "online_softmax.h"
#include "packed_gemm.h"
#include "page_rows.h"
#include "prefetcher.h"
#include "register_gemm.h"
#include "small_m.h"
#include "thread_pool.h"
#include "workspace.h"

namespace {

constexpr int kTileKeys = 64;
static_assert(kTileKeys <= PageRows::kMaxRestored);
constexpr int kMaxRowTokens = 16;     // longest segment that is a row: its tokens get the bits that each gets alone
constexpr int kMaxTileQueries = 256;  // of a prompt chunk: queries and sums then stay in the second cache
constexpr int kBlockQueries = 24;     // of such a tile: scores then stay in the first cache; a multiple of kMr

BATON_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
BATON_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

thread_local Workspace workspace;

template <typename T>
class Tile {
  public:
    explicit Tile(const AttentionLayer& layer)
        : layer_(layer),
          group_(layer.num_heads / layer.num_kv_heads),
          max_tokens_(max_of(1, kMaxTileQueries / group_)),
          num_k_steps_(layer.k_dim / W::kElements),
          scale_{layer.softcap > 0.0f ? layer.scale / layer.softcap : layer.scale * kLog2E, layer.softcap} {
        const int64_t n = max_tokens_ * group_;
        const int64_t num_packed_values = W::kIsPacked ? 0 : kTileKeys / W::kElements * layer.v_dim;
        const int64_t num_packed_keys = kTileKeys * round_up(num_k_steps_, kWidth);
        const int64_t num_query_floats = n * (num_k_steps_ + layer.v_dim + kTileKeys + kWidth + 1);
        const int64_t num_restored = layer.key_scales ? kTileKeys * (layer.k_dim + layer.v_dim) : 0;
        const int64_t num_floats = num_query_floats + num_packed_keys + num_packed_values + num_restored;
        char* at = (char*)workspace.get(num_floats * 4 + 1024);
        const auto carve = [&at](int64_t num_floats) {
            float* buffer = (float*)at;
            at += round_up(num_floats * 4, 64);
            return buffer;
        };
        query_ = carve(n * num_k_steps_);
        sums_ = carve(n * layer.v_dim);
        scores_ = carve(n * kTileKeys);
        row_sums_ = carve(n * kWidth);
        row_max_ = carve(n);
        packed_keys_ = carve(num_packed_keys);
        packed_values_ = carve(num_packed_values);
        restored_ = (T*)carve(num_restored);
    }

    int64_t max_tokens() const { return max_tokens_; }

    // Attention of `num_tokens` tokens for one KV head: flat from `token_offset`, at positions from `position`. `ends`:
    // one past the last key that each of them sees; null: its own.
    // The tokens of a row get the bits that each gets alone, and those of a chunk the bits that they get in tiles of any
    // size: neither the path nor the edges of key tiles depend on how many there are.
    void attend(const int32_t* pages, const int64_t* ends, int64_t token_offset, int64_t position, int64_t num_tokens,
                int64_t kv_head, bool is_row) {
        begin(pages, ends, token_offset, position, num_tokens, kv_head, is_row);
        int64_t end = position + num_tokens;
        if (ends)
            for (int64_t token = 0; token < num_tokens; token++) end = max_of(end, ends[token]);
        const int64_t oldest = layer_.window == kNoWindow ? 0 : max_of(0, position + 1 - layer_.window);
        const int64_t step = tile_step();
        const int64_t first = oldest / step * step;
        for (int64_t key = first; key < end; key += step) {
            const int64_t num_keys = min_of(step, end - key), num_next = min_of(step, end - key - num_keys);
            const int64_t num_unseen = max_of(0, oldest - key);  // left of every window: slots that are not read
            num_next_keys_ = layer_.key_scales ? 0 : num_next;
            find_tile(key + num_unseen, num_keys - num_unseen, num_unseen, num_next);
            for (int64_t i = 0; i < num_unseen; i++) keys_[i] = keys_[num_unseen], values_[i] = values_[num_unseen];
            rows_.find(layer_.keys, layer_.key_slot_stride, key + num_keys, num_next_keys_, next_keys_);
            add_tile(key, num_keys, key == first);
        }
        store_outputs(token_offset, num_tokens);
    }

    // The same for tokens of a tree, without a window. All tokens share the key tiles that lie before the tree. Behind
    // them each token has tiles of its own, in which its path lies in the order of positions, where a plain step has it:
    // so a token has the bits that it gets alone.
    void attend_tree(const int32_t* pages, const Tree& tree, int64_t token_offset, int64_t num_tokens,
                     int64_t kv_head) {
        begin(pages, nullptr, token_offset, tree.start, num_tokens, kv_head, true);
        const int64_t step = tile_step(), num_shared = tree.start / step * step;
        for (int64_t key = 0; key < num_shared; key += step) {
            const int64_t num_next = key + step == num_shared ? 0 : step;
            num_next_keys_ = layer_.key_scales ? 0 : num_next;
            find_tile(key, step, 0, num_next);
            rows_.find(layer_.keys, layer_.key_slot_stride, key + step, num_next_keys_, next_keys_);
            add_tile(key, step, key == 0);
        }
        num_next_keys_ = 0, num_queries_ = group_;
        for (int64_t token = 0; token < num_tokens; token++) {
            int64_t path[kMaxRowTokens], depth = 0;
            for (int64_t at = tree.first_token + token; at >= 0; at = tree.parents[at]) path[depth++] = at;
            std::reverse(path, path + depth);
            const int64_t end = tree.start + depth;
            position_ = end - 1;
            for (int64_t key = num_shared; key < end; key += step) {
                const int64_t num_keys = min_of(step, end - key);
                const int64_t num_before = max_of(0, min_of(num_keys, tree.start - key));
                if (num_before) find_tile(key, num_before, 0, 0);
                for (int64_t i = num_before; i < num_keys; i++)
                    find_tile(tree.start + path[key + i - tree.start], 1, i, 0);
                add_tile(key, num_keys, key == 0);
            }
            advance(1);
        }
        advance(-num_tokens);
        store_outputs(token_offset, num_tokens);
    }

  private:
    using W = Packing<T>;
    const AttentionLayer& layer_;
    const int64_t group_, max_tokens_, num_k_steps_;
    const ScoreScale scale_;
    PageRows rows_;
    const int64_t* ends_;
    int64_t position_, num_queries_, kv_head_;
    bool is_small_m_;  // keys and values are multiplied in place; else they are transposed in registers or packed
    float *query_, *sums_, *scores_;       // [queries, num_k_steps_], [queries, v_dim], [queries, kTileKeys]
    float *row_sums_, *row_max_;           // [queries, kWidth], [queries]: running softmax sum and maximum
    float *packed_keys_, *packed_values_;  // [padded k steps, kTileKeys], [kTileKeys / W::kElements, v_dim]
    T* restored_;  // [kTileKeys, k_dim] and [kTileKeys, v_dim] of int8 pages
    const T *keys_[kTileKeys], *values_[kTileKeys];
    const T *next_keys_[kTileKeys], *next_values_[kTileKeys];  // of the next tile; values: where this one is packed
    int64_t num_next_keys_;

    void begin(const int32_t* pages, const int64_t* ends, int64_t token_offset, int64_t position, int64_t num_tokens,
               int64_t kv_head, bool is_row) {
        position_ = position, num_queries_ = num_tokens * group_, kv_head_ = kv_head, ends_ = ends;
        is_small_m_ = is_row && group_ <= W::kMaxSmallM;
        rows_ = PageRows(layer_, pages, kv_head);
        prepare(token_offset, num_tokens);
    }

    // Keys of a tile. Few queries do little work per key, so the tile's keys and values must stay in the L1 cache.
    int64_t tile_step() const {
        const bool fits_cache = !is_small_m_ || layer_.k_dim * (int64_t)sizeof(T) <= 256;
        return fits_cache ? kTileKeys : kTileKeys / 2;
    }

    // Makes the queries `num_tokens` further on the first ones.
    void advance(int64_t num_tokens) {
        const int64_t n = num_tokens * group_;
        query_ += n * num_k_steps_, sums_ += n * layer_.v_dim;
        row_sums_ += n * kWidth, row_max_ += n;
    }

    void prepare(int64_t token_offset, int64_t num_tokens) {
        for (int64_t token = 0, q = 0; token < num_tokens; token++) {
            const T* heads = (const T*)layer_.query + (token_offset + token) * layer_.query_token_stride;
            for (int64_t h = kv_head_ * group_; h < (kv_head_ + 1) * group_; h++, q++) {
                const T* from = heads + h * layer_.query_head_stride;
                float* to = query_ + q * num_k_steps_;
                if (is_small_m_)
                    Dot<T>::prepare(from, layer_.k_dim, (typename Dot<T>::Prepared*)to);
                else
                    W::copy(from, layer_.k_dim, to);
            }
        }
        if (is_small_m_) std::memset(sums_, 0, num_queries_ * layer_.v_dim * sizeof(float));
        std::memset(row_sums_, 0, num_queries_ * kWidth * sizeof(float));
        for (int64_t q = 0; q < num_queries_; q++) row_max_[q] = -INFINITY;
    }

    // Pointers to this KV head's keys and values at `num_rows` places from `position`, from row `first` of the tile on.
    // `num_next`: rows after them that the next tile reads.
    void find_tile(int64_t position, int64_t num_rows, int64_t first, int64_t num_next) {
        const T **keys = keys_ + first, **values = values_ + first;
        if (layer_.key_scales) {
            T* restored_keys = restored_ + first * layer_.k_dim;
            T* restored_values = restored_ + kTileKeys * layer_.k_dim + first * layer_.v_dim;
            rows_.restore(layer_.keys, layer_.key_slot_stride, layer_.key_scales, position, num_rows, layer_.k_dim,
                          restored_keys, keys, num_next);
            rows_.restore(layer_.values, layer_.value_slot_stride, layer_.value_scales, position, num_rows,
                          layer_.v_dim, restored_values, values, num_next);
            return;
        }
        rows_.find(layer_.keys, layer_.key_slot_stride, position, num_rows, keys);
        rows_.find(layer_.values, layer_.value_slot_stride, position, num_rows, values);
    }

    static void prefetch_rows(const T* const* rows, int64_t first, int64_t last, int64_t dim) {
        for (int64_t i = first; i < last; i++)
            for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(T)) prefetch_line(rows[i] + d);
    }

    // The part of the next tile that falls to queries [q, last) of this one.
    void prefetch_next(const T* const* rows, int64_t dim, int64_t q, int64_t last) const {
        prefetch_rows(rows, q * num_next_keys_ / num_queries_, last * num_next_keys_ / num_queries_, dim);
    }

    // Adds a tile, `num_keys` keys from `key` on, to the softmax and the sums of all queries.
    void add_tile(int64_t key, int64_t num_keys, bool is_first) {
        const int64_t padded = round_up(num_keys, kWidth);
        for (int64_t i = num_keys; i < padded; i++) keys_[i] = keys_[num_keys - 1];
        if (!is_small_m_ && !fits_registers<T>(num_queries_, layer_.k_dim)) {
            add_packed_tile(key, num_keys, is_first);
            return;
        }
        score(num_keys, padded);
        softmax(key, num_keys, 0, num_queries_);
        add_values(num_keys, is_first);
    }

    // Queries go in blocks: scores stay in the L1 cache, and the CPU begins a block's softmax while it ends products.
    void add_packed_tile(int64_t key, int64_t num_keys, bool is_first) {
        for (int64_t i = 0; i < num_keys; i += kWidth)
            pack_transposed(keys_ + i, layer_.k_dim, packed_keys_ + i, kTileKeys);
        pack_values(num_keys);
        rows_.find(layer_.values, layer_.value_slot_stride, key + num_keys, num_next_keys_, next_values_);
        const auto row_of = [this](int64_t k) { return packed_keys_ + k * kTileKeys; };
        for (int64_t q = 0, n; q < num_queries_; q += n) {
            n = num_queries_ - q < 2 * kBlockQueries ? num_queries_ - q : kBlockQueries;
            prefetch_next(next_keys_, layer_.k_dim, q, q + n);
            const AOperand queries{query_ + q * num_k_steps_, num_k_steps_, num_k_steps_};
            gemm<T>(queries, n, row_of, round_up(num_keys, kNr), {scores_, kTileKeys, true});
            softmax(key, num_keys, q, q + n);
            prefetch_next(next_values_, layer_.v_dim, q, q + n);
            add_packed_values(num_keys, q, n, is_first);
        }
    }

    // Scores past `num_keys` are garbage; `softmax` masks them.
    void score(int64_t num_keys, int64_t padded) {
        if (is_small_m_) {
            const auto prefetch_values = [this, num_keys](int64_t key) {
                prefetch_rows(values_, key, min_of(key + kWidth, num_keys), layer_.v_dim);
            };
            small_m_scores(small_m(), num_queries_, keys_, num_keys, layer_.k_dim, prefetch_values);
            return;
        }
        Prefetcher<T> prefetcher(values_, num_keys, layer_.v_dim, num_column_blocks(padded, num_k_steps_));
        with_constant(num_queries_, [&](auto count) {
            register_scores<T, count>({query_, num_k_steps_, num_k_steps_}, keys_, padded, layer_.k_dim,
                                      {scores_, kTileKeys, true}, [&prefetcher] { prefetcher.prefetch_step(); });
        });
    }

    SmallMQueries small_m() const { return {query_, num_k_steps_, scores_, kTileKeys}; }

    // The scores of queries [q, last), the first ones of `scores_`, become weights.
    void softmax(int64_t key, int64_t num_keys, int64_t q, int64_t last) {
        float* row = scores_;
        for (int64_t token = q / group_; q < last; token++) {
            const int64_t position = position_ + token;
            const int64_t visible_end = ends_ ? ends_[token] : position + 1;
            const int64_t end = max_of(0, min_of(num_keys, visible_end - key));
            const int64_t oldest = layer_.window == kNoWindow ? 0 : position + 1 - layer_.window;
            const int64_t begin = min_of(end, max_of(0, oldest - key));
            for (const int64_t next = min_of(last, (token + 1) * group_); q < next; q++, row += kTileKeys) {
                if (is_small_m_) prefetch_next(next_keys_, layer_.k_dim, q, q + 1);
                if (begin == end)
                    std::memset(row, 0, kTileKeys * sizeof(float));
                else if (num_keys <= kTileKeys / 2)
                    softmax_row<kTileKeys / 2 / kWidth>(row, begin, end, q);
                else
                    softmax_row<kTileKeys / kWidth>(row, begin, end, q);
            }
        }
    }

    template <int kVecs>
    BATON_INLINE void softmax_row(float* row, int64_t begin, int64_t end, int64_t q) {
        Vec weights[kVecs];
        for (int v = 0; v < kVecs; v++) weights[v] = load(row + v * kWidth);
        const RunningSoftmax so_far{sums_ + q * layer_.v_dim, layer_.v_dim, row_sums_ + q * kWidth, row_max_ + q};
        weigh<W::kExp2Terms, kVecs>(weights, begin, end, scale_, so_far);
        if (is_small_m_)
            for (int v = 0; v < kVecs; v++) store(row + v * kWidth, weights[v]);
        else
            for (int v = 0; v < kVecs; v++) W::store_weights(row, v * kWidth, weights[v]);
    }

    // ---- sums of values, split as `load_split` gives them

    void add_values(int64_t num_keys, bool is_first) {
        const int64_t dim = layer_.v_dim;
        if (is_small_m_) {
            small_m_add_values(small_m(), num_queries_, values_, num_keys, {sums_, dim});
            return;
        }
        if constexpr (!W::kIsPacked) {
            if (fits_registers<T>(num_queries_, dim)) {
                const AOperand weights{scores_, kTileKeys, num_value_steps(num_keys)};
                Prefetcher<T> prefetcher(next_keys_, num_next_keys_, layer_.k_dim, dim / kSpan * weights.num_steps);
                with_constant(num_queries_, [&](auto count) {
                    register_add_values<T, count>(weights, values_, num_keys, dim, {sums_, dim, is_first},
                                                  [&prefetcher] { prefetcher.prefetch_step(); });
                });
                return;
            }
        }
        prefetch_next(next_keys_, layer_.k_dim, 0, num_queries_);
        pack_values(num_keys);
        add_packed_values(num_keys, 0, num_queries_, is_first);
    }

    static int64_t num_value_steps(int64_t num_keys) { return (num_keys + W::kElements - 1) / W::kElements; }

    void pack_values(int64_t num_keys) {
        if constexpr (!W::kIsPacked) {
            for (int64_t k = 0; k < num_value_steps(num_keys); k++) {
                const int64_t key = k * W::kElements, next = min_of(key + W::kElements, num_keys) - 1;
                W::pack_values(values_[key], values_[next], layer_.v_dim, packed_values_ + k * layer_.v_dim);
            }
        }
    }

    void add_packed_values(int64_t num_keys, int64_t q, int64_t n, bool is_first) {
        const int64_t dim = layer_.v_dim;
        const auto row_of = [this, dim](int64_t k) {
            if constexpr (W::kIsPacked)
                return values_[k];
            else
                return packed_values_ + k * dim;
        };
        const AOperand weights{scores_, kTileKeys, num_value_steps(num_keys)};
        gemm<T>(weights, n, row_of, dim, {sums_ + q * dim, dim, is_first});
    }

    void store_outputs(int64_t token_offset, int64_t num_tokens) {
        for (int64_t token = 0, q = 0; token < num_tokens; token++) {
            T* heads = (T*)layer_.out + (token_offset + token) * layer_.num_heads * layer_.v_dim;
            for (int64_t h = kv_head_ * group_; h < (kv_head_ + 1) * group_; h++, q++) {
                float row_sum = reduce_add(load(row_sums_ + q * kWidth));
                if (layer_.sinks) row_sum += std::exp2(layer_.sinks[h] * kLog2E - row_max_[q]);
                const float inverse = 1.0f / row_sum;
                const float* sum = sums_ + q * layer_.v_dim;
                T* to = heads + h * layer_.v_dim;
                int64_t i = 0;
                for (; i + kSpan <= layer_.v_dim; i += kSpan)
                    store_split(to + i, {load(sum + i) * inverse, load(sum + i + kWidth) * inverse});
                if (i < layer_.v_dim) store(to + i, load(sum + i) * inverse);
            }
        }
    }
};

template <typename T>
void attend(const AttentionLayer& layer, const Segments& step) {
    const TilePlan tiles(layer, step, Tile<T>(layer).max_tokens(), num_pool_threads());
    parallel_for_ranges(tiles.size(), [&](int64_t first, int64_t last) {
        Tile<T> tile(layer);
        for (int64_t i = first; i < last; i++) {
            const auto [s, kv_head, first_token, num_tokens] = tiles[i];
            const int32_t* pages = step.pages + step.first_page[s];
            const int64_t offset = step.offset[s] + first_token;
            const int64_t* parents = step.parents ? step.parents + step.offset[s] : nullptr;
            if (parents && parents[0] < 0) {
                tile.attend_tree(pages, {parents, step.start[s], first_token}, offset, num_tokens, kv_head);
                continue;
            }
            tile.attend(pages, step.visible_ends ? step.visible_ends + offset : nullptr, offset,
                        step.start[s] + first_token, num_tokens, kv_head, step.num_tokens[s] <= kMaxRowTokens);
        }
    });
}

}  // namespace

// Head sizes must be multiples of this.
BATON_API int64_t baton_head_dim_multiple() { return kWidth; }

// k_dim and v_dim are multiples of `baton_head_dim_multiple()`. A segment's table holds every page up to its last new
// token. A tree has at most `kMaxRowTokens` tokens, and a layer without a window.
BATON_API void baton_attend(bool is_bf16, const AttentionLayer* layer, const Segments* step) {
    if (is_bf16)
        attend<bf16>(*layer, *step);
    else
        attend<float>(*layer, *step);
}
