// Writes images elsewhere that lie in segments which are to go: those that are nearly empty where the file system has
// no holes, and those whose sync failed.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/chunk_image.h"
#include "storage/base/mutex.h"
#include "storage/disk/file.h"
#include "storage/disk/manifest.h"
#include "storage/disk/segment_log.h"

namespace kvferry {

// A few images at a time: the next ones are begun when the owner has answered for those. What fails, for want of room
// or because the disk does, is tried again when the owner next frees or flushes. Thread-safe; no call blocks, and
// `moved` runs on the folder's threads, under no lock. While it works, something of the log's is under way.
class Relocator {
 public:
  // See DiskTierOptions::moved. If it is empty nothing is moved.
  using Moved = std::function<void(const ImageEntry& image, uint64_t header_seq, DiskPlace from,
                                   const absl::StatusOr<DiskPlace>& to)>;

  Relocator(SegmentLog* log, Manifest* manifest, Folder* folder, Moved moved)
      : log_(log), manifest_(manifest), folder_(folder), moved_(std::move(moved)) {}

  // Images of this sealed segment are to lie elsewhere.
  void Vacate(uint32_t segment) ABSL_LOCKS_EXCLUDED(mu_);
  // The owner has freed the place, which may be an answer.
  void Freed(DiskPlace place) ABSL_LOCKS_EXCLUDED(mu_);
  // The manifest has been told that the image at the place is published as `as`; a copy of it is as well.
  void Published(DiskPlace place, const ImageEntry& as) ABSL_LOCKS_EXCLUDED(mu_);
  // Goes on with what failed.
  void Retry() ABSL_LOCKS_EXCLUDED(mu_);
  // Nothing is begun any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Copy {
    ImageEntry image;  // as its segment lists it
    uint64_t header_seq = 0;
    DiskPlace from, to;
  };

  void Start() ABSL_LOCKS_EXCLUDED(mu_);
  bool MayRun() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool stopped() const ABSL_LOCKS_EXCLUDED(mu_);
  // The steps of a run, each of which ends in another one. Next() copies the next image; Settle() makes the copies
  // durable; Tell() hands them to the owner, or Undo() drops them.
  void Next() ABSL_LOCKS_EXCLUDED(mu_);
  bool NextSegment() ABSL_LOCKS_EXCLUDED(mu_);
  void Read(const ImageEntry& image, DiskPlace from) ABSL_LOCKS_EXCLUDED(mu_);
  void Settle() ABSL_LOCKS_EXCLUDED(mu_);
  void Tell() ABSL_LOCKS_EXCLUDED(mu_);
  void Undo(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish() ABSL_LOCKS_EXCLUDED(mu_);
  // What comes next is tried when the owner next frees or flushes.
  void Stall(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<ChunkHeader> Check(const ImageEntry& image, ByteView bytes) const;
  void Drop(const Copy& copy) ABSL_LOCKS_EXCLUDED(mu_);

  SegmentLog* const log_;
  Manifest* const manifest_;
  Folder* const folder_;
  const Moved moved_;

  mutable Mutex mu_;
  std::deque<uint32_t> segments_ ABSL_GUARDED_BY(mu_);  // to vacate; the first one is being vacated
  std::vector<std::pair<DiskPlace, DiskPlace>> unanswered_ ABSL_GUARDED_BY(mu_);  // from, to
  bool running_ ABSL_GUARDED_BY(mu_) = false;
  bool stalled_ ABSL_GUARDED_BY(mu_) = true;  // at first: until the owner knows what there is
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;

  // Of the run: there is one at a time.
  uint32_t segment_ = 0;            // that images_ are of; 0: none
  std::deque<ImageEntry> images_;   // still to be moved
  std::vector<Copy> copies_;        // written, and not yet told
  std::map<uint32_t, int> unread_;  // reads of the segment's images that have failed, by block
};

}  // namespace kvferry
