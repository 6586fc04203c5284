#include "storage/disk/segment_log.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "storage/base/log.h"
#include "storage/base/status.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/disk/file_name.h"

namespace kvferry {
namespace {

constexpr uint64_t kScanWindow = kMiB;

std::string NameOf(uint32_t number) { return NumberedName("segment-", number); }
std::optional<uint32_t> NumberOf(absl::string_view name) { return NumberInName("segment-", name); }

uint64_t BlocksOf(const IoPieces& pieces) {
  uint64_t bytes = 0;
  for (const ByteView& piece : pieces) bytes += piece.size();
  return bytes / kDiskAlignment;
}

bool IsWhole(const ChunkHeader& header, const ChunkLayout& layout, ByteView image) {
  for (size_t l = 0; l < layout.slots.size(); ++l) {
    const ChunkLayout::Slot& slot = layout.slots[l];
    if (BlockChecksum(image.subspan(slot.offset, slot.size)) != header.checksums[l]) return false;
  }
  return true;
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
      std::move(pending->done)(absl::ResourceExhaustedError(
          absl::StrCat("disk: no room for ", uint64_t{pending->entry.blocks} * kDiskAlignment, " bytes, bound ",
                       options_.bytes, ", taken ", usage().bytes)));
      End();
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
  std::vector<ImageEntry> images;
  uint64_t written = 0;
  {
    MutexLock lock(&mu_);
    images = segment->images;
    written = segment->written;
  }
  absl::Status status = WriteFooter(*segment, std::move(images));
  if (!status.ok()) {
    KVFERRY_LOG(kWarning, absl::StrCat("disk: no footer, so the next start reads the segment: ", status.message()));
  }
  {
    MutexLock lock(&mu_);
    segment->sealed = true;
    segment->images = {};
    if (status.ok()) segment->synced = std::max(segment->synced, written);
    RemoveIfEmpty(segment);
  }
  Recount(segment, 0);
}

absl::Status SegmentLog::WriteFooter(const Segment& segment, std::vector<ImageEntry> images) {
  std::sort(images.begin(), images.end(), [](const ImageEntry& a, const ImageEntry& b) { return a.block < b.block; });
  KVFERRY_RETURN_IF_ERROR(segment.file->SyncNow());  // what a footer names is there
  AlignedBuffer footer(FooterBytes(images.size()));
  const auto block = static_cast<uint32_t>(segment.next);
  EncodeFooter(segment.number, block, images, footer.view());
  KVFERRY_RETURN_IF_ERROR(segment.file->WriteNow(segment.next * kDiskAlignment, footer.view()));
  KVFERRY_RETURN_IF_ERROR(segment.file->Truncate(segment.next * kDiskAlignment + footer.size()));
  return segment.file->SyncNow();
}

void SegmentLog::Free(DiskPlace place, uint64_t bytes) {
  MutexLock lock(&mu_);
  const auto it = segments_.find(place.segment);
  if (it == segments_.end()) return;
  const SegmentPtr segment = it->second;
  segment->live_blocks -= bytes / kDiskAlignment;
  auto& images = segment->images;
  std::erase_if(images, [place](const ImageEntry& image) { return image.block == place.block; });
  if (segment->live_blocks == 0 && segment->sealed) return RemoveIfEmpty(segment);
  freeing_ += bytes;
  Post([this, segment, place, bytes] {
    const absl::Status status = segment->file->Punch(place.offset(), bytes);
    if (!status.ok() && !absl::IsUnimplemented(status)) {
      KVFERRY_LOG_EVERY(kWarning, absl::Minutes(1), absl::StrCat("disk: room is not given back: ", status.message()));
    }
    Recount(segment, bytes);
  });
}

void SegmentLog::RemoveIfEmpty(const SegmentPtr& segment) {
  if (!segment->sealed || segment->live_blocks != 0 || segments_.erase(segment->number) == 0) return;
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

// ---- at start ----

absl::Status SegmentLog::Recover(LayoutOf layout_of, Keep keep) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::string> names, folder_->List());
  for (const std::string& name : names) {
    const std::optional<uint32_t> number = NumberOf(name);
    if (number) KVFERRY_RETURN_IF_ERROR(RecoverOne(*number, layout_of, keep));
  }
  return absl::OkStatus();
}

absl::Status SegmentLog::RecoverOne(uint32_t number, LayoutOf layout_of, Keep keep) {
  auto segment = std::make_shared<Segment>();
  segment->number = number;
  segment->retired = segment->sealed = true;
  KVFERRY_ASSIGN_OR_RETURN(segment->file, folder_->Open(NameOf(number)));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t bytes, segment->file->Size());
  absl::StatusOr<std::vector<ImageEntry>> images = ReadFooter(*segment, bytes);
  if (absl::IsFailedPrecondition(images.status())) return images.status();
  const bool scanned = !images.ok();
  if (scanned) images = Scan(*segment, bytes, layout_of);
  std::vector<ImageEntry> kept;
  for (const ImageEntry& image : *images) {
    if (!keep(image, {number, image.block})) continue;
    kept.push_back(image);
    segment->live_blocks += image.blocks;
  }
  {
    MutexLock lock(&mu_);
    last_number_ = std::max(last_number_, number);
  }
  if (kept.empty()) {
    KVFERRY_RETURN_IF_ERROR(folder_->Remove(NameOf(number)));
    if (options_.removed) options_.removed(number);
    return absl::OkStatus();
  }
  // What is dead gives its room back, and so does what lies between images that a crash has left.
  uint64_t end = 1;
  for (const ImageEntry& image : kept) {
    if (image.block > end) {
      absl::Status punched = segment->file->Punch(end * kDiskAlignment, (image.block - end) * kDiskAlignment);
      if (!punched.ok() && !absl::IsUnimplemented(punched)) return punched;
    }
    end = uint64_t{image.block} + image.blocks;
  }
  if (scanned) {
    segment->next = end;
    KVFERRY_RETURN_IF_ERROR(WriteFooter(*segment, std::move(kept)));
  }
  KVFERRY_ASSIGN_OR_RETURN(segment->allocated, segment->file->AllocatedBytes());
  MutexLock lock(&mu_);
  allocated_ += segment->allocated;
  segments_[number] = std::move(segment);
  return absl::OkStatus();
}

