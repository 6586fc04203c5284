// What the store knows of one chunk.
#pragma once

#include <cstdint>
#include <memory>

#include "storage/chunk.h"
#include "storage/disk/segment_format.h"
#include "storage/eviction.h"

namespace kvferry {

// The published chunks whose parent a chunk is.
struct Family {
  uint32_t children = 0;
  uint32_t in_memory = 0;  // of them

  friend bool operator==(const Family& a, const Family& b) {
    return a.children == b.children && a.in_memory == b.in_memory;
  }
};

// The life of a chunk: reserved -> sealed -> published, with a live name until its session lets go and a prefix name
// from Publish until Erase or eviction. Its bytes lie in memory, on disk or in both; when they are lost it is a miss
// until its names go. There as long as it has a name, or anybody has leased or holds it. Changed by Index alone, under
// the store's mutex; the fields are public so that they can be read.
struct Record {
  const Namespace* ns = nullptr;  // null: nobody has the number
  std::shared_ptr<Chunk> chunk;   // in memory, perhaps not yet whole
  Id128 id{};                     // prefix key if published, else the live id
  Id128 parent{};                 // while published
  DiskPlace disk;                 // its image there
  uint64_t disk_seq = 0;          // that the image's header has
  Family family;
  uint32_t leases = 0;  // over all sessions
  uint32_t epoch = 0;   // of its namespace, when it got its prefix name
  uint16_t holds = 0;   // transfers that are under way or wait
  uint16_t group = 0, shard = 0;
  uint8_t priority = kDefaultPriority;
  bool live = false;  // its session holds it
  bool sealed = false;
  bool published = false;
  bool pinned = false;      // by an operator: not evicted
  bool expires = false;     // its prefix name, see Index::ExpiryOf
  bool is_finite = true;    // else it cannot be published: who is fed NaN by another one's prompt cannot know why
  bool used_again = false;  // asked for since it was published, or known from before

  ChunkKey key() const { return {ns->id, id, group, shard}; }
  const ChunkLayout& layout() const { return ns->layouts[group]; }
  bool is_somewhere() const { return chunk != nullptr || disk; }

 private:
  friend class Index;
  template <typename Node>
  friend class NumberList;
  // Where it waits to leave memory.
  enum class Queue : uint8_t { kNone, kRanked, kHeld, kReady };

  Queue queue = Queue::kNone;
  uint8_t counted = 0;     // as what Index last counted it
  bool in_memory = false;  // ranked among those in memory; counted by its parent as there
  bool on_disk = false;    // ranked among those on disk
  bool disk_queued = false;
  bool owned = false;  // ranked among those of its domains
  bool own_queued = false;
  bool own_counted = false;  // as evictable there
  bool dirty = false;
  ChunkNumber number = 0;
  ChunkNumber prev = 0, next = 0;  // in the queue
};

// Bytes of bookkeeping charged for a chunk wherever it lies: its record, its names and its places in queues.
inline constexpr uint64_t kRecordBytes = sizeof(Record) + 40;
// The same with what it takes in memory, beside its image.
inline uint64_t RecordOverhead(const ChunkLayout& layout) { return kRecordBytes + ChunkOverhead(layout); }

}  // namespace kvferry
