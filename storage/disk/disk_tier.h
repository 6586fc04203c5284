// Chunks on a disk: what the store spills there, finds again after a restart, and gives up for others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "storage/base/namespace_spec.h"
#include "storage/disk/manifest.h"
#include "storage/disk/relocator.h"
#include "storage/disk/segment_log.h"

namespace kvferry {

struct DiskTierOptions {
  uint64_t bytes = 0;                     // hard bound on what the folder's segments take
  uint64_t segment_bytes = 256 * kMiB;    // less where the bound is small: at most an eighth of it
  uint64_t keep_free_bytes = 256 * kMiB;  // left to others on the volume
  // Told that the image at `from` lies at `to` as well, byte for byte and as durable, and that `from` is to go: its
  // segment could not be synced, or is nearly empty on a file system that has no holes. `image` is what it is by now,
  // `header_seq` what its own header says. Both places can be read until the owner answers, at any later time, by
  // Free(from) if the chunk lies at `to` for it from now on, or by Free(to) if it has no use for that, because it
  // freed `from` before it was told. Where `to` is an error, and `header_seq` 0, the
  // chunk is lost (DATA_LOSS: the bytes are not its own any more; else they cannot be read), and the answer is
  // Free(from), whenever the owner gives it up, if that has not been freed. If it is empty images stay where they are.
  Relocator::Moved moved;
  // Told that room has come back, on a thread of the folder's and under no lock. May be empty.
  std::function<void()> freed;
};

// Images in segments and a manifest beside them, as one. Which images there are is the store's to remember; this knows
// where the disk's room went. Thread-safe; only Open, Wait and the destructor block. Callbacks run on the folder's
// threads, under no lock.
class DiskTier {
 public:
  // A published chunk that a process before us left.
  struct Found {
    std::shared_ptr<const NamespaceEntry> ns;
    ImageEntry image;         // as it was last published
    uint64_t header_seq = 0;  // the seq in the image's own header, which is older if it was published afterwards
    DiskPlace place;
  };
  struct Opened {
    std::unique_ptr<DiskTier> tier;
    uint64_t next_seq = 1;  // above every seq there has been
  };
  // Takes the folder over. Tells of every chunk that is there, is published, has not expired by `now`, and whose
  // namespace is known with a layout of its size; anything else gives its room back. Of two images of one chunk the
  // younger counts. FAILED_PRECONDITION: files of another version or store; DATA_LOSS: see Manifest::Open.
  static absl::StatusOr<Opened> Open(const DiskTierOptions& options, std::unique_ptr<Folder> folder, absl::Time now,
                                     absl::FunctionRef<void(const Found&)> found);
  // Closes and waits for what is under way. REQUIRES: no call is in progress.
  ~DiskTier();
  // Nothing is written any more. Done when the segment that was appended to has its footer and nothing is under way.
  void Close(absl::AnyInvocable<void()> done);
  // Until nothing is under way.
  void Wait();

  // Makes a namespace known, so that its images are found again. Once for each that is written to is enough.
  void AddNamespace(const NamespaceId& id, absl::string_view tenant, const NamespaceSpec& spec);

  // See SegmentLog.
  bool HasRoom(uint64_t bytes) const { return log_->HasRoom(bytes); }
  uint64_t Lack(uint64_t bytes) const { return log_->Lack(bytes); }
  void Post(absl::AnyInvocable<void()> task) { log_->Run(std::move(task)); }
  void Write(IoPieces image, const ImageEntry& entry, SegmentLog::AppendDone done) {
    log_->Append(std::move(image), entry, std::move(done));
  }
  void Read(DiskPlace place, uint64_t offset, MutableByteView to, IoDone done) {
    log_->Read(place, offset, to, std::move(done));
  }
  // An image's room comes back, soon. It may be found again after a loss of power: its bytes are still the chunk's.
  void Free(DiskPlace place, uint64_t bytes);
  // The same, and tells when the bytes can be read no more. UNIMPLEMENTED: once their segment has gone.
  void Trim(DiskPlace place, uint64_t bytes, IoDone done);

  // An image is not what it should be: it is not found again, and its room stays taken until the next start, so that
  // somebody can look at it.
  void Quarantine(DiskPlace place) { manifest_->Note(FreedEntry{place}); }

  // The image at `place`, written under another name, has been published under this one. Durable with the next Flush.
  void Publish(DiskPlace place, const ImageEntry& as);
  // Done when no image of these chunks, or of the namespace, that has a smaller seq will be found again.
  void Erase(const std::vector<ChunkKey>& keys, uint64_t seq, IoDone done);
  void Drop(const NamespaceId& ns, uint64_t seq, IoDone done);

  // Done when every image whose Write was answered before, and what was said of it, survives a loss of power. After a
  // failure the images concerned are moved, and until their owner has answered for all of them every Flush fails.
  void Flush(IoDone done);

  SegmentLog::Usage usage() const { return log_->usage(); }
  const Folder& folder() const { return *folder_; }

 private:
  DiskTier() = default;

  bool closed_ = true;  // or not yet open

  std::unique_ptr<Folder> folder_;
  std::unique_ptr<Manifest> manifest_;
  std::unique_ptr<Relocator> relocator_;
  std::unique_ptr<SegmentLog> log_;  // last: it waits for what uses the others
};

}  // namespace kvferry
