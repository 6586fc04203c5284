#include "storage/disk/segment_log.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/disk/file_name.h"

namespace kvferry {
namespace {

constexpr uint64_t kSparse = 4;  // a segment is where less than one block in so many is live

std::string NameOf(uint32_t number) { return NumberedName(kSegmentPrefix, number); }

uint64_t BlocksOf(const IoPieces& pieces) {
  uint64_t bytes = 0;
  for (const ByteView& piece : pieces) bytes += piece.size();
  return bytes / kDiskAlignment;
}

}  // namespace

void SegmentLog::Wait() {
  MutexLock lock(&mu_);
  while (under_way_ != 0) idle_.Wait(&mu_);
}

// ---- appending ----

bool SegmentLog::Fits(const Segment& segment, uint64_t blocks) const {
  const uint64_t footer = FooterBytes(segment.images.size() + static_cast<size_t>(segment.writing) + 1);
  return segment.next + blocks + footer / kDiskAlignment <= segment.blocks;
}

uint64_t SegmentLog::RoomFor(uint64_t blocks) const {
  const uint64_t least = (1 + blocks) * kDiskAlignment + FooterBytes(1);
  return RoundUp(std::max(options_.segment_bytes, least), kDiskAlignment);
}

bool SegmentLog::MayGrow(uint64_t blocks) const { return allocated_ + growing_ + RoomFor(blocks) <= options_.bytes; }

bool SegmentLog::HasRoom(uint64_t bytes) const {
  const uint64_t blocks = bytes / kDiskAlignment;
  MutexLock lock(&mu_);
  return (active_ != nullptr && waiting_.empty() && Fits(*active_, blocks)) || MayGrow(blocks);
}

uint64_t SegmentLog::Lack(uint64_t bytes) const {
  const uint64_t blocks = bytes / kDiskAlignment;
  MutexLock lock(&mu_);
  if (growing_ != 0 || (active_ != nullptr && Fits(*active_, blocks))) return 0;
  const uint64_t taken = allocated_ - std::min(allocated_, freeing_) + RoomFor(blocks);
  return taken > options_.bytes ? taken - options_.bytes : 0;
}

void SegmentLog::Append(IoPieces image, const ImageEntry& entry, AppendDone done) {
  Pending pending{std::move(image), entry, std::move(done)};
  pending.entry.blocks = static_cast<uint32_t>(BlocksOf(pending.image));
  {
    MutexLock lock(&mu_);
    ++under_way_;
    waiting_.push_back(std::move(pending));
  }
  StartWaiting();
}

void SegmentLog::StartWaiting() {
  for (;;) {
    SegmentPtr segment;
    std::optional<Pending> pending;
    {
      MutexLock lock(&mu_);
      if (waiting_.empty()) return;
      const uint64_t blocks = waiting_.front().entry.blocks;
      if (active_ != nullptr && Fits(*active_, blocks)) {
        segment = active_;
        waiting_.front().entry.block = static_cast<uint32_t>(segment->next);
        segment->next += blocks;
        segment->live_blocks += blocks;
        ++segment->writing;
      } else if (growing_ != 0) {
        return;  // whoever makes it goes on here
      } else if (MayGrow(blocks)) {
        if (active_ != nullptr) Retire(std::exchange(active_, nullptr));
        growing_ = RoomFor(blocks);
        Post([this, number = ++last_number_, bytes = growing_] { Grow(number, bytes); });
        return;
      }
      pending = std::move(waiting_.front());
      waiting_.pop_front();
    }
    if (segment == nullptr) {
      absl::Status full = absl::ResourceExhaustedError(
          absl::StrCat("disk: no room for ", uint64_t{pending->entry.blocks} * kDiskAlignment, " bytes, bound ",
                       options_.bytes, ", taken ", usage().bytes));
      folder_->Post([this, full = std::move(full), pending = *std::move(pending)]() mutable {
        std::move(pending.done)(std::move(full));
        End();
      });
      continue;
    }
    File* file = segment->file.get();
    const uint64_t offset = uint64_t{pending->entry.block} * kDiskAlignment;
    IoPieces image = pending->image;
    file->Write(offset, std::move(image),
                [this, segment = std::move(segment), pending = *std::move(pending)](absl::Status status) mutable {
                  Written(segment, std::move(pending), status);
                });
  }
}

void SegmentLog::Written(const SegmentPtr& segment, Pending pending, const absl::Status& status) {
  const DiskPlace place = {segment->number, pending.entry.block};
  {
    MutexLock lock(&mu_);
    --segment->writing;
    ++segment->written;
    if (status.ok()) {
      segment->images.push_back(pending.entry);
    } else if (active_ == segment) {
      active_ = nullptr;  // the next one may lie where the disk is sound
      segment->retired = true;
    }
    if (segment->retired && segment->writing == 0) Post([this, segment] { Seal(segment); });
  }
  if (!status.ok()) Free(place, uint64_t{pending.entry.blocks} * kDiskAlignment);
  if (status.ok()) {
    std::move(pending.done)(place);
  } else {
    std::move(pending.done)(status);
  }
  End();
}

void SegmentLog::Grow(uint32_t number, uint64_t bytes) {
  absl::StatusOr<SegmentPtr> segment = Create(number, bytes);
  std::deque<Pending> refused;
  {
    MutexLock lock(&mu_);
    growing_ = 0;
    if (segment.ok()) {
      active_ = *segment;
      segments_[number] = *segment;
      allocated_ += active_->allocated;
    } else {
      refused = std::exchange(waiting_, {});
    }
  }
  for (Pending& pending : refused) {
    std::move(pending.done)(segment.status());
    End();
  }
  StartWaiting();
}

absl::StatusOr<SegmentLog::SegmentPtr> SegmentLog::Create(uint32_t number, uint64_t bytes) {
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t free, folder_->FreeBytes());
  if (free < bytes + options_.keep_free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("disk: the volume has ", free, " bytes left, expected at least ",
                                                     bytes + options_.keep_free_bytes, " for another segment"));
  }
  auto segment = std::make_shared<Segment>();
  segment->number = number;
  segment->blocks = bytes / kDiskAlignment;
  KVFERRY_ASSIGN_OR_RETURN(segment->file, folder_->Create(NameOf(number), bytes));
  AlignedBuffer header(kDiskAlignment);
  EncodeSegmentHeader({options_.store, number}, header.view());
  absl::Status status = segment->file->WriteNow(0, header.view());
  if (status.ok()) status = folder_->Sync();
  absl::StatusOr<uint64_t> allocated = segment->file->AllocatedBytes();
  if (status.ok()) status = allocated.status();
  if (!status.ok()) {
    (void)folder_->Remove(NameOf(number));
    return status;
  }
  segment->allocated = *allocated;
  return segment;
}

