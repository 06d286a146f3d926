// Prefetches rows of keys and values while something else is computed.
#pragma once

#include "prefetch_plan.h"

namespace {

// Software prefetch of rows, spread evenly over the steps of a GEMM. The hardware prefetcher cannot predict scattered
// pages, and prefetching all rows at once would stall the computation.
template <typename T>
class Prefetcher {
  public:
    Prefetcher(const T* const* rows, int64_t num_rows, int64_t dim, int64_t num_parts)
        : row_(rows), end_(rows + num_rows), dim_(dim) {
        const int64_t num_lines = num_rows * ((dim + kLine - 1) / kLine);
        lines_per_step_ = (num_lines + num_parts - 1) / num_parts;
    }

    BATON_INLINE void prefetch_step() {
        for (int64_t i = 0; i < lines_per_step_ && row_ != end_; i++) {
            prefetch_line(*row_ + at_);
            at_ += kLine;
            if (at_ >= dim_) at_ = 0, row_++;
        }
    }

  private:
    static constexpr int64_t kLine = 64 / sizeof(T);
    const T *const *row_, *const *end_;
    int64_t dim_, lines_per_step_, at_ = 0;
};

}  // namespace
