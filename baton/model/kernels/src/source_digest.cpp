#include "simd.h"

// The digest of the sources and flags that this library was built from. BATON_SOURCE_DIGEST is defined by the build.
BATON_API const char* baton_source_digest() { return BATON_SOURCE_DIGEST; }
