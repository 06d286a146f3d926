// Implements thread_pool.h. After a call workers spin briefly, because a model's next call follows soon, then sleep.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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
constexpr int64_t kMaxThreads = 256;
constexpr int64_t kLookNs = 100'000;
constexpr std::chrono::milliseconds kAsleep{1};
constexpr int64_t kTimePerWait = 8;  // a borrowed thread waits for its core an eighth of the time
constexpr int64_t kMaxPauseNs = 2'000'000'000;  // a process may have been stopped, or have waited for memory
constexpr int64_t kDebtNs = 8 * 2'000'000;      // two milliseconds: an event loop has the core for less

inline void cpu_relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Binds a thread, 0 for the calling one, to one core. False if this process may not use it.
bool bind_to(int64_t core, pid_t thread = 0) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return sched_setaffinity(thread, sizeof(cores), &cores) == 0;
}

int64_t clock_ns(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// `allowed`: it may join the open call. All else is of a thread on a borrowed core, and written before the pool counts it
// unless atomic.
struct Worker {
    std::condition_variable wake;
    std::atomic<bool> sleeping{false}, allowed{false};

    int64_t core = -1;
    pid_t thread = 0;
    clockid_t cpu_clock = 0;
    std::atomic<uint64_t> owners{0};
    std::atomic<int64_t> paid_ns{0};
    std::atomic<bool> active{false}, moved{false};
    int64_t began_ns = 0, began_cpu_ns = 0;  // of its part of a call, by the thread
    int64_t seen_cpu_ns = 0;                 // by the caller that waits

    // No owner computes, and the core was not found busy lately.
    bool may_borrow() const {
        return lease_is_idle(owners) && clock_ns(CLOCK_MONOTONIC) + kDebtNs >= paid_ns.load(std::memory_order_relaxed);
    }

    // Gives the thread the caller's core. It binds itself back when it is done; if it already is, the caller does.
    void move_to(int64_t caller_core) {
        moved = true;
        bind_to(caller_core, thread);
        moved = true;
        if (!active && moved.exchange(false)) bind_to(core, thread);
    }

    void move_back() {
        if (moved.exchange(false)) bind_to(core);
    }
};

// A call is open while `generation_` is odd. A worker counted in `num_active_` may claim tasks, and the caller returns
// only when the count is 0. All atomics are sequentially consistent, so that either the caller sees an active worker or
// that worker sees that the call is closed.
class ThreadPool {
  public:
    int64_t size() {
        int64_t available = 1 + num_own_.load(std::memory_order_relaxed);
        for (int64_t i = 0, count = num_borrowed_; i < count; i++) {
            const bool idle = borrowed_[i].may_borrow();
            borrowed_[i].allowed.store(idle, std::memory_order_relaxed);
            available += idle;
        }
        return available;
    }

    // Workers are only added: a smaller size leaves some asleep.
    void resize(int64_t num_threads) {
        std::lock_guard<std::mutex> lock(resize_mutex_);
        const int64_t wanted = num_threads < 1 ? 0 : (num_threads > kMaxThreads ? kMaxThreads : num_threads) - 1;
        while (num_started_ < wanted && start(own_[num_started_])) num_started_++;
        for (int64_t i = 0; i < num_started_; i++) own_[i].allowed = i < wanted;
        num_own_ = wanted < num_started_ ? wanted : num_started_;
    }

    // Adds a worker on another worker's core, or changes its owners. False if there can be none.
    bool borrow(int64_t core, uint64_t owners) {
        std::lock_guard<std::mutex> lock(resize_mutex_);
        for (int64_t i = 0; i < num_borrowed_; i++) {
            if (borrowed_[i].core != core) continue;
            borrowed_[i].owners = owners;
            return true;
        }
        if (num_borrowed_ == kMaxThreads || core < 0 || core >= CPU_SETSIZE) return false;
        Worker& worker = borrowed_[num_borrowed_];
        worker.core = core, worker.owners = owners;
        std::atomic<int> bound{-1};
        worker_bound_ = &bound;
        if (!start(worker)) return false;
        while (bound < 0) std::this_thread::yield();
        if (bound == 1) num_borrowed_++;
        return bound == 1;
    }

    int64_t borrowed_ns() const { return borrowed_ns_; }
    int64_t borrow_wait_ns() const { return borrow_wait_ns_; }

    void run(int64_t num_tasks, void (*task)(void*, int64_t), void* context) {
        if (busy_.exchange(true)) {
            for (int64_t i = 0; i < num_tasks; i++) task(context, i);
            return;
        }
        num_tasks_ = num_tasks, task_ = task, context_ = context, next_ = 0;
        generation_++;
        wake(own_, num_own_);
        wake(borrowed_, num_borrowed_);
        run_tasks();
        generation_++;
        wait_for_workers();
        busy_ = false;
    }

  private:
    bool start(Worker& worker) {
        try {
            std::thread(&ThreadPool::worker_loop, this, std::ref(worker)).detach();
        } catch (const std::system_error&) {  // no more threads can be started
            return false;
        }
        return true;
    }

    void wake(Worker* workers, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            if (!workers[i].allowed || !workers[i].sleeping) continue;
            std::lock_guard<std::mutex> lock(mutex_);
            workers[i].wake.notify_one();
        }
    }

    bool has_work(const Worker& worker, uint64_t seen) const {
        const uint64_t generation = generation_;
        return generation % 2 == 1 && generation != seen && worker.allowed;
    }

    void run_tasks() {
        for (int64_t i = next_++; i < num_tasks_; i = next_++) task_(context_, i);
    }

    // Returns when no worker has a task. A thread on a borrowed core may have lost it in the middle of one, to its owner or to
    // any program, and the kernel may keep it waiting for tens of milliseconds: with groups of processes its group has next
    // to no share of a core that it seldom uses. So such a thread gets the core of the caller, who sleeps meanwhile.
    void wait_for_workers() {
        int64_t looked_ns = 0;  // looks go by time: a yield may last a time slice of whoever shares the caller's core
        bool fetched = false;
        for (int spins = 0; num_active_ > 0; spins++) {
            if (spins < kSpins) {
                cpu_relax();
                continue;
            }
            const int64_t now = num_borrowed_ > 0 ? clock_ns(CLOCK_MONOTONIC) : looked_ns;
            if (now - looked_ns >= kLookNs) fetched |= fetch_waiting(looked_ns, now);
            fetched ? wait_asleep() : std::this_thread::yield();
        }
    }

    // Moves the threads that had their core for less than half of the time since the last look to this one. False if there
    // is none. `looked_ns`: when that was; 0 before the first look, which moves none.
    bool fetch_waiting(int64_t& looked_ns, int64_t now) {
        const int64_t core = sched_getcpu();
        bool any = false;
        for (int64_t i = 0, count = num_borrowed_; i < count; i++) {
            Worker& worker = borrowed_[i];
            const int64_t cpu = clock_ns(worker.cpu_clock), had = cpu - worker.seen_cpu_ns;
            worker.seen_cpu_ns = cpu;
            if (looked_ns == 0 || !worker.active || 2 * had >= now - looked_ns) continue;
            worker.move_to(core);
            any = true;
        }
        looked_ns = now;
        return any;
    }

    // Not for ever: another thread may lose its core, too.
    void wait_asleep() {
        std::unique_lock<std::mutex> lock(mutex_);
        caller_sleeps_ = true;
        finished_.wait_for(lock, kAsleep, [&] { return num_active_ == 0; });
        caller_sleeps_ = false;
    }

    // The caller waits for the task at hand. Threads that have no slot (event loops, a router, other programs) may take the
    // core in the middle of it, and in each of the hundreds of calls of a step. So what a part of a call lacked is owed, by a
    // multiple: `paid_ns` is when it is paid, since time pays, and the core is left alone while more is owed than a little.
    // So waits are a bounded share of the time, and a timer tick or an event costs no pause, which would be as long as a call.
    void run_borrowed_tasks(Worker& worker) {
        while (lease_is_idle(worker.owners)) {
            const int64_t i = next_++;
            if (i >= num_tasks_) break;
            task_(context_, i);
        }
        const int64_t had = clock_ns(CLOCK_THREAD_CPUTIME_ID) - worker.began_cpu_ns, now = clock_ns(CLOCK_MONOTONIC);
        const int64_t lacked = std::max(now - worker.began_ns - had, (int64_t)0);
        borrowed_ns_ += had;
        borrow_wait_ns_ += lacked;
        const int64_t paid = std::max(worker.paid_ns.load(std::memory_order_relaxed), worker.began_ns);
        worker.paid_ns.store(std::min(paid + kTimePerWait * lacked, now + kMaxPauseNs), std::memory_order_relaxed);
    }

    void leave() {
        if (--num_active_ > 0 || !caller_sleeps_) return;
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_one();
    }

    void worker_loop(Worker& worker) {
        if (worker.core >= 0) {
            worker.thread = gettid();
            const bool bound =
                pthread_getcpuclockid(pthread_self(), &worker.cpu_clock) == 0 && bind_to(worker.core);
            worker_bound_.load()->store(bound);
            if (!bound) return;
        }
        for (uint64_t seen = 0;;) {
            for (int spins = 0; spins < kSpins && !has_work(worker, seen); spins++) cpu_relax();
            if (!has_work(worker, seen)) {
                std::unique_lock<std::mutex> lock(mutex_);
                worker.sleeping = true;
                worker.wake.wait(lock, [&] { return has_work(worker, seen); });
                worker.sleeping = false;
            }
            worker.move_back();
            if (worker.core >= 0)
                worker.began_cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID), worker.began_ns = clock_ns(CLOCK_MONOTONIC);
            worker.active = true;
            num_active_++;
            seen = generation_;
            if (seen % 2 == 1) worker.core >= 0 ? run_borrowed_tasks(worker) : run_tasks();
            leave();
            worker.active = false;
            worker.move_back();
        }
    }

    std::atomic<uint64_t> generation_{0};
    std::atomic<int64_t> next_{0}, num_active_{0}, num_own_{0}, num_borrowed_{0}, borrowed_ns_{0}, borrow_wait_ns_{0};
    std::atomic<bool> busy_{false}, caller_sleeps_{false};
    int64_t num_tasks_ = 0;
    void (*task_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    std::mutex mutex_, resize_mutex_;
    std::condition_variable finished_;
    Worker own_[kMaxThreads], borrowed_[kMaxThreads];
    int64_t num_started_ = 0;
    std::atomic<std::atomic<int>*> worker_bound_{nullptr};
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

// Adds a thread on `core`, which joins calls while no worker of `owners` computes. False if this process may not use it.
BATON_API bool baton_borrow_core(int64_t core, uint64_t owners) { return pool().borrow(core, owners); }

// CPU time of calls on borrowed cores so far, in nanoseconds.
BATON_API int64_t baton_borrowed_ns() { return pool().borrowed_ns(); }

// Time for which threads in such calls lacked their core so far, in nanoseconds.
BATON_API int64_t baton_borrow_wait_ns() { return pool().borrow_wait_ns(); }
