#include "storage/disk/relocator.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/disk/image_check.h"
#include "storage/disk/layouts.h"

namespace kvferry {
namespace {

constexpr size_t kAtATime = 8;  // images that share a sync
constexpr int kReads = 3;       // of an image, before it is lost

uint64_t BytesOf(const ImageEntry& image) { return uint64_t{image.blocks} * kDiskAlignment; }

}  // namespace

void Relocator::Vacate(uint32_t segment) {
  if (!moved_) return;
  {
    MutexLock lock(&mu_);
    segments_.push_back(segment);
  }
  Start();
}

void Relocator::Freed(DiskPlace place) {
  {
    MutexLock lock(&mu_);
    std::erase_if(unanswered_, [place](const auto& move) { return move.first == place || move.second == place; });
  }
  Retry();
}

void Relocator::Published(DiskPlace place, const ImageEntry& as) {
  DiskPlace to;
  {
    MutexLock lock(&mu_);
    for (const auto& move : unanswered_) {
      if (move.first == place) to = move.second;
    }
  }
  if (to) manifest_->Note(PublishedEntry{to, as.key, as.parent, as.seq, as.lifetime});
}

void Relocator::Retry() {
  {
    MutexLock lock(&mu_);
    stalled_ = false;
  }
  Start();
}

void Relocator::Stop() {
  MutexLock lock(&mu_);
  stopped_ = true;
}

bool Relocator::stopped() const {
  MutexLock lock(&mu_);
  return stopped_;
}

bool Relocator::MayRun() const { return !stopped_ && !stalled_ && unanswered_.empty() && !segments_.empty(); }

void Relocator::Start() {
  {
    MutexLock lock(&mu_);
    if (running_ || !MayRun()) return;
    running_ = true;
  }
  log_->Begin();
  folder_->Post([this] { Next(); });
}

void Relocator::Next() {
  for (;;) {
    if (copies_.size() >= kAtATime || (images_.empty() && !copies_.empty())) return Settle();
    if (images_.empty() && !NextSegment()) return Finish();
    if (images_.empty()) continue;
    const ImageEntry image = images_.front();
    const DiskPlace from = {segment_, image.block};
    ImageEntry resolved = image;
    if (!manifest_->Resolve(from, &resolved)) {  // dead: its owner frees it, or has
      images_.pop_front();
      continue;
    }
    const bool stop = stopped();
    if (!stop && log_->HasRoom(BytesOf(image))) {
      images_.pop_front();
      return Read(image, from);
    }
    if (!stop) Stall(absl::ResourceExhaustedError("there is no room elsewhere"));
    return copies_.empty() ? Finish() : Settle();
  }
}

bool Relocator::NextSegment() {
  for (;;) {
    {
      MutexLock lock(&mu_);
      if (segment_ != 0) segments_.pop_front();
      segment_ = segments_.empty() ? 0 : segments_.front();
      if (segment_ == 0) return false;
    }
    absl::StatusOr<std::vector<ImageEntry>> images = log_->Images(segment_);
    if (images.ok()) {
      images_.assign(images->begin(), images->end());
      unread_.clear();
      return true;
    }
    if (absl::IsNotFound(images.status())) continue;  // all that was there has been freed
    Stall(images.status());
    MutexLock lock(&mu_);
    segments_.pop_front();
    segments_.push_back(std::exchange(segment_, 0));  // others may fare better
    return false;
  }
}

void Relocator::Read(const ImageEntry& image, DiskPlace from) {
  auto bytes = std::make_shared<AlignedBuffer>(BytesOf(image));
  const MutableByteView to = bytes->view();
  log_->Read(from, 0, to, [this, image, from, bytes](absl::Status read) {
    ImageEntry resolved = image;
    if (absl::IsNotFound(read) || !manifest_->Resolve(from, &resolved)) return Next();  // it was freed meanwhile
    if (stopped()) {
      images_.push_front(image);
      return Next();
    }
    if (!read.ok() && ++unread_[image.block] < kReads) {
      images_.push_back(image);
      Stall(read);
      return copies_.empty() ? Finish() : Settle();
    }
    absl::StatusOr<ChunkHeader> header = read.ok() ? Check(resolved, bytes->view()) : std::move(read);
    if (!header.ok()) {
      KVFERRY_LOG(kError, absl::StrCat("disk: a chunk is lost: ", header.status().message()));
      moved_(resolved, 0, from, header.status());
      return Next();
    }
    ImageEntry entry;  // as the header has it; what the manifest says of it is said of the copy as well
    entry.key = header->key;
    entry.parent = header->parent;
    entry.seq = header->seq;
    entry.lifetime = resolved.lifetime;
    const ByteView view = bytes->view();
    log_->Append({view}, entry, [this, image, from, seq = header->seq, bytes](absl::StatusOr<DiskPlace> to) {
      if (to.ok()) {
        copies_.push_back({image, seq, from, *to});
        return Next();
      }
      images_.push_front(image);
      Stall(to.status());
      copies_.empty() ? Finish() : Settle();
    });
  });
}

absl::StatusOr<ChunkHeader> Relocator::Check(const ImageEntry& image, ByteView bytes) const {
  Layouts layouts(manifest_);
  KVFERRY_ASSIGN_OR_RETURN(ChunkHeader header,
                           CheckImage(bytes, [&layouts](const ChunkKey& key) { return layouts.Of(key); }));
  if (header.key.ns != image.key.ns || header.key.group != image.key.group || header.key.shard != image.key.shard) {
    return absl::DataLossError("image: it is another chunk's");
  }
  return header;
}

void Relocator::Settle() {
  std::set<uint32_t> segments;
  for (const Copy& copy : copies_) segments.insert(copy.to.segment);
  log_->SyncSegments(segments, [this](const absl::Status& synced) {
    if (!synced.ok()) return Undo(synced);
    {
      MutexLock lock(&mu_);
      for (const Copy& copy : copies_) unanswered_.emplace_back(copy.from, copy.to);
    }
    // From here on Published() says of the copy what it says of the image, and here is what was said before.
    for (const Copy& copy : copies_) manifest_->NoteCopy(copy.from, copy.to, copy.image);
    manifest_->Append({}, [this](const absl::Status& said) { said.ok() ? Tell() : Undo(said); });
  });
}

void Relocator::Tell() {
  for (const Copy& copy : std::exchange(copies_, {})) {
    ImageEntry image = copy.image;
    if (manifest_->Resolve(copy.from, &image)) {
      moved_(image, copy.header_seq, copy.from, copy.to);
    } else {
      Drop(copy);
    }
  }
  Finish();
}

void Relocator::Undo(const absl::Status& why) {
  for (const Copy& copy : std::exchange(copies_, {})) {
    Drop(copy);
    images_.push_front(copy.image);
  }
  Stall(why);
  Finish();
}

void Relocator::Drop(const Copy& copy) {
  {
    MutexLock lock(&mu_);
    std::erase_if(unanswered_, [&copy](const auto& move) { return move.second == copy.to; });
  }
  manifest_->Note(FreedEntry{copy.to});
  log_->Free(copy.to, BytesOf(copy.image));
}

void Relocator::Stall(const absl::Status& why) {
  KVFERRY_LOG_EVERY(kWarning, absl::Minutes(1),
                    absl::StrCat("disk: images stay where they are for now: ", why.message()));
  MutexLock lock(&mu_);
  stalled_ = true;
}

void Relocator::Finish() {
  bool more = false;
  {
    MutexLock lock(&mu_);
    running_ = more = MayRun();
  }
  if (more) {
    folder_->Post([this] { Next(); });
  } else {
    log_->End();
  }
}

}  // namespace kvferry