// FAILED_PRECONDITION: not ours to read. Any other error: there is no footer.
absl::StatusOr<std::vector<ImageEntry>> SegmentLog::ReadFooter(Segment& segment, uint64_t bytes) {
  const auto named = [&segment](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(NameOf(segment.number), ": ", status.message()));
  };
  AlignedBuffer block(kDiskAlignment);
  KVFERRY_RETURN_IF_ERROR(segment.file->ReadNow(0, block.view()));
  const absl::StatusOr<SegmentHeader> header = DecodeSegmentHeader(block.view());
  if (!header.ok()) return named(header.status());
  if (header->store != options_.store || header->number != segment.number) {
    return named(absl::FailedPreconditionError("the segment belongs to another store's folder"));
  }
  const uint64_t whole = bytes - bytes % kDiskAlignment;
  if (whole < 2 * kDiskAlignment) return absl::DataLossError("no footer");
  KVFERRY_RETURN_IF_ERROR(segment.file->ReadNow(whole - kDiskAlignment, block.view()));
  const absl::StatusOr<FooterPlace> place = DecodeTrailer(block.view(), bytes);
  if (!place.ok()) return named(place.status());
  if (place->number != segment.number) return absl::DataLossError("a footer of another segment");
  AlignedBuffer footer(FooterBytes(place->count));
  KVFERRY_RETURN_IF_ERROR(segment.file->ReadNow(place->offset(), footer.view()));
  segment.next = place->block;
  segment.blocks = bytes / kDiskAlignment;
  return DecodeFooter(*place, footer.view());
}

