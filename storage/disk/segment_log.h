// The segment files of a folder: images are appended to the newest one, read from any, and given back one by one.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/mutex.h"
#include "storage/disk/file.h"
#include "storage/disk/image_check.h"
#include "storage/disk/segment_format.h"

namespace kvferry {

struct SegmentLogOptions {
  DiskStoreId store{};
  uint64_t bytes = 0;                     // hard bound on what the segments take of the disk
  uint64_t segment_bytes = 256 * kMiB;    // room of a segment; one image that is larger gets a segment of its own
  uint64_t keep_free_bytes = 256 * kMiB;  // left to others on the volume
  // Told that a segment is gone, under no lock. May be empty.
  std::function<void(uint32_t segment)> removed;
  // Told once, under no lock, that a sealed segment had better go, so that its images should be appended anew and then
  // freed: its sync failed, or the file system has no holes and less than a quarter of it is live. May be empty.
  std::function<void(uint32_t segment)> vacate;
  // Told that room has come back, under no lock. May be empty.
  std::function<void()> freed;
};

// Thread-safe; no call blocks but Recover, ReadNow, Images, Wait and the destructor. Callbacks run on the folder's
// threads, under no lock and never inside the call. Failures name the file. Images never overlap, and no part of a file
// is written twice: whoever reads a place that was freed finds zeros or the image, never another's bytes.
class SegmentLog {
 public:
  using AppendDone = absl::AnyInvocable<void(absl::StatusOr<DiskPlace>)>;

  // `folder` must outlive the log.
  SegmentLog(const SegmentLogOptions& options, Folder* folder) : options_(options), folder_(folder) {}
  // Waits. REQUIRES: no call is in progress.
  ~SegmentLog() { Wait(); }

  // Told of every image that is there, in the order of its segments; false: it is dead and its room is given back.
  using Keep = absl::FunctionRef<bool(const ImageEntry& image, DiskPlace place)>;
  // Before anything else, once. Reads the footers there are; where there is none, since the process was killed, reads
  // the images themselves, leaves out those that are torn, and writes the footer. FAILED_PRECONDITION: a file is of
  // another version, or of another store.
  absl::Status Recover(LayoutOf layout_of, Keep keep);
  // Those of which Recover could not read everything: they stay as they are, so that another start may find the rest.
  const std::set<uint32_t>& unread() const { return unread_; }

  // Whether an image of this size can be appended now, as far as the bounds go.
  bool HasRoom(uint64_t bytes) const;
  // Bytes that are still to be freed before there is, beside those that are coming back already.
  uint64_t Lack(uint64_t bytes) const;

  // Writes an image, whole blocks in all, and tells its place once it can be read. RESOURCE_EXHAUSTED: a bound is
  // reached, or the volume is full.
  void Append(IoPieces image, const ImageEntry& entry, AppendDone done);
  // Fills `to` from `offset` within the image at `place`. NOT_FOUND: there is no such segment any more.
  void Read(DiskPlace place, uint64_t offset, MutableByteView to, IoDone done);
  // The same, and waits: at start.
  absl::Status ReadNow(DiskPlace place, uint64_t offset, MutableByteView to) const;
  // Gives an image's room back, soon. REQUIRES: nobody reads it any more, or minds zeros. `done`, unless it is null, is
  // told when the bytes are gone; UNIMPLEMENTED: not before their segment.
  void Free(DiskPlace place, uint64_t bytes, IoDone done = nullptr);
  // Done when every image whose append was answered before survives a loss of power. After a failure the images of the
  // segment concerned may be lost, so nothing is appended to it any more, and every later Sync fails as well until they
  // have been freed.
  void Sync(IoDone done) { SyncThese(nullptr, std::move(done)); }
  // The same for these segments alone.
  void SyncSegments(const std::set<uint32_t>& segments, IoDone done) { SyncThese(&segments, std::move(done)); }
  // The images of a sealed segment, some of which may have been freed. NOT_FOUND: it is gone. Blocks.
  absl::StatusOr<std::vector<ImageEntry>> Images(uint32_t number) const;

  // Something of the caller's counts as under way until End().
  void Begin() ABSL_LOCKS_EXCLUDED(mu_);
  void End() ABSL_LOCKS_EXCLUDED(mu_);

  // Writes the footer of the segment that was appended to, so that the next start need not read its images. Done when
  // nothing is under way. Nothing may be appended any more.
  void Close(absl::AnyInvocable<void()> done);
  // Until nothing is under way. Blocks.
  void Wait() ABSL_LOCKS_EXCLUDED(mu_);

