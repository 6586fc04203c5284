// What a reader of the store may see, in plain maps: the checker of the simulation.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/store.h"

namespace kvferry::simulation {

// Bytes that say whose they are: layer `layer` of the chunk with this content.
void Fill(MutableByteView slot, uint64_t content, int layer);
// Whose bytes these are; nullopt: nobody's, or not all of them.
std::optional<uint64_t> ContentOf(const BlockView& view, int layer);

// A chunk as the model knows it, beside the store's record.
struct Chunk {
  struct Candidate {
    uint64_t content = 0;
    absl::Time expires = absl::InfiniteFuture();
  };

  uint64_t content = 0;  // 0: found after a restart, and not read yet: one of the candidates
  std::vector<Candidate> candidates;
  bool lies = false;   // its writer gave a wrong checksum: it may be lost at any time
  bool proven = true;  // its bytes are known to be there as long as somebody holds it
  bool lost = false;   // it was missed when it might be
  bool sealed = false;
  int holders = 0;  // live names and leases of those who are surely there
  uint64_t publication = 0;
  std::optional<ChunkKey> name;
  absl::Time expires = absl::InfiniteFuture();
};
using ChunkPtr = std::shared_ptr<Chunk>;

// The prefix names there are and what lies, or may lie, under each.
class Names {
 public:
  // What is published under the name as far as anybody has said; it may have been evicted. nullptr: nothing is there.
  ChunkPtr Find(const ChunkKey& key) const;
  void Publish(const ChunkKey& key, const ChunkPtr& chunk, absl::Time expires);
  // The name was taken away; what was published up to here may come back after a restart until Forgotten is told.
  // Returns the number of the last publication that the erasure covers.
  uint64_t Erase(const ChunkKey& key);
  void Forgotten(const ChunkKey& key, uint64_t last);
  void Expire(absl::Time now);

  // A Flush that covers what is there now begins; it has been answered well. `all`: nothing has been evicted, so what
  // nobody holds is there too.
  using Covered = std::vector<std::pair<ChunkKey, uint64_t>>;
  Covered BeginFlush(bool all) const;
  void Flushed(const Covered& covered);
  // The disk gave something up: nothing that was flushed is sure to be there.
  void NothingIsDurable();

  // The process has ended: what may be found, and what must.
  void Restart(absl::Time now);
  bool MustBeFound(const ChunkKey& key, absl::Time now) const;
  // The folder is empty.
  void Clear() { names_.clear(); }

 private:
  struct Published {
    uint64_t number = 0;
    uint64_t content = 0;
    absl::Time expires;
  };
  struct Name {
    ChunkPtr current;
    std::vector<Published> history;  // not surely gone from the disk
    uint64_t durable = 0;            // the publication that survives a crash; 0: none
  };
  static void Unname(Name* name);

  std::map<ChunkKey, Name> names_;
  uint64_t publications_ = 0;
};

// One client.
struct Session {
  struct Live {
    ChunkPtr chunk;
    std::unique_ptr<ChunkWriter> writer;  // until it is sealed or given up
    std::vector<bool> committed;
    size_t spec = 0;
    uint64_t last_name = 0;   // as which it was published last
    bool maybe_gone = false;  // its reservation's grace was over while the session was suspended
  };
  struct Lease {
    ChunkPtr chunk;
    uint32_t count = 0;
  };
  SessionId id = 0;
  size_t tenant = 0;
  bool suspended = false, maybe_over = false, maybe_aborted = false;
  absl::Time since;
  std::map<ChunkKey, Live> live;
  std::map<ChunkKey, Lease> leases;

  // Adds to the holders of all it holds.
  void Hold(int sign);
};

struct Ticket {
  TicketId id = 0;
  size_t tenant = 0;
  absl::Time expires;
  std::vector<ChunkPtr> chunks;
  bool over = false;
};

}  // namespace kvferry::simulation
