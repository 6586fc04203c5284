// The way from disk to memory.
#pragma once

#include <memory>

#include "storage/store_state.h"

namespace kvferry {

// The operations on StoreState that read chunks from disk: one read of each, however many wait, and its layers can be
// read as they arrive. Holds nothing itself. REQUIRES: the store's mutex is held, unless it is excluded. All that takes
// the lock needs a Step.
class Loader {
 public:
  explicit Loader(StoreState* state) : state_(*state) {}

  // A block of a chunk that lies on disk: answered when it has been read, or cannot be.
  void Get(Record* record, ChunkLoad::Waiter waiter);

  // See Store::Prefetch.
  void Prefetch(SessionId session, absl::Span<const ChunkKey> keys, const GivenUp& given_up)
      ABSL_LOCKS_EXCLUDED(state_.mu);

  // The memory that a load waited for: begins to read. Or there is none.
  void Begin(Record* record, const Extent& extent);
  void Refuse(Record* record, const absl::Status& status);
  // Nobody wants what waits for memory any more.
  bool IsGivenUp(const Record* record);

  // An image has been copied on disk; see DiskTierOptions::moved.
  void Moved(const ImageEntry& image, uint64_t header_seq, DiskPlace from, const absl::StatusOr<DiskPlace>& to)
      ABSL_LOCKS_EXCLUDED(state_.mu);

  // Follows hints as far as there is memory.
  void FollowHints();

 private:
  // Whose image lies there; nullptr: nobody's any more.
  Record* OwnerOf(const ImageEntry& image, DiskPlace place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  ChunkLoad* Find(const Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // nullptr if it has failed, and perhaps another one has begun since.
  ChunkLoad* Find(ChunkNumber number, const std::shared_ptr<Chunk>& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  ChunkLoad* Open(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // On a thread of the disk's: a piece has been read, or could not be.
  void Arrived(ChunkNumber number, size_t piece, const std::shared_ptr<Chunk>& chunk, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(state_.mu);
  // Answers those whose layer is there.
  void Deliver(ChunkLoad* load) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void Answer(ChunkLoad* load, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // The image's room had been given back, and nobody had said so on disk before the last store was killed.
  void Forget(ChunkNumber number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // `lost`: the bytes that were read are not the chunk's.
  void Fail(ChunkNumber number, const absl::Status& status, bool lost) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void End(ChunkNumber number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);

  StoreState& state_;
};

}  // namespace kvferry
