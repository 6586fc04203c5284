#include "storage/base/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

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

// Whether any word has all bits of `exponent`: that is what NaN and infinity have. Compiles to vector code.
template <typename Word, Word exponent>
bool AnyHas(ByteView bytes) {
  unsigned any = 0;
  for (size_t at = 0; at + sizeof(Word) <= bytes.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    any |= static_cast<unsigned>((word & exponent) == exponent);
  }
  return any != 0;
}

bool AllFinite(ByteView bytes, Elements elements) {
  switch (elements) {
    case Elements::kBfloat16:
      return !AnyHas<uint16_t, 0x7f80>(bytes);
    case Elements::kFloat16:
      return !AnyHas<uint16_t, 0x7c00>(bytes);
    case Elements::kFloat32:
      return !AnyHas<uint32_t, 0x7f800000>(bytes);
    case Elements::kFloat64:
      return !AnyHas<uint64_t, 0x7ff0000000000000>(bytes);
    case Elements::kFloat8E4m3fn:  // has no infinity
      return !AnyHas<uint8_t, 0x7f>(bytes);
    case Elements::kFloat8E5m2:
      return !AnyHas<uint8_t, 0x7c>(bytes);
    case Elements::kOther:
      break;
  }
  return true;
}

}  // namespace

Elements ElementsOf(absl::string_view dtype) {
  if (dtype == "bfloat16") return Elements::kBfloat16;
  if (dtype == "float16") return Elements::kFloat16;
  if (dtype == "float32") return Elements::kFloat32;
  if (dtype == "float64") return Elements::kFloat64;
  if (dtype == "float8_e4m3fn") return Elements::kFloat8E4m3fn;
  if (dtype == "float8_e5m2") return Elements::kFloat8E5m2;
  return Elements::kOther;
}

// A tile is looked through while the cache still has it from the checksum.
BlockSum SumBlock(ByteView block, absl::Span<const ElementRun> runs) {
  Tiles tiles;
  bool finite = true;
  size_t run = 0;
  uint64_t left = runs.empty() ? 0 : runs[0].bytes;  // of the run
  while (!block.empty()) {
    ByteView tile = block.subspan(0, std::min<size_t>(block.size(), kChecksumTile));
    block.remove_prefix(tile.size());
    tiles.push_back(TileChecksum(tile.data(), tile.size()));
    while (finite && !tile.empty() && run < runs.size()) {
      const ByteView part = tile.subspan(0, std::min<uint64_t>(tile.size(), left));
      finite = AllFinite(part, runs[run].elements);
      tile.remove_prefix(part.size());
      left -= part.size();
      while (left == 0 && ++run < runs.size()) left = runs[run].bytes;
    }
  }
  return {OverTiles(tiles), finite};
}

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
