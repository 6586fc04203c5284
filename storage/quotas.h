// How much of the store each tenant and each namespace may hold.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/eviction.h"
#include "storage/namespaces.h"

namespace kvferry {

// What becomes of a reservation that would go beyond the quota.
enum class QuotaMode : uint8_t {
  kReject,    // it is refused
  kEvictOwn,  // room is made among the domain's own chunks, as eviction goes; refused only if that does not suffice
};
// "reject" or "evict_own"; INVALID_ARGUMENT names another one.
absl::StatusOr<QuotaMode> ParseQuotaMode(absl::string_view name);
absl::string_view QuotaModeName(QuotaMode mode);

// Of images, wherever they lie, each counted once from its reservation until nobody has a name for it or holds it.
struct Quota {
  uint64_t bytes = 0;
  QuotaMode mode = QuotaMode::kReject;
};

// A tenant, or a namespace of it.
struct QuotaInfo {
  std::string tenant;
  std::optional<NamespaceId> ns;  // nullopt: all of the tenant's
  std::optional<Quota> quota;
  uint64_t used_bytes = 0;
  uint64_t refusals = 0, evictions = 0;  // because of the quota
};

// The domains that have chunks or a quota. Threads: none of its own; the store's mutex guards it.
class Quotas {
 public:
  struct Domain {
    QuotaInfo info;
    std::unique_ptr<EvictionQueue> own;  // its chunks that may go at once, where it evicts its own
    uint64_t evictable_bytes = 0;        // of those and of what may go after them
  };
  // Those that a chunk counts in: its namespace and its tenant.
  using Domains = std::array<Domain*, 2>;

  // A chunk of the namespace is there, or there no more.
  void Add(const Namespace& ns, uint64_t bytes);
  void Remove(const Namespace& ns, uint64_t bytes);
  // REQUIRES: a chunk of the namespace is there.
  const Domains& Of(const Namespace& ns) const { return domains_.at(&ns).domains; }

  // The domain of a tenant (`ns` null) or a namespace, made if it is not there.
  Domain* Open(absl::string_view tenant, const NamespaceId* ns);
  const Domain* Find(const std::string& tenant, const std::optional<NamespaceId>& ns) const {
    return table_.at(Key(tenant, ns.value_or(NamespaceId{}))).get();
  }
  // Forgets it if it has neither chunks nor a quota.
  void CloseIfIdle(Domain* domain);

  // Some domain evicts its own, so that chunks have to be queued there.
  bool any_own() const { return own_ != 0; }
  // The caller queues the chunks there are. `policy`: of the queue.
  void Set(Domain* domain, std::optional<Quota> quota, PolicyKind policy);

  // Of all domains, before the chunks there are are queued again.
  void EmptyQueues(PolicyKind policy);

  // The first domain whose quota has no room for so many bytes more; nullptr: all have.
  Domain* Exceeded(const Namespace& ns, uint64_t bytes);

  std::vector<QuotaInfo> List() const;

 private:
  struct Counted {
    Domains domains{};
    uint64_t chunks = 0;
  };
  using Key = std::pair<std::string, NamespaceId>;  // of a tenant: with a namespace of zeros
  absl::btree_map<Key, std::unique_ptr<Domain>> table_;
  absl::flat_hash_map<const Namespace*, Counted> domains_;
  size_t own_ = 0;
};

}  // namespace kvferry