// ---- sealing and giving back ----

void SegmentLog::Retire(const SegmentPtr& segment) {
  segment->retired = true;
  if (segment->writing == 0) Post([this, segment] { Seal(segment); });
}

void SegmentLog::Seal(const SegmentPtr& segment) {
  const std::set<uint32_t> only = {segment->number};
  SyncSegments(only, [this, segment](const absl::Status& synced) {
    MutexLock lock(&mu_);
    Post([this, segment, synced] { SealSynced(segment, synced); });
  });
}

void SegmentLog::SealSynced(const SegmentPtr& segment, const absl::Status& synced) {
  std::vector<ImageEntry> images;
  uint64_t next = 0;
  {
    MutexLock lock(&mu_);
    images = segment->images;
    next = segment->next;
  }
  const absl::Status listed = synced.ok() ? WriteFooter(*segment, next, std::move(images)) : synced;
  if (!listed.ok()) {
    KVFERRY_LOG(kWarning, absl::StrCat("disk: no footer, so the next start reads the segment: ", listed.message()));
    (void)segment->file->Truncate(next * kDiskAlignment);
  }
  {
    MutexLock lock(&mu_);
    segment->sealed = true;
    if (listed.ok()) segment->images = {};
    RemoveIfEmpty(segment);
  }
  Recount(segment, 0);
  VacateIfDue(segment);
}

absl::Status SegmentLog::WriteFooter(const Segment& segment, uint64_t next, std::vector<ImageEntry> images) {
  std::sort(images.begin(), images.end(), [](const ImageEntry& a, const ImageEntry& b) { return a.block < b.block; });
  AlignedBuffer footer(FooterBytes(images.size()));
  EncodeFooter(segment.number, static_cast<uint32_t>(next), images, footer.view());
  KVFERRY_RETURN_IF_ERROR(segment.file->WriteNow(next * kDiskAlignment, footer.view()));
  KVFERRY_RETURN_IF_ERROR(segment.file->Truncate(next * kDiskAlignment + footer.size()));
  return segment.file->SyncNow();
}

