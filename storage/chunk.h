// The memory of one chunk.
#pragma once

#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "storage/arena.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/namespaces.h"

namespace kvferry {

// Owns one extent from birth to death. Shared by its record in the index, its writer, the views of its blocks and the
// transfers to and from disk: the extent is free for others only when nobody is left who could write or read it. Names,
// leases and places are its Record's.
// Threads: a layer's bytes are written by its one writer before it is readable and only read after; which layers are
// is guarded by the store's mutex. May be destroyed on any thread, under any lock but the arena's.
class Chunk {
 public:
  // Takes `extent`, of ns->layouts[key.group].image_bytes bytes.
  Chunk(std::shared_ptr<Arena> arena, const Extent& extent, std::shared_ptr<const Namespace> ns, const ChunkKey& key)
      : arena_(std::move(arena)),
        extent_(extent),
        ns_(std::move(ns)),
        key_(key),
        checksums_(layout().slots.size()),
        readable_(layout().slots.size()) {}
  ~Chunk() { arena_->Free(extent_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  const ChunkKey& key() const { return key_; }  // that it had when it came into memory
  const std::shared_ptr<const Namespace>& ns() const { return ns_; }
  const ChunkLayout& layout() const { return ns_->layouts[key_.group]; }
  uint64_t charged_bytes() const { return extent_.bytes + extent_.overhead; }

  MutableByteView Image() const { return {extent_.data(), extent_.bytes}; }
  MutableByteView Slot(int layer) const {
    const ChunkLayout::Slot& slot = layout().slots[layer];
    return {extent_.data() + slot.offset, slot.size};
  }

  // Layers that were committed, or have come from disk.
  bool readable(size_t layer) const { return readable_[layer]; }
  size_t readable_count() const { return readable_count_; }
  bool whole() const { return readable_count_ == readable_.size(); }
  // Of what is readable, BlockChecksum of each layer.
  const std::vector<uint64_t>& checksums() const { return checksums_; }
  // REQUIRES: it is not readable yet.
  void SetReadable(size_t layer, uint64_t checksum) {
    checksums_[layer] = checksum;
    readable_[layer] = true;
    ++readable_count_;
  }

 private:
  const std::shared_ptr<Arena> arena_;
  const Extent extent_;
  const std::shared_ptr<const Namespace> ns_;
  const ChunkKey key_;
  std::vector<uint64_t> checksums_;
  std::vector<bool> readable_;
  size_t readable_count_ = 0;
};

// Bytes of bookkeeping charged for a chunk in memory, beside its image and its record.
inline uint64_t ChunkOverhead(const ChunkLayout& layout) {
  constexpr uint64_t kControlBlock = 32;
  return sizeof(Chunk) + kControlBlock + layout.slots.size() * sizeof(uint64_t) + layout.slots.size() / 8 + 8;
}

}  // namespace kvferry
