#include "storage/extent_pool.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

void ExtentPool::Add(std::unique_ptr<Segment> segment) {
  const uint64_t bytes = segment->bytes();
  Holes& holes = segments_[segment->id()];
  holes.segment = std::move(segment);
  mapped_bytes_ += bytes;
  Insert(holes, 0, bytes);
}

std::optional<Extent> ExtentPool::Allocate(uint64_t bytes) {
  const auto fit = by_size_.lower_bound(Hole(bytes, 0, 0));
  if (fit == by_size_.end()) return std::nullopt;
  const auto [hole_bytes, segment_id, offset] = *fit;
  Holes& holes = segments_.at(segment_id);
  Erase(holes, holes.by_offset.find(offset));
  if (hole_bytes > bytes) Insert(holes, offset + bytes, hole_bytes - bytes);
  return Extent{holes.segment.get(), offset, bytes};
}

bool ExtentPool::Free(const Extent& extent) {
  Holes& holes = segments_.at(extent.segment->id());
  uint64_t offset = extent.offset;
  uint64_t bytes = extent.bytes;
  auto next = holes.by_offset.lower_bound(offset);
  if (next != holes.by_offset.end() && next->first == offset + bytes) {
    bytes += next->second;
    Erase(holes, next);
  }
  auto before = holes.by_offset.lower_bound(offset);
  if (before != holes.by_offset.begin()) {
    before = std::prev(before);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      Erase(holes, before);
    }
  }
  Insert(holes, offset, bytes);
  return bytes == holes.segment->bytes();
}

std::unique_ptr<Segment> ExtentPool::TakeFreeSegment() {
  // A wholly free segment is a hole of its own size; only as many holes as are larger than it come before.
  for (auto hole = by_size_.rbegin(); hole != by_size_.rend() && whole_free_bytes_ != 0; ++hole) {
    const auto [bytes, segment_id, offset] = *hole;
    Holes& holes = segments_.at(segment_id);
    if (bytes != holes.segment->bytes()) continue;
    Erase(holes, holes.by_offset.find(offset));
    std::unique_ptr<Segment> segment = std::move(holes.segment);
    mapped_bytes_ -= segment->bytes();
    segments_.erase(segment_id);
    return segment;
  }
  return nullptr;
}

void ExtentPool::Insert(Holes& holes, uint64_t offset, uint64_t bytes) {
  holes.by_offset.emplace(offset, bytes);
  by_size_.emplace(bytes, holes.segment->id(), offset);
  free_bytes_ += bytes;
  if (bytes == holes.segment->bytes()) whole_free_bytes_ += bytes;
}

void ExtentPool::Erase(Holes& holes, absl::btree_map<uint64_t, uint64_t>::iterator hole) {
  const auto [offset, bytes] = *hole;
  by_size_.erase(Hole(bytes, holes.segment->id(), offset));
  holes.by_offset.erase(hole);
  free_bytes_ -= bytes;
  if (bytes == holes.segment->bytes()) whole_free_bytes_ -= bytes;
}

absl::Status ExtentPool::CheckInvariants() const {
  uint64_t mapped = 0, free = 0, whole = 0, count = 0;
  for (const auto& [id, holes] : segments_) {
    mapped += holes.segment->bytes();
    uint64_t end = 0;
    for (const auto& [offset, bytes] : holes.by_offset) {
      if (bytes == 0 || (offset <= end && offset != 0) || offset + bytes > holes.segment->bytes()) {
        return absl::InternalError(absl::StrCat("segment ", id, ": hole ", offset, "+", bytes, " after ", end));
      }
      if (!by_size_.contains(Hole(bytes, id, offset))) {
        return absl::InternalError(absl::StrCat("segment ", id, ": hole ", offset, "+", bytes, " is not in by_size_"));
      }
      end = offset + bytes;
      free += bytes;
      ++count;
      if (bytes == holes.segment->bytes()) whole += bytes;
    }
  }
  if (count != by_size_.size() || mapped != mapped_bytes_ || free != free_bytes_ || whole != whole_free_bytes_) {
    return absl::InternalError(absl::StrCat("holes ", count, "/", by_size_.size(), ", mapped ", mapped, "/",
                                            mapped_bytes_, ", free ", free, "/", free_bytes_, ", whole ", whole, "/",
                                            whole_free_bytes_));
  }
  return absl::OkStatus();
}

}  // namespace kvferry
