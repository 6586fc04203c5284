// What is to be known of a folder's segments and does not stand in them: whose namespaces they hold, what was erased,
// dropped, published or freed since it was written.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/mutex.h"
#include "storage/disk/manifest_format.h"

namespace kvferry {

// One file at a time. It is appended to; at start, and where a frame could not be written, another one takes its place.
// Thread-safe; only Open, Wait and the destructor block.
class Manifest {
 public:
  // The folder's manifest, or a new one where it has none. FAILED_PRECONDITION: it is of another version. DATA_LOSS:
  // there are segments and no manifest that is whole. The disk's own errors: it could not be read. `folder` must
  // outlive it.
  static absl::StatusOr<std::unique_ptr<Manifest>> Open(Folder* folder, const DiskStoreId& if_new);
  // Waits. REQUIRES: no call is in progress.
  ~Manifest() { Wait(); }
  // Until nothing is under way. Blocks.
  void Wait() ABSL_LOCKS_EXCLUDED(mu_);

  const DiskStoreId& store() const { return store_; }

  // nullptr if the namespace is not known here.
  std::shared_ptr<const NamespaceEntry> Find(const NamespaceId& ns) const;
  // What an image is by now, after all that was appended: false if it is dead.
  bool Resolve(DiskPlace place, ImageEntry* image) const;

  // The largest seq that any entry names; 0: none does.
  uint64_t youngest_seq() const;

  // Done once the entries survive a loss of power, in the order of the calls, whatever comes of the ones before.
  void Append(std::vector<ManifestEntry> entries, IoDone done);
  // The entry goes along with the next Append: to lose it costs a miss, no more.
  void Note(ManifestEntry entry);

  // There is a copy at `to` of the image at `from`, which its own segment lists as `image`: what was said of the one
  // holds for the other. Goes along with the next Append.
  void NoteCopy(DiskPlace from, DiskPlace to, const ImageEntry& image);

  // A segment has gone, and what was said of its images with it.
  void Forget(uint32_t segment);
  // There is no image any more with a smaller seq, so that what was erased or dropped before can be forgotten; and no
  // other segment, so that nothing is said of one that will have its number. Writes the manifest anew. Blocks: at
  // start, before anything is appended.
  absl::Status Compact(uint64_t oldest_seq, const std::set<uint32_t>& segments);

 private:
  // Entries by what they are of.
  struct State {
    absl::flat_hash_map<NamespaceId, std::shared_ptr<const NamespaceEntry>> namespaces;
    absl::flat_hash_map<ChunkKey, uint64_t> erased;
    absl::flat_hash_map<NamespaceId, uint64_t> dropped;
    std::map<uint32_t, absl::flat_hash_map<uint32_t, PublishedEntry>> published;  // by segment and block
    std::map<uint32_t, absl::flat_hash_set<uint32_t>> freed;
    void Apply(ManifestEntry entry);
    std::vector<ManifestEntry> Entries() const;
  };

  explicit Manifest(Folder* folder) : folder_(folder) {}
  absl::Status Load(const std::string& name);
  absl::Status WriteAnew() ABSL_LOCKS_EXCLUDED(mu_);
  void WriteWaiting() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status WriteFrame(std::vector<ManifestEntry> entries);

  Folder* const folder_;
  DiskStoreId store_{};  // constant after Open

  mutable Mutex mu_;
  CondVar idle_;
  State state_ ABSL_GUARDED_BY(mu_);
  std::vector<ManifestEntry> waiting_ ABSL_GUARDED_BY(mu_);
  std::vector<IoDone> answers_ ABSL_GUARDED_BY(mu_);  // due once what waits is written
  bool writing_ ABSL_GUARDED_BY(mu_) = false;

  // Of whoever writes: there is one at a time.
  uint32_t number_ = 0;         // of the file
  std::unique_ptr<File> file_;  // null: a frame could not be written, so that another file is needed
  uint64_t end_ = 0;
  uint64_t end_when_new_ = 0;
  uint64_t frames_ = 0;
};

}  // namespace kvferry
