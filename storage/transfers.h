// What is under way between memory and disk, and what waits for its turn.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/ghosts.h"
#include "storage/record.h"
#include "storage/store.h"

namespace kvferry {

inline bool HasGivenUp(const GivenUp& given_up) { return given_up != nullptr && given_up->load(); }

// A chunk that is being written, or waits for that. Its record is held.
struct ChunkWrite {
  Record* record = nullptr;
  std::shared_ptr<Chunk> chunk;
  std::vector<FlushDone> waiters;
  bool begun = false;
  bool named = false;     // since it has begun: its header does not say so
  bool cleaning = false;  // so that it can leave memory
  int refusals = 0;
};

// A chunk that is being read, or waits for memory. Its record is held.
struct ChunkLoad {
  // Slots of the image that are read in one transfer; the first one has the header before them.
  struct Piece {
    uint64_t offset = 0, bytes = 0;
    size_t first_slot = 0, slots = 0;
    bool arrived = false;  // before the header has
  };
  struct Waiter {
    size_t layer = 0;
    GivenUp given_up;
    GetDone done;
  };
  Record* record = nullptr;
  std::shared_ptr<Chunk> chunk;  // null: it waits for memory
  DiskPlace place;
  std::vector<Piece> pieces;
  std::vector<uint64_t> checksums;  // once the header has been read
  size_t pieces_left = 0;
  std::vector<Waiter> waiters;
  bool moved = false;   // since it began its image lies elsewhere: `place` is to be freed
  bool hinted = false;  // began with a hint
};

struct Hint {
  SessionId session = 0;
  ChunkKey key;
  GivenUp given_up;
};

// Threads: none of its own; the store's mutex guards it.
struct Transfers {
  absl::btree_map<ChunkNumber, ChunkWrite> writes;
  std::deque<ChunkNumber> to_write;                // of them, those that have not begun
  uint64_t writing_bytes = 0;                      // of those that have
  uint64_t cleaning_bytes = 0;                     // of all that will be ready when they are written
  absl::Time paused_until = absl::InfinitePast();  // the disk refused one: nothing is cleaned before

  absl::btree_map<ChunkNumber, std::unique_ptr<ChunkLoad>> loads;
  std::deque<Hint> hints;
  size_t hinted_loads = 0;  // under way

  Ghosts seen;  // lost from memory for want of a second use

  // For tests. INTERNAL names what does not agree.
  absl::Status CheckInvariants() const;
};

}  // namespace kvferry
