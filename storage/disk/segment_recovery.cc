// What a start finds in the segments of a folder.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/disk/file_name.h"
#include "storage/disk/segment_log.h"

namespace kvferry {
namespace {

constexpr uint64_t kScanWindow = kMiB;

std::string NameOf(uint32_t number) { return NumberedName(kSegmentPrefix, number); }

}  // namespace

absl::Status SegmentLog::Recover(LayoutOf layout_of, Keep keep) {
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::string> names, folder_->List());
  for (const std::string& name : names) {
    const std::optional<uint32_t> number = NumberInName(kSegmentPrefix, name);
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
  absl::StatusOr<Listed> listed = ReadFooter(*segment, bytes);
  if (absl::IsFailedPrecondition(listed.status())) return listed.status();
  const bool scanned = !listed.ok();
  bool all_read = true;
  const std::vector<ImageEntry> images =
      scanned ? Scan(*segment, bytes, layout_of, &all_read) : std::move(listed->images);
  if (!all_read) unread_.insert(number);
  std::vector<ImageEntry> kept;
  for (const ImageEntry& image : images) {
    if (!keep(image, {number, image.block})) continue;
    kept.push_back(image);
    segment->live_blocks += image.blocks;
  }
  {
    MutexLock lock(&mu_);
    last_number_ = std::max(last_number_, number);
  }
  if (kept.empty() && all_read) {
    KVFERRY_RETURN_IF_ERROR(folder_->Remove(NameOf(number)));
    if (options_.removed) options_.removed(number);
    return absl::OkStatus();
  }
  // What is dead gives its room back, and so does what lies between images that a crash has left.
  uint64_t end = 1;
  for (const ImageEntry& image : kept) {
    if (image.block > end && all_read) {
      absl::Status punched = segment->file->Punch(end * kDiskAlignment, (image.block - end) * kDiskAlignment);
      segment->holes = segment->holes && !absl::IsUnimplemented(punched);
      if (segment->holes && !punched.ok()) return punched;
    }
    end = uint64_t{image.block} + image.blocks;
  }
  segment->next = scanned ? end : listed->place.block;
  if (scanned && all_read) {
    KVFERRY_RETURN_IF_ERROR(segment->file->SyncNow());  // what a footer names is there
    KVFERRY_RETURN_IF_ERROR(WriteFooter(*segment, end, std::move(kept)));
  }
  KVFERRY_ASSIGN_OR_RETURN(segment->allocated, segment->file->AllocatedBytes());
  {
    MutexLock lock(&mu_);
    allocated_ += segment->allocated;
    segments_[number] = segment;
  }
  VacateIfDue(segment);
  return absl::OkStatus();
}

// FAILED_PRECONDITION: not ours to read. Any other error: there is no footer.
absl::StatusOr<SegmentLog::Listed> SegmentLog::ReadFooter(const Segment& segment, uint64_t bytes) const {
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
  KVFERRY_ASSIGN_OR_RETURN(std::vector<ImageEntry> images, DecodeFooter(*place, footer.view()));
  return Listed{*place, std::move(images)};
}

// Looks at every block of the file for an image that is whole.
std::vector<ImageEntry> SegmentLog::Scan(const Segment& segment, uint64_t bytes, LayoutOf layout_of, bool* all) {
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
        KVFERRY_LOG(kWarning, absl::StrCat("disk: what lies behind is not found at this start: ", read.message()));
        *all = false;
        break;
      }
    }
    const absl::StatusOr<ChunkHeader> header = DecodeHeader(window.view().subspan(at - from, to - at));
    const ChunkLayout* layout = header.ok() ? layout_of(header->key) : nullptr;
    uint64_t step = kDiskAlignment;
    if (layout != nullptr && layout->image_bytes == header->image_bytes && at + header->image_bytes <= end) {
      AlignedBuffer image(header->image_bytes);
      const absl::Status read = segment.file->ReadNow(at, image.view());
      *all = *all && read.ok();
      if (read.ok() && CheckImage(image.view(), layout_of).ok()) {
        ImageEntry& entry = images.emplace_back();
        entry.key = header->key;
        entry.parent = header->parent;
        entry.seq = header->seq;
        entry.lifetime = header->lifetime;
        entry.block = static_cast<uint32_t>(at / kDiskAlignment);
        entry.blocks = static_cast<uint32_t>(header->image_bytes / kDiskAlignment);
        step = header->image_bytes;
      }
    }
    at += step;
  }
  return images;
}

}  // namespace kvferry
