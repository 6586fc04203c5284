#include "storage/quotas.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::StatusOr<QuotaMode> ParseQuotaMode(absl::string_view name) {
  for (const QuotaMode mode : {QuotaMode::kReject, QuotaMode::kEvictOwn}) {
    if (name == QuotaModeName(mode)) return mode;
  }
  return absl::InvalidArgumentError(absl::StrCat("quota mode is \"", name, "\", expected reject or evict_own"));
}

absl::string_view QuotaModeName(QuotaMode mode) { return mode == QuotaMode::kReject ? "reject" : "evict_own"; }

Quotas::Domain* Quotas::Open(absl::string_view tenant, const NamespaceId* ns) {
  std::unique_ptr<Domain>& domain = table_[Key(tenant, ns != nullptr ? *ns : NamespaceId{})];
  if (domain == nullptr) {
    domain = std::make_unique<Domain>();
    domain->info.tenant = std::string(tenant);
    if (ns != nullptr) domain->info.ns = *ns;
  }
  return domain.get();
}

void Quotas::CloseIfIdle(Domain* domain) {
  if (domain->info.used_bytes != 0 || domain->info.quota.has_value()) return;
  table_.erase(Key(domain->info.tenant, domain->info.ns.value_or(NamespaceId{})));
}

void Quotas::Add(const Namespace& ns, uint64_t bytes) {
  Counted& counted = domains_[&ns];
  if (counted.chunks++ == 0) counted.domains = {Open(ns.tenant, &ns.id), Open(ns.tenant, nullptr)};
  for (Domain* domain : counted.domains) domain->info.used_bytes += bytes;
}

void Quotas::Remove(const Namespace& ns, uint64_t bytes) {
  const auto it = domains_.find(&ns);
  const Domains domains = it->second.domains;
  if (--it->second.chunks == 0) domains_.erase(it);
  for (Domain* domain : domains) {
    domain->info.used_bytes -= bytes;
    CloseIfIdle(domain);
  }
}

void Quotas::Set(Domain* domain, std::optional<Quota> quota, PolicyKind policy) {
  if (domain->own != nullptr) --own_;
  domain->own = nullptr;
  domain->evictable_bytes = 0;
  domain->info.quota = quota;
  if (!quota.has_value() || quota->mode != QuotaMode::kEvictOwn) return;
  domain->own = std::make_unique<EvictionQueue>(policy);
  ++own_;
}

void Quotas::EmptyQueues(PolicyKind policy) {
  for (const auto& [key, domain] : table_) {
    if (domain->own != nullptr) domain->own = std::make_unique<EvictionQueue>(policy);
    domain->evictable_bytes = 0;
  }
}

Quotas::Domain* Quotas::Exceeded(const Namespace& ns, uint64_t bytes) {
  for (const NamespaceId* id : {&ns.id, static_cast<const NamespaceId*>(nullptr)}) {
    const auto it = table_.find(Key(ns.tenant, id != nullptr ? *id : NamespaceId{}));
    if (it == table_.end() || !it->second->info.quota.has_value()) continue;
    const uint64_t limit = it->second->info.quota->bytes, used = it->second->info.used_bytes;
    if (used > limit || bytes > limit - used) return it->second.get();
  }
  return nullptr;
}

std::vector<QuotaInfo> Quotas::List() const {
  std::vector<QuotaInfo> infos;
  infos.reserve(table_.size());
  for (const auto& [key, domain] : table_) infos.push_back(domain->info);
  return infos;
}

}  // namespace kvferry
