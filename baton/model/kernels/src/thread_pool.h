// Parallel loops on persistent threads. Tasks are claimed one at a time, so that a descheduled thread delays one task and
// not the call. A task's result does not depend on the thread that runs it.
//
// Threads on borrowed cores (core_lease.h) join a call while the cores' owners are idle, and leave after the task at hand
// when an owner computes again.
#pragma once

#include <cstdint>

#include "core_lease.h"

// Threads that may run a call now, the caller included; 1 until `baton_set_threads`.
int64_t num_pool_threads();

// Runs task(context, i) for every i of [0, num_tasks) and returns when all are done. One call at a time: a second,
// concurrent call runs all of its tasks on its own thread.
void pool_run(int64_t num_tasks, void (*task)(void* context, int64_t i), void* context);

// The same, for a function object.
template <typename Task>
inline void parallel_for(int64_t num_tasks, Task&& task) {
    const LeaseScope scope;
    if (num_tasks <= 1 || num_pool_threads() == 1)
        for (int64_t i = 0; i < num_tasks; i++) task(i);
    else
        pool_run(num_tasks, [](void* context, int64_t i) { (*(Task*)context)(i); }, &task);
}

// Calls task(first, last) on [0, num_items) cut into a few equal ranges a thread.
template <typename Task>
inline void parallel_for_ranges(int64_t num_items, Task&& task) {
    constexpr int64_t kRangesPerThread = 8;  // balances threads of unequal speed
    const int64_t num_threads = num_pool_threads(), wanted = num_threads == 1 ? 1 : num_threads * kRangesPerThread;
    const int64_t num_ranges = num_items < wanted ? num_items : wanted;
    parallel_for(num_ranges, [&](int64_t i) { task(num_items * i / num_ranges, num_items * (i + 1) / num_ranges); });
}

// The same, for cheap items: a few of them run on the calling thread.
template <typename Task>
inline void parallel_for_tokens(int64_t num_tokens, Task&& task) {
    constexpr int64_t kMinTokens = 32;
    if (num_tokens < kMinTokens)
        task((int64_t)0, num_tokens);
    else
        parallel_for_ranges(num_tokens, task);
}
