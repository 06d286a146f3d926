// The threads of team.h. Helpers spin for a moment after a call, since a model's next one comes soon, and sleep then.
#include "team.h"

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

constexpr int kSpins = 4000;  // some tens of microseconds: a little more than lies between two products
constexpr int kMaxThreads = 256;

inline void breathe() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A call is open while `round` is odd. Whoever is `inside` may claim parts of it, and the caller waits until nobody is
// before it returns; all orders are sequentially consistent, so that either the caller sees who is inside, or that one
// sees that the call is closed.
class Team {
  public:
    int64_t size() const { return 1 + num_helpers_.load(std::memory_order_relaxed); }

    // Helpers are only ever added: fewer threads leave some asleep.
    void resize(int64_t num_threads) {
        std::lock_guard<std::mutex> one_at_a_time(resizing_);
        const int64_t wanted = num_threads < 1 ? 0 : (num_threads > kMaxThreads ? kMaxThreads : num_threads) - 1;
        try {
            for (; num_started_ < wanted; num_started_++) std::thread(&Team::help, this, num_started_).detach();
        } catch (const std::system_error&) {  // the machine lets us have no more
        }
        num_helpers_ = wanted < num_started_ ? wanted : num_started_;
    }

    void run(int64_t num_parts, void (*part)(void*, int64_t), void* work) {
        if (busy_.exchange(true)) {
            for (int64_t i = 0; i < num_parts; i++) part(work, i);
            return;
        }
        num_parts_ = num_parts, part_ = part, work_ = work, next_ = 0;
        round_++;
        if (num_asleep_ > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        claim();
        round_++;
        for (int spins = 0; inside_ > 0; spins++) spins < kSpins ? breathe() : std::this_thread::yield();
        busy_ = false;
    }

  private:
    bool is_called(int64_t helper, uint64_t seen) const {
        const uint64_t round = round_;
        return round % 2 == 1 && round != seen && helper < num_helpers_;
    }

    void claim() {
        for (int64_t i = next_++; i < num_parts_; i = next_++) part_(work_, i);
    }

    void help(int64_t helper) {
        for (uint64_t seen = 0;;) {
            for (int spins = 0; spins < kSpins && !is_called(helper, seen); spins++) breathe();
            if (!is_called(helper, seen)) {
                std::unique_lock<std::mutex> lock(mutex_);
                num_asleep_++;
                wake_.wait(lock, [&] { return is_called(helper, seen); });
                num_asleep_--;
            }
            inside_++;
            seen = round_;
            if (seen % 2 == 1) claim();
            inside_--;
        }
    }

    std::atomic<uint64_t> round_{0};
    std::atomic<int64_t> next_{0}, inside_{0}, num_asleep_{0}, num_helpers_{0};
    std::atomic<bool> busy_{false};
    int64_t num_parts_ = 0;
    void (*part_)(void*, int64_t) = nullptr;
    void* work_ = nullptr;
    std::mutex mutex_, resizing_;
    std::condition_variable wake_;
    int64_t num_started_ = 0;
};

// Never destroyed: helpers run until the process ends.
Team& team() {
    static Team* const one = new Team;
    return *one;
}

}  // namespace

int64_t team_size() { return team().size(); }

void team_run(int64_t num_parts, void (*part)(void* work, int64_t i), void* work) { team().run(num_parts, part, work); }

BATON_API void baton_set_threads(int64_t num_threads) { team().resize(num_threads); }
