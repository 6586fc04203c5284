#include "storage/disk/disk_tier.h"

#include <algorithm>
#include <random>
#include <set>
#include <utility>

#include "absl/container/btree_map.h"
#include "storage/base/status.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/disk/image_check.h"
#include "storage/disk/layouts.h"

namespace kvferry {
namespace {

DiskStoreId NewStoreId() {
  std::random_device random;
  const auto word = [&random] { return uint64_t{random()} << 32 | random(); };
  return {word(), word()};
}

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
  log_options.vacate = [&tier](uint32_t segment) { tier.relocator_->Vacate(segment); };
  tier.log_ = std::make_unique<SegmentLog>(log_options, tier.folder_.get());
  tier.relocator_ =
      std::make_unique<Relocator>(tier.log_.get(), tier.manifest_.get(), tier.folder_.get(), options.moved);

  struct Image {
    ImageEntry image;
    uint64_t header_seq;
    DiskPlace place;
  };
  absl::btree_map<ChunkKey, Image> images;
  std::vector<Image> older;
  Layouts layouts(tier.manifest_.get());
  const int64_t seconds = absl::ToUnixSeconds(now);
  uint64_t oldest = UINT64_MAX, youngest = tier.manifest_->youngest_seq();
  std::set<uint32_t> segments;
  const auto found_at = [&](const ImageEntry& entry, DiskPlace place) {
    Image candidate{entry, entry.seq, place};
    if (!tier.manifest_->Resolve(place, &candidate.image)) return false;
    youngest = std::max(youngest, candidate.image.seq);
    const ImageEntry& image = candidate.image;
    const ChunkLayout* layout = layouts.Of(image.key);
    if (image.key.IsLive() || layout == nullptr || layout->image_bytes != image.blocks * kDiskAlignment) return false;
    if (image.lifetime.expires != 0 && image.lifetime.expires <= seconds) return false;
    oldest = std::min(oldest, image.seq);
    const auto [it, is_new] = images.try_emplace(image.key, candidate);
    if (!is_new) {
      if (image.seq >= it->second.image.seq) std::swap(candidate, it->second);
      older.push_back(candidate);
    }
    return true;
  };
  // A segment goes on listing what was not kept, so that it has to be said for as long as there is the segment.
  const auto keep = [&](const ImageEntry& entry, DiskPlace place) {
    const bool kept = found_at(entry, place);
    if (kept) segments.insert(place.segment);
    if (!kept) tier.manifest_->Note(FreedEntry{place});
    return kept;
  };
  KVFERRY_RETURN_IF_ERROR(tier.log_->Recover([&](const ChunkKey& key) { return layouts.Of(key); }, keep));
  segments.insert(tier.log_->unread().begin(), tier.log_->unread().end());
  if (!tier.log_->unread().empty()) oldest = 0;  // nobody knows how old the images are that could not be read
  // Copies of one image: the later ones may have been given up, and the earlier ones too.
  const auto whole = [&](const Image& image) {
    AlignedBuffer bytes(image.image.blocks * kDiskAlignment);
    return tier.log_->ReadNow(image.place, 0, bytes.view()).ok() &&
           CheckImage(bytes.view(), [&](const ChunkKey& key) { return layouts.Of(key); }).ok();
  };
  for (Image& image : older) {
    Image& chosen = images.at(image.image.key);
    if (image.image.seq == chosen.image.seq && !whole(chosen)) std::swap(image, chosen);
  }
  for (const Image& image : older) tier.manifest_->Note(FreedEntry{image.place});
  KVFERRY_RETURN_IF_ERROR(tier.manifest_->Compact(oldest, segments));
  tier.closed_ = false;
  for (const Image& image : older) tier.log_->Free(image.place, image.image.blocks * kDiskAlignment);
  for (const auto& [key, image] : images) {
    found({tier.manifest_->Find(key.ns), image.image, image.header_seq, image.place});
  }
  opened.next_seq = youngest + 1;
  return opened;
}

DiskTier::~DiskTier() {
  if (!closed_) Close([] {});
}

void DiskTier::Close(absl::AnyInvocable<void()> done) {
  closed_ = true;
  relocator_->Stop();
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
  relocator_->Freed(place);
}

void DiskTier::Trim(DiskPlace place, uint64_t bytes, IoDone done) {
  manifest_->Note(FreedEntry{place});
  log_->Free(place, bytes, std::move(done));
  relocator_->Freed(place);
}

void DiskTier::Publish(DiskPlace place, const ImageEntry& as) {
  manifest_->Note(PublishedEntry{place, as.key, as.parent, as.seq, as.lifetime});
  relocator_->Published(place, as);
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
  relocator_->Retry();
  log_->Sync([this, done = std::move(done)](const absl::Status& synced) mutable {
    manifest_->Append({}, [synced, done = std::move(done)](const absl::Status& said) mutable {
      std::move(done)(synced.ok() ? said : synced);
    });
  });
}

}  // namespace kvferry
