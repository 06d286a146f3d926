// Rows of one KV head in the pages of one segment.
#pragma once

#include "attention_step.h"
#include "prefetch_plan.h"
#include "simd.h"

namespace {

class PageRows {
  public:
    static constexpr int kMaxRestored = 64;  // rows of a call of `restore`

    PageRows() = default;
    PageRows(const AttentionLayer& layer, const int32_t* pages, int64_t kv_head)
        : layer_(&layer),
          pages_(pages),
          kv_head_(kv_head),
          group_offset_(kv_head / layer.group_heads * layer.group_stride),
          first_slot_(kv_head % layer.group_heads * layer.page_size) {}

    // Pointers to `num_rows` rows of keys or values, `stride` apart in a page, as they are stored.
    template <typename E>
    void find(const void* tensor, int64_t stride, int64_t position, int64_t num_rows, const E** rows) const {
        const E* head = (const E*)tensor + group_offset_ + first_slot_ * stride;
        const int32_t* page = pages_ + position / layer_->page_size;
        for (int64_t slot = position % layer_->page_size; num_rows > 0; slot = 0, page++) {
            const E* row = head + *page * layer_->page_stride + slot * stride;
            const int64_t left = layer_->page_size - slot, count = left < num_rows ? left : num_rows;
            for (int64_t i = 0; i < count; i++) rows[i] = row + i * stride;  // one vector of pointers after another
            rows += count, num_rows -= count;
        }
    }

    // Rows of int8 pages times their scales, in `to` [num_rows, dim]; `rows` point to them. Prefetches up to as
    // many of the `num_next` rows after them.
    template <typename T>
    void restore(const void* tensor, int64_t stride, const float* scales, int64_t position, int64_t num_rows,
                 int64_t dim, T* to, const T** rows, int64_t num_next) const {
        const int8_t *stored[kMaxRestored], *next[kMaxRestored];
        find(tensor, stride, position, num_rows, stored);
        find(tensor, stride, position + num_rows, num_next, next);
        for (int64_t i = 0; i < num_rows; i++, position++, to += dim) {
            const int64_t page = pages_[position / layer_->page_size], slot = position % layer_->page_size;
            const float scale = scales[page * layer_->scale_page_stride + kv_head_ * layer_->page_size + slot];
            for (int64_t d = 0; d < dim; d += kWidth) store(to + d, load(stored[i] + d) * scale);
            rows[i] = to;
            for (int64_t d = 0; i < num_next && d < dim; d += 64) prefetch_line(next[i] + d);
        }
    }

  private:
    const AttentionLayer* layer_;
    const int32_t* pages_;
    int64_t kv_head_, group_offset_, first_slot_;  // elements to the head's group, and slots before it there
};

}  // namespace
