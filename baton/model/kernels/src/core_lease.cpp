// Implements core_lease.h. A slot of 64 bytes a worker has the time of its last call, or `kComputing`. A worker that is
// killed in a call keeps its cores until it joins again; nobody waits for it.
#include "core_lease.h"

#include <time.h>

#include <atomic>
#include <limits>

#include "simd.h"

namespace {

constexpr int64_t kIdleNs = 2'000'000;  // longer than the host's part between two kernels of a step
constexpr int64_t kComputing = std::numeric_limits<int64_t>::max();

struct alignas(64) Slot {
    std::atomic<int64_t> last_call_ns;
};
static_assert(sizeof(Slot) == 64 && std::atomic<int64_t>::is_always_lock_free, "the layout that processes share");

std::atomic<Slot*> slots{nullptr};
std::atomic<Slot*> own_slot{nullptr};
std::atomic<int64_t> num_calls{0};

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void lease_begin() {
    Slot* const own = own_slot.load(std::memory_order_acquire);
    if (own == nullptr) return;
    num_calls++;
    own->last_call_ns.store(kComputing, std::memory_order_relaxed);
}

// A call that began before the lease is not counted; one that ends beside another leaves the slot to that one.
void lease_end() {
    Slot* const own = own_slot.load(std::memory_order_acquire);
    if (own == nullptr || num_calls <= 0 || --num_calls > 0) return;
    own->last_call_ns.store(now_ns(), std::memory_order_relaxed);
}

bool lease_is_idle(uint64_t owners) {
    const Slot* const all = slots.load(std::memory_order_acquire);
    if (all == nullptr) return false;
    int64_t now = 0;
    for (; owners != 0; owners &= owners - 1) {
        const int64_t last = all[__builtin_ctzll(owners)].last_call_ns.load(std::memory_order_relaxed);
        if (last == kComputing) return false;
        if (now == 0) now = now_ns();
        if (now - last < kIdleNs) return false;
    }
    return true;
}

// `memory`: of 64 slots; it stays mapped. `own`: the slot of this worker, whose cores are lent from now on.
BATON_API void baton_join_lease(void* memory, int64_t own) {
    auto* const all = (Slot*)memory;
    all[own].last_call_ns.store(now_ns(), std::memory_order_relaxed);
    num_calls = 0;
    slots.store(all, std::memory_order_release);
    own_slot.store(all + own, std::memory_order_release);
}

// No core is lent or borrowed from now on. The memory is not read again once the present calls have ended.
BATON_API void baton_leave_lease() {
    Slot* const own = own_slot.exchange(nullptr);
    slots.store(nullptr, std::memory_order_release);
    if (own != nullptr) own->last_call_ns.store(kComputing, std::memory_order_relaxed);
}
