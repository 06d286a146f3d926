// Shifts the wall clock of one process by an offset that another process writes: preload the library and set
// CLOCK_OFFSET_FILE to a file of eight bytes, nanoseconds, signed, native order. Other clocks stay as they are.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr int64_t kNanoseconds = 1000000000;

const volatile int64_t* map_offset() {
    static const int64_t none = 0;
    const char* path = getenv("CLOCK_OFFSET_FILE");
    int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return &none;
    void* mapped = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? &none : static_cast<const volatile int64_t*>(mapped);
}

int64_t offset() {
    static const volatile int64_t* value = map_offset();
    return *value;
}

using ClockGetTime = int (*)(clockid_t, timespec*);

int real_clock_gettime(clockid_t clock, timespec* time) {
    static auto real = reinterpret_cast<ClockGetTime>(dlsym(RTLD_NEXT, "clock_gettime"));
    return real(clock, time);
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) {
    int status = real_clock_gettime(clock, time);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t shifted = int64_t(time->tv_sec) * kNanoseconds + time->tv_nsec + offset();
        time->tv_sec = shifted / kNanoseconds;
        time->tv_nsec = shifted % kNanoseconds;
    }
    return status;
}

extern "C" int gettimeofday(timeval* time, void*) noexcept {
    timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    if (status == 0 && time != nullptr) *time = {now.tv_sec, now.tv_nsec / 1000};
    return status;
}

extern "C" time_t time(time_t* out) noexcept {
    timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
    if (out != nullptr) *out = now.tv_sec;
    return now.tv_sec;
}