  // Runs `task`, which may block, on a thread of the folder's; it counts as under way.
  void Run(absl::AnyInvocable<void()> task) {
    MutexLock lock(&mu_);
    Post(std::move(task));
  }

  struct Usage {
    uint64_t segments = 0;
    uint64_t bytes = 0;       // of the disk, as the file system counts
    uint64_t live_bytes = 0;  // of images
  };
  Usage usage() const;

 private:
  struct SyncAnswer;
  struct Segment {
    uint32_t number = 0;
    std::shared_ptr<File> file;
    uint64_t blocks = 0;  // room, header and footer included
    uint64_t next = 1;    // block
    uint64_t live_blocks = 0;
    uint64_t allocated = 0;  // bytes of the disk
    int writing = 0;         // appends under way
    bool retired = false;    // nothing is appended any more
    bool sealed = false;     // has its footer, or will never have one
    uint64_t written = 0;    // appends so far
    uint64_t synced = 0;     // of them, those known to survive
    bool syncing = false;
    std::vector<std::shared_ptr<SyncAnswer>> askers;  // for the next sync
    absl::Status sync_failed;
    bool holes = true;               // freed room comes back
    bool vacated = false;            // `vacate` has been told
    std::vector<ImageEntry> images;  // live ones, until a footer lists them
  };
  using SegmentPtr = std::shared_ptr<Segment>;
  struct Pending {
    IoPieces image;
    ImageEntry entry;
    AppendDone done;
  };

  struct Listed {  // by a footer
    FooterPlace place;
    std::vector<ImageEntry> images;
  };

  absl::StatusOr<SegmentPtr> Find(uint32_t number) const ABSL_LOCKS_EXCLUDED(mu_);
  bool Fits(const Segment& segment, uint64_t blocks) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MayGrow(uint64_t blocks) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t RoomFor(uint64_t blocks) const;
  // Starts what waits, as far as it fits; asks for a segment where nothing does.
  void StartWaiting() ABSL_LOCKS_EXCLUDED(mu_);
  void Written(const SegmentPtr& segment, Pending pending, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void Grow(uint32_t number, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<SegmentPtr> Create(uint32_t number, uint64_t bytes);
  void Retire(const SegmentPtr& segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Seal(const SegmentPtr& segment) ABSL_LOCKS_EXCLUDED(mu_);
  void SealSynced(const SegmentPtr& segment, const absl::Status& synced) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status WriteFooter(const Segment& segment, uint64_t next, std::vector<ImageEntry> images);
  // Tells `vacate` if it is time to.
  void VacateIfDue(const SegmentPtr& segment) ABSL_LOCKS_EXCLUDED(mu_);
  // nullptr: all segments.
  void SyncThese(const std::set<uint32_t>* only, IoDone done) ABSL_LOCKS_EXCLUDED(mu_);
  // Syncs the segment for those who ask, until nobody does any more.
  void RunSync(const SegmentPtr& segment) ABSL_LOCKS_EXCLUDED(mu_);
  // False if it is not empty.
  bool RemoveIfEmpty(const SegmentPtr& segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `freed`: bytes that should have come back.
  void Recount(const SegmentPtr& segment, uint64_t freed) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `task` on a thread of the folder's; it counts as under way until it has ended.
  void Post(absl::AnyInvocable<void()> task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Status RecoverOne(uint32_t number, LayoutOf layout_of, Keep keep);
  absl::StatusOr<Listed> ReadFooter(const Segment& segment, uint64_t bytes) const;
  // *all: whether everything could be read.
  static std::vector<ImageEntry> Scan(const Segment& segment, uint64_t bytes, LayoutOf layout_of, bool* all);

  const SegmentLogOptions options_;
  Folder* const folder_;
  std::set<uint32_t> unread_;  // constant after Recover

  mutable Mutex mu_;
  CondVar idle_;
  std::map<uint32_t, SegmentPtr> segments_ ABSL_GUARDED_BY(mu_);
  SegmentPtr active_ ABSL_GUARDED_BY(mu_);
  std::deque<Pending> waiting_ ABSL_GUARDED_BY(mu_);  // for a segment with room
  uint64_t growing_ ABSL_GUARDED_BY(mu_) = 0;         // bytes of the segment that is being made
  uint32_t last_number_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t allocated_ ABSL_GUARDED_BY(mu_) = 0;  // by all segments
  uint64_t freeing_ ABSL_GUARDED_BY(mu_) = 0;    // of them, what is on its way back
  int under_way_ ABSL_GUARDED_BY(mu_) = 0;
  absl::AnyInvocable<void()> closed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
