// Implements thread_pool.h. After a call workers spin briefly, because a model's next call follows soon, then sleep.
#include "thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpins = 4000;  // some tens of microseconds: a little longer than the gap between two kernels
constexpr int kMaxThreads = 256;

inline void cpu_relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A call is open while `generation_` is odd. A worker counted in `num_active_` may claim tasks, and the caller returns
// only when the count is 0. All atomics are sequentially consistent, so that either the caller sees an active worker or
// that worker sees that the call is closed.
class ThreadPool {
  public:
    int64_t size() const { return 1 + num_workers_.load(std::memory_order_relaxed); }

    // Workers are only added: a smaller size leaves some asleep.
    void resize(int64_t num_threads) {
        std::lock_guard<std::mutex> lock(resize_mutex_);
        const int64_t wanted = num_threads < 1 ? 0 : (num_threads > kMaxThreads ? kMaxThreads : num_threads) - 1;
        try {
            for (; num_started_ < wanted; num_started_++)
                std::thread(&ThreadPool::worker_loop, this, num_started_).detach();
        } catch (const std::system_error&) {  // no more threads can be started
        }
        num_workers_ = wanted < num_started_ ? wanted : num_started_;
    }

    void run(int64_t num_tasks, void (*task)(void*, int64_t), void* context) {
        if (busy_.exchange(true)) {
            for (int64_t i = 0; i < num_tasks; i++) task(context, i);
            return;
        }
        num_tasks_ = num_tasks, task_ = task, context_ = context, next_ = 0;
        generation_++;
        if (num_sleeping_ > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        run_tasks();
        generation_++;
        for (int spins = 0; num_active_ > 0; spins++) spins < kSpins ? cpu_relax() : std::this_thread::yield();
        busy_ = false;
    }

  private:
    bool has_work(int64_t worker, uint64_t seen) const {
        const uint64_t generation = generation_;
        return generation % 2 == 1 && generation != seen && worker < num_workers_;
    }

    void run_tasks() {
        for (int64_t i = next_++; i < num_tasks_; i = next_++) task_(context_, i);
    }

    void worker_loop(int64_t worker) {
        for (uint64_t seen = 0;;) {
            for (int spins = 0; spins < kSpins && !has_work(worker, seen); spins++) cpu_relax();
            if (!has_work(worker, seen)) {
                std::unique_lock<std::mutex> lock(mutex_);
                num_sleeping_++;
                wake_.wait(lock, [&] { return has_work(worker, seen); });
                num_sleeping_--;
            }
            num_active_++;
            seen = generation_;
            if (seen % 2 == 1) run_tasks();
            num_active_--;
        }
    }

    std::atomic<uint64_t> generation_{0};
    std::atomic<int64_t> next_{0}, num_active_{0}, num_sleeping_{0}, num_workers_{0};
    std::atomic<bool> busy_{false};
    int64_t num_tasks_ = 0;
    void (*task_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    std::mutex mutex_, resize_mutex_;
    std::condition_variable wake_;
    int64_t num_started_ = 0;
};

// Never destroyed: workers run until the process ends.
ThreadPool& pool() {
    static ThreadPool* const instance = new ThreadPool;
    return *instance;
}

}  // namespace

int64_t num_pool_threads() { return pool().size(); }

void pool_run(int64_t num_tasks, void (*task)(void* context, int64_t i), void* context) {
    pool().run(num_tasks, task, context);
}

BATON_API void baton_set_threads(int64_t num_threads) { pool().resize(num_threads); }
