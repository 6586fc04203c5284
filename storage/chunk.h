// The memory of one chunk.
#pragma once

#include <memory>

#include "absl/strings/string_view.h"
#include "storage/arena.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/namespaces.h"

namespace kvferry {

// Owns one extent from birth to death. Shared by its record in the index, its writer and the views of its blocks: the
// extent is free for others only when nobody is left who could write or read it. What changes in the life of a chunk
// (names, leases, committed layers) is in its Record.
// Threads: the fields are constant; a layer's bytes are written by its one writer before it is committed and only read
// after. May be destroyed on any thread, under any lock but the arena's.
class Chunk {
 public:
  // Takes `extent`, of ns->layouts[key.group].image_bytes bytes.
  Chunk(std::shared_ptr<Arena> arena, const Extent& extent, std::shared_ptr<const Namespace> ns, const ChunkKey& key)
      : arena_(std::move(arena)), extent_(extent), ns_(std::move(ns)), key_(key) {}
  ~Chunk() { arena_->Free(extent_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  const ChunkKey& key() const { return key_; }  // the live one
  const std::shared_ptr<const Namespace>& ns() const { return ns_; }
  const ChunkLayout& layout() const { return ns_->layouts[key_.group]; }
  uint64_t charged_bytes() const { return extent_.bytes + extent_.overhead; }

  MutableByteView Image() const { return {extent_.data(), extent_.bytes}; }
  MutableByteView Slot(int layer) const {
    const ChunkLayout::Slot& slot = layout().slots[layer];
    return {extent_.data() + slot.offset, slot.size};
  }

 private:
  const std::shared_ptr<Arena> arena_;
  const Extent extent_;
  const std::shared_ptr<const Namespace> ns_;
  const ChunkKey key_;
};

}  // namespace kvferry
