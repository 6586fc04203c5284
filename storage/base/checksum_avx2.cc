// XXH3 compiled for AVX2. No header of ours or of Abseil here: an inline function compiled with these flags could be
// the copy that the linker keeps, and would fail on a processor without AVX2.
#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvferry {

extern const bool kChecksumAvx2Compiled;
uint64_t ChecksumTileAvx2(const uint8_t* data, size_t size);

#if defined(__AVX2__)
const bool kChecksumAvx2Compiled = true;
#else
const bool kChecksumAvx2Compiled = false;
#endif

uint64_t ChecksumTileAvx2(const uint8_t* data, size_t size) { return XXH3_64bits(data, size); }

}  // namespace kvferry
