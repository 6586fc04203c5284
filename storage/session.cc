#include "storage/session.h"

#include <random>
#include <utility>

namespace kvferry {

Record* Session::FindLive(const ChunkKey& key) const {
  if (key.Owner() != id) return nullptr;
  const auto it = live.find(key.id[1]);
  if (it == live.end()) return nullptr;
  Record* const record = it->second;
  return record->ns->id == key.ns && record->group == key.group && record->shard == key.shard ? record : nullptr;
}

Session* SessionTable::Open(SessionId id, absl::string_view tenant) {
  std::unique_ptr<Session>& session = sessions_[id];
  session = std::make_unique<Session>(id, tenant);
  ++tenants_[session->tenant];
  return session.get();
}

Session* SessionTable::Find(SessionId id) const {
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : it->second.get();
}

std::unique_ptr<Session> SessionTable::Remove(SessionId id) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return nullptr;
  std::unique_ptr<Session> session = std::move(it->second);
  sessions_.erase(it);
  const auto count = tenants_.find(session->tenant);
  if (--count->second == 0) tenants_.erase(count);
  return session;
}

uint64_t SessionTable::CountOf(absl::string_view tenant) const {
  const auto it = tenants_.find(tenant);
  return it == tenants_.end() ? 0 : it->second;
}

uint64_t RandomBits() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace kvferry
