// A call's work, split among threads that stay. Parts are claimed one by one, so that a thread whose core the machine
// gives to somebody else holds up one part and not the call; what a part computes does not depend on who computes it.
#pragma once

#include <cstdint>

// Threads that work on a call, its own included; 1 until `baton_set_threads`.
int64_t team_size();

// part(work, i) for every i of [0, num_parts), on some thread each; all are done when it returns. One call at a time:
// who calls while another call runs does all of it alone.
void team_run(int64_t num_parts, void (*part)(void* work, int64_t i), void* work);

// The same for a function object.
template <typename Part>
inline void for_parts(int64_t num_parts, Part&& part) {
    if (num_parts <= 1 || team_size() == 1)
        for (int64_t i = 0; i < num_parts; i++) part(i);
    else
        team_run(num_parts, [](void* work, int64_t i) { (*(Part*)work)(i); }, &part);
}

// first and last of `num_items` in a few equal runs a thread: part(first, last).
template <typename Part>
inline void for_runs(int64_t num_items, Part&& part) {
    constexpr int64_t kRunsPerThread = 8;  // so that threads that are not equally fast end together
    const int64_t wanted = team_size() == 1 ? 1 : team_size() * kRunsPerThread;
    const int64_t runs = num_items < wanted ? num_items : wanted;
    for_parts(runs, [&](int64_t i) { part(num_items * i / runs, num_items * (i + 1) / runs); });
}

// The same for tokens of which each takes little; few of them are not worth the asking.
template <typename Part>
inline void for_tokens(int64_t num_tokens, Part&& part) {
    constexpr int64_t kFewTokens = 32;
    if (num_tokens < kFewTokens)
        part((int64_t)0, num_tokens);
    else
        for_runs(num_tokens, part);
}
