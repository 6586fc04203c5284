// Who holds what.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "storage/base/key.h"
#include "storage/index.h"

namespace kvferry {

// One client: its live chunks, its leases, the namespaces it has open. A ticket is one that has leases alone. In order,
// so that what ends at once leaves in the order in which it was made, whoever looks. Threads: none of its own; the
// store's mutex guards it.
struct Session {
  struct Lease {
    Record* record = nullptr;
    uint32_t count = 0;
  };

  Session(SessionId session, absl::string_view owner) : id(session), tenant(owner) {}

  // nullptr unless `key` is a live key of this session, all of it.
  Record* FindLive(const ChunkKey& key) const;

  const SessionId id;
  const std::string tenant;
  absl::btree_map<uint64_t, Record*> live;  // by the counter of its live key
  absl::btree_map<ChunkKey, Lease> leases;
  absl::btree_set<NamespaceId> namespaces;
  std::vector<ChunkKey> shared;  // of a ticket: its leases, in the order in which they were shared
  uint64_t next_counter = 1;
  bool suspended = false;
};

// Bytes of bookkeeping charged for one session, for one lease and for one open namespace of a session.
inline constexpr uint64_t kSessionBytes = sizeof(Session) + 256;
inline constexpr uint64_t kLeaseBytes = sizeof(ChunkKey) + sizeof(Session::Lease) + 16;
inline constexpr uint64_t kOpenNamespaceBytes = sizeof(NamespaceId) + 16;

// The sessions there are. Threads: none of its own; the store's mutex guards it.
class SessionTable {
 public:
  // REQUIRES: id is new.
  Session* Open(SessionId id, absl::string_view tenant);
  Session* Find(SessionId id) const;
  // The session, no longer in the table; nullptr if there is none.
  std::unique_ptr<Session> Remove(SessionId id);

  uint64_t CountOf(absl::string_view tenant) const;
  size_t size() const { return sessions_.size(); }

  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const auto& [id, session] : sessions_) visit(*session);
  }

 private:
  absl::btree_map<SessionId, std::unique_ptr<Session>> sessions_;
  absl::flat_hash_map<std::string, uint64_t> tenants_;  // sessions of each
};

// A session's id with these bits.
constexpr SessionId SessionIdOf(uint64_t random) { return kLiveBit | random; }
// From the system: a live key cannot be guessed.
uint64_t RandomBits();

}  // namespace kvferry
