// The way from memory to disk.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "storage/store_state.h"

namespace kvferry {

// The operations on StoreState that write chunks to disk and make room there. Holds nothing itself. REQUIRES: the
// store's mutex is held, unless it is excluded. What begins a transfer is put into StoreState::after, so it needs a
// Step.
class Spiller {
 public:
  explicit Spiller(StoreState* state) : state_(*state) {}

  // Keeps a share of memory ready to be dropped: takes those that are next to leave it, in their order, writes them if
  // they are to be kept and are not on disk yet. `wanted`: bytes that somebody waits for, beside what is free. Without
  // a disk it does nothing.
  void Clean(uint64_t wanted);

  // Writes a chunk that is whole and in memory and not on disk, soon; `cleaning`: so that it can leave memory.
  void Write(Record* record, bool cleaning);

  // Whether memory should not give the chunk up before it is on disk.
  bool IsWanted(const Record& record) const;
  // The disk refused something a short while ago: chunks are dropped instead.
  bool IsPaused() const;

  // What memory gave up was not kept: it is known when it comes again.
  void Remember(const Record& record);

  // Its prefix name is new. As the write policy says.
  void Published(Record* record);

  // See Store::Flush.
  void Flush(FlushDone done) ABSL_LOCKS_EXCLUDED(state_.mu);

  // Room may have come back on disk.
  void Resume() ABSL_LOCKS_EXCLUDED(state_.mu);

  // How the record is known to the disk.
  ImageEntry EntryOf(const Record& record, uint64_t seq) const;

  // A chunk's bytes are not what they were: it is a miss from now on, under every name.
  void Lose(Record* record, absl::string_view where);

 private:
  enum class Room { kThere, kSoon, kNone };

  void StartWrites() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  Room MakeRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void Start(ChunkNumber number, const ChunkWrite& write) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // On a thread of the disk's: checks the bytes, joins the header to them and sends them off.
  void Send(ChunkNumber number, const std::shared_ptr<Chunk>& chunk, const ChunkHeader& header, const ImageEntry& entry)
      ABSL_LOCKS_EXCLUDED(state_.mu);
  void Written(ChunkNumber number, const ImageEntry& entry, const absl::StatusOr<DiskPlace>& place)
      ABSL_LOCKS_EXCLUDED(state_.mu);
  // The write is over, well or not; the record may be gone afterwards.
  void End(ChunkNumber number, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void Pause() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);

  StoreState& state_;
};

}  // namespace kvferry
