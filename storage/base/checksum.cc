#include "storage/base/checksum.h"

#include <algorithm>
#include <bit>

#include "absl/container/inlined_vector.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvferry {

extern const bool kChecksumAvx2Compiled;  // checksum_avx2.cc
uint64_t ChecksumTileAvx2(const uint8_t* data, size_t size);

namespace {

static_assert(std::endian::native == std::endian::little, "tile checksums are hashed as they lie in memory");

using TileFunction = uint64_t (*)(const uint8_t* data, size_t size);

uint64_t ChecksumTileBaseline(const uint8_t* data, size_t size) { return XXH3_64bits(data, size); }

TileFunction ChooseTileFunction() {
#if defined(__x86_64__)
  if (kChecksumAvx2Compiled && __builtin_cpu_supports("avx2")) return &ChecksumTileAvx2;
#endif
  return &ChecksumTileBaseline;
}

uint64_t TileChecksum(const uint8_t* data, size_t size) {
  static const TileFunction function = ChooseTileFunction();
  return function(data, size);
}

// The tile sums of a block: on the stack up to 4 MiB.
using Tiles = absl::InlinedVector<uint64_t, 256>;

uint64_t OverTiles(const Tiles& tiles) { return XXH3_64bits(tiles.data(), tiles.size() * sizeof(uint64_t)); }

// Tiles that lie whole in `piece` go the fast way. Returns what is left of it.
ByteView TakeWholeTiles(ByteView piece, Tiles* tiles) {
  while (piece.size() >= kChecksumTile) {
    tiles->push_back(TileChecksum(piece.data(), kChecksumTile));
    piece.remove_prefix(kChecksumTile);
  }
  return piece;
}

}  // namespace

uint64_t BlockChecksum(ByteView block) {
  Tiles tiles;
  const ByteView rest = TakeWholeTiles(block, &tiles);
  if (!rest.empty()) tiles.push_back(TileChecksum(rest.data(), rest.size()));
  return OverTiles(tiles);
}

uint64_t BlockChecksum(absl::Span<const ByteView> pieces) {
  if (pieces.size() == 1) return BlockChecksum(pieces[0]);
  Tiles tiles;
  XXH3_state_t tile;  // a tile that spans pieces
  size_t filled = 0;
  for (ByteView piece : pieces) {
    while (!piece.empty()) {
      if (filled == 0) piece = TakeWholeTiles(piece, &tiles);
      if (piece.empty()) break;
      if (filled == 0) XXH3_64bits_reset(&tile);
      const size_t n = std::min<size_t>(piece.size(), kChecksumTile - filled);
      XXH3_64bits_update(&tile, piece.data(), n);
      piece.remove_prefix(n);
      filled = (filled + n) % kChecksumTile;
      if (filled == 0) tiles.push_back(XXH3_64bits_digest(&tile));
    }
  }
  if (filled != 0) tiles.push_back(XXH3_64bits_digest(&tile));
  return OverTiles(tiles);
}

uint64_t HeaderChecksum(ByteView bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace kvferry
