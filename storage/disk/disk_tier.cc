#include "storage/disk/disk_tier.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

DiskStoreId NewStoreId() {
  std::random_device random;
  const auto word = [&random] { return uint64_t{random()} << 32 | random(); };
  return {word(), word()};
}

// The layouts of the namespaces that a manifest knows, each made when it is first asked for.
class Layouts {
 public:
  explicit Layouts(const Manifest* manifest) : manifest_(manifest) {}
  // nullptr: nothing is known of it, or it has no such group or shard.
  const ChunkLayout* Of(const ChunkKey& key) {
    const auto [it, is_new] = known_.try_emplace(key.ns);
    if (is_new) Make(key.ns, &it->second);
    const Known& known = it->second;
    return key.group < known.layouts.size() && key.shard < known.shards ? &known.layouts[key.group] : nullptr;
  }

 private:
  struct Known {
    std::vector<ChunkLayout> layouts;
    uint32_t shards = 0;
  };
  void Make(const NamespaceId& ns, Known* known) const {
    const std::shared_ptr<const NamespaceEntry> entry = manifest_->Find(ns);
    if (entry == nullptr) return;
    const absl::StatusOr<NamespaceSpec> spec = ParseCanonical(entry->spec);
    if (!spec.ok() || HashNamespace(entry->tenant, *spec) != ns) {
      KVFERRY_LOG(kError, absl::StrCat("disk: namespace ", ToString(ns),
                                       " is not what its id says: ", spec.status().message()));
      return;
    }
    known->shards = spec->shards;
    for (int group = 0; group < static_cast<int>(spec->groups.size()); ++group) {
      known->layouts.push_back(ChunkLayout::For(*spec, group));
    }
  }

  const Manifest* const manifest_;
  absl::flat_hash_map<NamespaceId, Known> known_;
};

}  // namespace

absl::StatusOr<DiskTier::Opened> DiskTier::Open(const DiskTierOptions& options, std::unique_ptr<Folder> folder,
                                                absl::Time now, absl::FunctionRef<void(const Found&)> found) {
  Opened opened;
  opened.tier.reset(new DiskTier());
  DiskTier& tier = *opened.tier;
  tier.folder_ = std::move(folder);
  KVFERRY_ASSIGN_OR_RETURN(tier.manifest_, Manifest::Open(tier.folder_.get(), NewStoreId()));
  SegmentLogOptions log_options;
  log_options.store = tier.manifest_->store();
  log_options.bytes = options.bytes;
  log_options.segment_bytes = std::min(options.segment_bytes, options.bytes / 8);
  log_options.keep_free_bytes = options.keep_free_bytes;
  log_options.freed = options.freed;
  log_options.removed = [manifest = tier.manifest_.get()](uint32_t segment) { manifest->Forget(segment); };
  tier.log_ = std::make_unique<SegmentLog>(log_options, tier.folder_.get());

  struct Image {
    ImageEntry image;
    DiskPlace place;
    uint64_t header_seq = 0;
  };
  absl::flat_hash_map<ChunkKey, Image> images;
  std::vector<Image> older;
  Layouts layouts(tier.manifest_.get());
  const int64_t seconds = absl::ToUnixSeconds(now);
  uint64_t oldest = UINT64_MAX, youngest = tier.manifest_->youngest_seq();
  const auto is_there = [&](const ImageEntry& entry, DiskPlace place) {
    Image candidate{entry, place, entry.seq};
    if (!tier.manifest_->Resolve(place, &candidate.image)) return false;
    youngest = std::max(youngest, candidate.image.seq);
    const ImageEntry& image = candidate.image;
    const ChunkLayout* layout = layouts.Of(image.key);
    if (image.key.IsLive() || layout == nullptr || layout->image_bytes != image.blocks * kDiskAlignment) return false;
    if (image.lifetime.expires != 0 && image.lifetime.expires <= seconds) return false;
    oldest = std::min(oldest, image.seq);
    const auto [it, is_new] = images.try_emplace(image.key, candidate);
    if (!is_new) {
      if (image.seq > it->second.image.seq) std::swap(candidate, it->second);
      older.push_back(candidate);
    }
    return true;
  };
  const auto keep = [&](const ImageEntry& entry, DiskPlace place) {
    if (is_there(entry, place)) return true;
    tier.manifest_->Note(FreedEntry{place});  // a footer goes on naming it when what made it dead is forgotten
    return false;
  };
  KVFERRY_RETURN_IF_ERROR(tier.log_->Recover([&](const ChunkKey& key) { return layouts.Of(key); }, keep));
  for (const Image& image : older) tier.Free(image.place, image.image.blocks * kDiskAlignment);
  KVFERRY_RETURN_IF_ERROR(tier.manifest_->Compact(oldest, tier.log_->Segments()));
  for (const auto& [key, image] : images)
    found({tier.manifest_->Find(key.ns), image.image, image.place, image.header_seq});
  opened.next_seq = youngest + 1;
  return opened;
}

DiskTier::~DiskTier() {
  if (log_ != nullptr && !closed_) log_->Close([] {});
}

void DiskTier::Close(absl::AnyInvocable<void()> done) {
  closed_ = true;
  log_->Close(std::move(done));
}

void DiskTier::Wait() {
  log_->Wait();
  manifest_->Wait();
}

void DiskTier::AddNamespace(const NamespaceId& id, absl::string_view tenant, const NamespaceSpec& spec) {
  if (manifest_->Find(id) == nullptr) manifest_->Note(NamespaceEntry{id, std::string(tenant), Canonical(spec)});
}

void DiskTier::Free(DiskPlace place, uint64_t bytes) {
  manifest_->Note(FreedEntry{place});
  log_->Free(place, bytes);
}

void DiskTier::Publish(DiskPlace place, const ImageEntry& as) {
  manifest_->Note(PublishedEntry{place, as.key, as.parent, as.seq, as.lifetime});
}

void DiskTier::Erase(const std::vector<ChunkKey>& keys, uint64_t seq, IoDone done) {
  std::vector<ManifestEntry> entries;
  entries.reserve(keys.size());
  for (const ChunkKey& key : keys) entries.emplace_back(ErasedEntry{key, seq});
  manifest_->Append(std::move(entries), std::move(done));
}

void DiskTier::Drop(const NamespaceId& ns, uint64_t seq, IoDone done) {
  manifest_->Append({DroppedEntry{ns, seq}}, std::move(done));
}

void DiskTier::Flush(IoDone done) {
  log_->Sync([this, done = std::move(done)](const absl::Status& synced) mutable {
    manifest_->Append({}, [synced, done = std::move(done)](const absl::Status& said) mutable {
      std::move(done)(synced.ok() ? said : synced);
    });
  });
}

}  // namespace kvferry
