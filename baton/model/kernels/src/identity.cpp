// What a built library says of itself.
#include "simd.h"

// A digest of the sources and flags that it was built from (BATON_SOURCES is given by the build).
BATON_API const char* baton_sources() { return BATON_SOURCES; }