void SegmentLog::VacateIfDue(const SegmentPtr& segment) {
  {
    MutexLock lock(&mu_);
    const bool sparse = !segment->holes && segment->live_blocks * kSparse < segment->next;
    if (!segment->sealed || segment->vacated || segment->live_blocks == 0) return;
    if (segment->sync_failed.ok() && !sparse) return;
    segment->vacated = true;
  }
  if (options_.vacate) options_.vacate(segment->number);
}

void SegmentLog::Free(DiskPlace place, uint64_t bytes, IoDone done) {
  MutexLock lock(&mu_);
  const auto it = segments_.find(place.segment);
  if (it == segments_.end()) {
    if (done) Post([done = std::move(done)]() mutable { std::move(done)(absl::OkStatus()); });
    return;
  }
  const SegmentPtr segment = it->second;
  segment->live_blocks -= bytes / kDiskAlignment;
  auto& images = segment->images;
  std::erase_if(images, [place](const ImageEntry& image) { return image.block == place.block; });
  const bool goes = RemoveIfEmpty(segment);
  if (goes && !done) return;
  const uint64_t comes_back = goes ? 0 : bytes;
  freeing_ += comes_back;
  Post([this, segment, place, bytes, comes_back, done = std::move(done)]() mutable {
    const absl::Status status = segment->file->Punch(place.offset(), bytes);
    if (absl::IsUnimplemented(status)) {
      MutexLock lock(&mu_);
      segment->holes = false;
    } else if (!status.ok()) {
      KVFERRY_LOG_EVERY(kWarning, absl::Minutes(1), absl::StrCat("disk: room is not given back: ", status.message()));
    }
    Recount(segment, comes_back);
    VacateIfDue(segment);
    if (done) std::move(done)(status);
  });
}

bool SegmentLog::RemoveIfEmpty(const SegmentPtr& segment) {
  if (!segment->sealed || segment->live_blocks != 0 || unread_.contains(segment->number)) return false;
  if (segments_.erase(segment->number) == 0) return false;
  freeing_ += segment->allocated;
  Post([this, segment] {
    const absl::Status status = folder_->Remove(NameOf(segment->number));
    if (!status.ok()) KVFERRY_LOG(kWarning, absl::StrCat("disk: ", status.message()));
    if (status.ok() && options_.removed) options_.removed(segment->number);
    {
      MutexLock lock(&mu_);
      allocated_ -= segment->allocated;
      freeing_ -= segment->allocated;
    }
    if (options_.freed) options_.freed();
  });
  return true;
}

void SegmentLog::Recount(const SegmentPtr& segment, uint64_t freed) {
  const absl::StatusOr<uint64_t> now = segment->file->AllocatedBytes();
  {
    MutexLock lock(&mu_);
    freeing_ -= freed;
    if (now.ok() && segments_.find(segment->number) != segments_.end()) {
      allocated_ += *now - segment->allocated;
      segment->allocated = *now;
    }
  }
  if (options_.freed) options_.freed();
}

// ---- reading and syncing ----

// NOT_FOUND: it is gone.
absl::StatusOr<SegmentLog::SegmentPtr> SegmentLog::Find(uint32_t number) const {
  MutexLock lock(&mu_);
  const auto it = segments_.find(number);
  if (it == segments_.end()) return absl::NotFoundError(absl::StrCat("disk: ", NameOf(number), " is gone"));
  return it->second;
}

void SegmentLog::Read(DiskPlace place, uint64_t offset, MutableByteView to, IoDone done) {
  Begin();
  absl::StatusOr<SegmentPtr> segment = Find(place.segment);
  if (!segment.ok()) {
    folder_->Post([this, status = segment.status(), done = std::move(done)]() mutable {
      std::move(done)(std::move(status));
      End();
    });
    return;
  }
  std::shared_ptr<File> file = (*segment)->file;
  File* const raw = file.get();
  raw->Read(place.offset() + offset, to,
            [this, file = std::move(file), done = std::move(done)](absl::Status status) mutable {
              std::move(done)(std::move(status));
              file = nullptr;
              End();
            });
}