// Looks at every block of the file for an image that is whole.
std::vector<ImageEntry> SegmentLog::Scan(Segment& segment, uint64_t bytes, LayoutOf layout_of) {
  std::vector<ImageEntry> images;
  const uint64_t end = bytes - bytes % kDiskAlignment;
  AlignedBuffer window(std::min(kScanWindow, end));
  uint64_t from = 0, to = 0;  // what the window shows
  for (uint64_t at = kDiskAlignment; at < end;) {
    if (at + kScanWindow / 2 > to && to != end) {
      from = at;
      to = std::min(end, from + kScanWindow);
      const absl::Status read = segment.file->ReadNow(from, window.view().subspan(0, to - from));
      if (!read.ok()) {
        KVFERRY_LOG(kWarning, absl::StrCat("disk: what lies behind is lost: ", read.message()));
        break;
      }
    }
    const absl::StatusOr<ChunkHeader> header = DecodeHeader(window.view().subspan(at - from, to - at));
    const ChunkLayout* layout = header.ok() ? layout_of(header->key) : nullptr;
    uint64_t step = kDiskAlignment;
    if (layout != nullptr && layout->image_bytes == header->image_bytes &&
        layout->slots.size() == header->checksums.size() && at + header->image_bytes <= end) {
      AlignedBuffer image(header->image_bytes);
      if (segment.file->ReadNow(at, image.view()).ok() && IsWhole(*header, *layout, image.view())) {
        ImageEntry& entry = images.emplace_back();
        entry.key = header->key;
        entry.parent = header->parent;
        entry.seq = header->seq;
        entry.block = static_cast<uint32_t>(at / kDiskAlignment);
        entry.blocks = static_cast<uint32_t>(header->image_bytes / kDiskAlignment);
        step = header->image_bytes;
      }
    }
    at += step;
  }
  return images;
}

// ---- reading and syncing ----

void SegmentLog::Read(DiskPlace place, uint64_t offset, MutableByteView to, IoDone done) {
  std::shared_ptr<File> file;
  {
    MutexLock lock(&mu_);
    ++under_way_;
    const auto it = segments_.find(place.segment);
    if (it != segments_.end()) file = it->second->file;
  }
  if (file == nullptr) {
    folder_->Post([this, place, done = std::move(done)]() mutable {
      std::move(done)(absl::NotFoundError(absl::StrCat("disk: ", NameOf(place.segment), " is gone")));
      End();
    });
    return;
  }
  File* const raw = file.get();
  raw->Read(place.offset() + offset, to,
            [this, file = std::move(file), done = std::move(done)](absl::Status status) mutable {
              std::move(done)(std::move(status));
              file = nullptr;
              End();
            });
}

void SegmentLog::Sync(IoDone done) {
  // Answers once the last of those that hold it has let go.
  struct Answer {
    explicit Answer(IoDone d) : done(std::move(d)) {}
    ~Answer() { std::move(done)(status); }
    IoDone done;
    Mutex mu;
    absl::Status status;
  };
  auto answer = std::make_shared<Answer>(std::move(done));
  std::vector<std::pair<SegmentPtr, uint64_t>> dirty;
  {
    MutexLock lock(&mu_);
    for (const auto& [number, segment] : segments_) {
      if (!segment->sync_failed.ok()) answer->status = segment->sync_failed;
      if (segment->synced < segment->written) dirty.emplace_back(segment, segment->written);
    }
    Post([answer] {});  // never inside the call
    under_way_ += static_cast<int>(dirty.size());
  }
  for (auto& [segment, written] : dirty) {
    File* const file = segment->file.get();
    file->Sync([this, answer = answer, segment = segment, written = written](const absl::Status& status) mutable {
      {
        MutexLock lock(&mu_);
        if (status.ok()) {
          segment->synced = std::max(segment->synced, written);
        } else {
          segment->sync_failed = status;
        }
      }
      if (!status.ok()) {
        MutexLock lock(&answer->mu);
        answer->status = status;
      }
      answer = nullptr;
      segment = nullptr;
      End();
    });
  }
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

std::set<uint32_t> SegmentLog::Segments() const {
  std::set<uint32_t> numbers;
  MutexLock lock(&mu_);
  for (const auto& [number, segment] : segments_) numbers.insert(number);
  return numbers;
}

void SegmentLog::Post(absl::AnyInvocable<void()> task) {
  ++under_way_;
  folder_->Post([this, task = std::move(task)]() mutable {
    std::move(task)();
    task = nullptr;
    End();
  });
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
