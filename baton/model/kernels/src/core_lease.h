// Cores that workers of one host lend each other while they do not compute, kept in memory that all of them map.
#pragma once

#include <cstdint>

// This worker computes from here to `lease_end`: its cores are not lent. Nested and concurrent calls count. Free of cost
// while the worker has joined no lease.
void lease_begin();
void lease_end();

// True if none of the workers in `owners`, a bit each, computes or has computed within the last two milliseconds. False
// without a lease.
bool lease_is_idle(uint64_t owners);

// Marks the time of one call of the kernels.
struct LeaseScope {
    LeaseScope() { lease_begin(); }
    ~LeaseScope() { lease_end(); }
    LeaseScope(const LeaseScope&) = delete;
    LeaseScope& operator=(const LeaseScope&) = delete;
};
