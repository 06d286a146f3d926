// Scratch memory of one kernel call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// One per thread and kernel: grows on demand, freed when the thread ends.
class Workspace {
  public:
    void* get(size_t num_bytes) {
        if (num_bytes > size_) {
            memory_.reset(std::aligned_alloc(64, round_up(num_bytes, 64)));
            if (!memory_) std::abort();
            size_ = num_bytes;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};
}  // namespace