absl::Status SegmentLog::ReadNow(DiskPlace place, uint64_t offset, MutableByteView to) const {
  KVFERRY_ASSIGN_OR_RETURN(const SegmentPtr segment, Find(place.segment));
  return segment->file->ReadNow(place.offset() + offset, to);
}

absl::StatusOr<std::vector<ImageEntry>> SegmentLog::Images(uint32_t number) const {
  KVFERRY_ASSIGN_OR_RETURN(const SegmentPtr segment, Find(number));
  {
    MutexLock lock(&mu_);
    if (!segment->images.empty()) return segment->images;
  }
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t bytes, segment->file->Size());
  KVFERRY_ASSIGN_OR_RETURN(Listed listed, ReadFooter(*segment, bytes));
  return std::move(listed.images);
}

// Answers once the last of those that hold it has let go.
struct SegmentLog::SyncAnswer {
  explicit SyncAnswer(IoDone d) : done(std::move(d)) {}
  ~SyncAnswer() { std::move(done)(status); }
  void Add(const absl::Status& of_one) {
    MutexLock lock(&mu);
    if (!of_one.ok()) status = of_one;
  }
  IoDone done;
  Mutex mu;
  absl::Status status;
};

void SegmentLog::SyncThese(const std::set<uint32_t>* only, IoDone done) {
  const auto answer = std::make_shared<SyncAnswer>(std::move(done));
  std::vector<SegmentPtr> idle;
  {
    MutexLock lock(&mu_);
    for (const auto& [number, segment] : segments_) {
      if (only != nullptr && !only->contains(number)) continue;
      if (segment->sync_failed.ok() && segment->synced >= segment->written) continue;
      segment->askers.push_back(answer);
      if (!std::exchange(segment->syncing, true)) idle.push_back(segment);
    }
    Post([answer] {});  // never inside the call
    under_way_ += static_cast<int>(idle.size());
  }
  for (const SegmentPtr& segment : idle) RunSync(segment);
}

// One at a time: the kernel tells of what it could not write but once, so that of two syncs at a time one would be told
// that all is well.
void SegmentLog::RunSync(const SegmentPtr& segment) {
  for (;;) {
    std::vector<std::shared_ptr<SyncAnswer>> askers;
    uint64_t written = 0;
    absl::Status known;
    {
      MutexLock lock(&mu_);
      askers = std::exchange(segment->askers, {});
      segment->syncing = !askers.empty();
      if (askers.empty()) break;
      known = segment->sync_failed;
      if (known.ok() && segment->synced < segment->written) written = segment->written;
    }
    if (written != 0) {
      File* const file = segment->file.get();
      file->Sync([this, segment, written, askers = std::move(askers)](const absl::Status& status) mutable {
        {
          MutexLock lock(&mu_);
          if (status.ok()) {
            segment->synced = written;
          } else {
            segment->sync_failed = status;
            if (active_ == segment) Retire(std::exchange(active_, nullptr));
          }
        }
        for (const auto& asker : askers) asker->Add(status);
        askers.clear();
        if (!status.ok()) VacateIfDue(segment);
        RunSync(segment);
      });
      return;
    }
    for (const auto& asker : askers) asker->Add(known);
  }
  End();
}

void SegmentLog::Close(absl::AnyInvocable<void()> done) {
  MutexLock lock(&mu_);
  closed_ = std::move(done);
  if (active_ != nullptr) Retire(std::exchange(active_, nullptr));
  Post([] {});
}

SegmentLog::Usage SegmentLog::usage() const {
  Usage usage;
  MutexLock lock(&mu_);
  usage.segments = segments_.size();
  usage.bytes = allocated_;
  for (const auto& [number, segment] : segments_) usage.live_bytes += segment->live_blocks * kDiskAlignment;
  return usage;
}

void SegmentLog::Post(absl::AnyInvocable<void()> task) {
  ++under_way_;
  folder_->Post([this, task = std::move(task)]() mutable {
    std::move(task)();
    task = nullptr;
    End();
  });
}

void SegmentLog::Begin() {
  MutexLock lock(&mu_);
  ++under_way_;
}

void SegmentLog::End() {
  absl::AnyInvocable<void()> closed;
  {
    MutexLock lock(&mu_);
    if (--under_way_ != 0) return;
    closed = std::exchange(closed_, nullptr);
    idle_.NotifyAll();
  }
  if (closed) std::move(closed)();
}

}  // namespace kvferry
