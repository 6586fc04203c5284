// Names of chunks and blocks. All are flat, trivially copyable values.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>

namespace kvferry {

// 128 bits: SHA-256 cut to its first half, read as two big-endian words. words[0] holds the first eight bytes.
using Id128 = std::array<uint64_t, 2>;

// Hash of (tenant, namespace spec). Made by the store alone; see namespace_spec.h.
using NamespaceId = Id128;

// 64 random bits, the highest one set. Made by the store; names a session and the live chunks it owns.
using SessionId = uint64_t;

// The highest bit of a chunk id tells its two kinds apart, so that neither can be mistaken for the other:
// set in a live id {session id, counter}, which only its session can see; clear in a prefix key (127 bits of hash).
inline constexpr uint64_t kLiveBit = uint64_t{1} << 63;

// One span of T tokens of one batch row, over all layers of one retention group of one KV shard.
struct ChunkKey {
  NamespaceId ns{};
  Id128 id{};
  uint16_t group = 0;
  uint16_t shard = 0;

  bool IsLive() const { return (id[0] & kLiveBit) != 0; }
  SessionId Owner() const { return id[0]; }  // of a live key

  friend bool operator==(const ChunkKey& a, const ChunkKey& b) {
    return a.ns == b.ns && a.id == b.id && a.group == b.group && a.shard == b.shard;
  }
  friend bool operator!=(const ChunkKey& a, const ChunkKey& b) { return !(a == b); }
  friend bool operator<(const ChunkKey& a, const ChunkKey& b) {
    return std::tie(a.ns, a.id, a.group, a.shard) < std::tie(b.ns, b.id, b.group, b.shard);
  }
  template <typename H>
  friend H AbslHashValue(H h, const ChunkKey& k) {
    return H::combine(std::move(h), k.ns, k.id, k.group, k.shard);
  }
};

// One layer of a chunk. `layer` counts within the chunk's group, from 0.
struct BlockKey {
  ChunkKey chunk;
  uint16_t layer = 0;

  friend bool operator==(const BlockKey& a, const BlockKey& b) { return a.chunk == b.chunk && a.layer == b.layer; }
  template <typename H>
  friend H AbslHashValue(H h, const BlockKey& k) {
    return H::combine(std::move(h), k.chunk, k.layer);
  }
};

static_assert(std::is_trivially_copyable_v<ChunkKey> && std::is_trivially_copyable_v<BlockKey>);

// Names a session where its id must not be shown, because whoever has the id can resume it: 32 bits of a hash.
uint32_t SessionTag(SessionId session);

// Chunks or blocks that one call may ask for or name.
inline constexpr int kMaxChunksInCall = 65536;

// 32 hex digits.
std::string ToString(const Id128& id);
// "namespace/id/group.shard", for messages and listings.
std::string ToString(const ChunkKey& key);
std::string ToString(const BlockKey& key);

// Priorities of published chunks: lower ones are evicted first.
inline constexpr int kMaxPriority = 100;
inline constexpr int kDefaultPriority = 50;

// How long a published chunk is to be kept.
struct Lifetime {
  uint8_t priority = kDefaultPriority;  // 0 to kMaxPriority
  uint32_t expires = 0;                 // seconds since 1970; 0: never

  friend bool operator==(const Lifetime& a, const Lifetime& b) {
    return a.priority == b.priority && a.expires == b.expires;
  }
};

}  // namespace kvferry
