#include "storage/disk/manifest.h"

#include <algorithm>
#include <optional>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status.h"
#include "storage/disk/file_name.h"

namespace kvferry {
namespace {

std::string NameOf(uint32_t number) { return NumberedName("manifest-", number); }
constexpr char kUnfinished[] = "manifest.new";
std::optional<uint32_t> NumberOf(absl::string_view name) { return NumberInName("manifest-", name); }

// Entries of one frame at most, so that none is larger than can be read.
constexpr size_t kMostInFrame = 65536;

// Beyond twice its size when it was new, before a manifest is written anew.
constexpr uint64_t kRoomToGrow = 4 * kMiB;

template <typename... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

}  // namespace

void Manifest::State::Apply(ManifestEntry entry) {
  std::visit(Overloaded{
                 [this](NamespaceEntry& e) {
                   const NamespaceId id = e.id;
                   namespaces[id] = std::make_shared<const NamespaceEntry>(std::move(e));
                 },
                 [this](ErasedEntry& e) { erased[e.key] = std::max(erased[e.key], e.seq); },
                 [this](DroppedEntry& e) { dropped[e.ns] = std::max(dropped[e.ns], e.seq); },
                 [this](PublishedEntry& e) { published[e.place.segment][e.place.block] = e; },
                 [this](FreedEntry& e) {
                   freed[e.place.segment].insert(e.place.block);
                   const auto it = published.find(e.place.segment);
                   if (it != published.end()) it->second.erase(e.place.block);
                 },
             },
             entry);
}

std::vector<ManifestEntry> Manifest::State::Entries() const {
  std::vector<ManifestEntry> entries;
  for (const auto& [id, entry] : namespaces) entries.emplace_back(*entry);
  for (const auto& [key, seq] : erased) entries.emplace_back(ErasedEntry{key, seq});
  for (const auto& [ns, seq] : dropped) entries.emplace_back(DroppedEntry{ns, seq});
  for (const auto& [segment, blocks] : published) {
    for (const auto& [block, entry] : blocks) entries.emplace_back(entry);
  }
  for (const auto& [segment, blocks] : freed) {
    for (const uint32_t block : blocks) entries.emplace_back(FreedEntry{{segment, block}});
  }
  return entries;
}

absl::StatusOr<std::unique_ptr<Manifest>> Manifest::Open(Folder* folder, const DiskStoreId& if_new) {
  std::unique_ptr<Manifest> manifest(new Manifest(folder));
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::string> names, folder->List());
  bool segments = false;
  std::vector<uint32_t> numbers;
  for (const std::string& name : names) {
    segments = segments || absl::StartsWith(name, "segment-");
    if (const std::optional<uint32_t> number = NumberOf(name)) numbers.push_back(*number);
  }
  std::sort(numbers.rbegin(), numbers.rend());
  absl::Status why = absl::NotFoundError("there is no manifest");
  for (const uint32_t number : numbers) {  // the newest that can be read: an older one was complete when it was current
    manifest->number_ = std::max(manifest->number_, number);
    why = manifest->Load(NameOf(number));
    if (why.ok() || absl::IsFailedPrecondition(why)) break;
    KVFERRY_LOG(kError, absl::StrCat("disk: ", why.message()));
  }
  if (absl::IsFailedPrecondition(why)) return why;
  if (!why.ok()) {
    if (segments) {
      return absl::DataLossError(absl::StrCat("disk: the folder has segments, and nobody can say whose: ",
                                              why.message(), "; move them away to start with an empty folder"));
    }
    manifest->store_ = if_new;
    KVFERRY_RETURN_IF_ERROR(manifest->WriteAnew());
  }
  return manifest;  // one that was there is written anew by the first who has something to say, or by Compact
}

void Manifest::Wait() {
  MutexLock lock(&mu_);
  while (writing_) idle_.Wait(&mu_);
}

absl::Status Manifest::Load(const std::string& name) {
  KVFERRY_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, folder_->Open(name));
  KVFERRY_ASSIGN_OR_RETURN(const uint64_t size, file->Size());
  AlignedBuffer bytes(size - size % kDiskAlignment);
  KVFERRY_RETURN_IF_ERROR(file->ReadNow(0, bytes.view()));
  State state;
  std::optional<uint64_t> last;  // number of the last frame
  for (ByteView left = bytes.view(); !left.empty();) {
    absl::StatusOr<DecodedFrame> decoded = DecodeFrame(left);
    if (absl::IsFailedPrecondition(decoded.status())) {
      return absl::FailedPreconditionError(absl::StrCat(name, ": ", decoded.status().message()));
    }
    if (!last) {
      if (!decoded.ok()) return absl::DataLossError(absl::StrCat(name, ": ", decoded.status().message()));
      store_ = decoded->frame.store;
    }
    if (!decoded.ok() || decoded->frame.store != store_ || (last && decoded->frame.number <= *last)) {
      left.remove_prefix(kDiskAlignment);  // torn: the last one; or the disk has lost it, and others follow
      continue;
    }
    if (last && decoded->frame.number != *last + 1) {
      KVFERRY_LOG(kError, absl::StrCat("disk: ", name, " has lost what lay between frames ", *last, " and ",
                                       decoded->frame.number));
    }
    last = decoded->frame.number;
    for (ManifestEntry& entry : decoded->frame.entries) state.Apply(std::move(entry));
    left.remove_prefix(decoded->bytes);
  }
  MutexLock lock(&mu_);
  state_ = std::move(state);
  return absl::OkStatus();
}

std::shared_ptr<const NamespaceEntry> Manifest::Find(const NamespaceId& ns) const {
  MutexLock lock(&mu_);
  const auto it = state_.namespaces.find(ns);
  return it == state_.namespaces.end() ? nullptr : it->second;
}

bool Manifest::Resolve(DiskPlace place, ImageEntry* image) const {
  MutexLock lock(&mu_);
  if (const auto it = state_.freed.find(place.segment); it != state_.freed.end() && it->second.contains(place.block)) {
    return false;
  }
  if (const auto it = state_.published.find(place.segment); it != state_.published.end()) {
    if (const auto entry = it->second.find(place.block); entry != it->second.end()) {
      image->key = entry->second.key;
      image->parent = entry->second.parent;
      image->seq = entry->second.seq;
      image->lifetime = entry->second.lifetime;
    }
  }
  const auto erased = state_.erased.find(image->key);
  if (erased != state_.erased.end() && image->seq < erased->second) return false;
  const auto dropped = state_.dropped.find(image->key.ns);
  return dropped == state_.dropped.end() || image->seq >= dropped->second;
}

uint64_t Manifest::youngest_seq() const {
  MutexLock lock(&mu_);
  uint64_t seq = 0;
  for (const auto& [key, erased] : state_.erased) seq = std::max(seq, erased);
  for (const auto& [ns, dropped] : state_.dropped) seq = std::max(seq, dropped);
  for (const auto& [segment, blocks] : state_.published) {
    for (const auto& [block, entry] : blocks) seq = std::max(seq, entry.seq);
  }
  return seq;
}

void Manifest::Append(std::vector<ManifestEntry> entries, IoDone done) {
  {
    MutexLock lock(&mu_);
    for (ManifestEntry& entry : entries) {
      state_.Apply(entry);
      waiting_.push_back(std::move(entry));
    }
    answers_.push_back(std::move(done));
    if (std::exchange(writing_, true)) return;
  }
  folder_->Post([this] { WriteWaiting(); });
}

void Manifest::Note(ManifestEntry entry) {
  MutexLock lock(&mu_);
  state_.Apply(entry);
  waiting_.push_back(std::move(entry));
}

void Manifest::Forget(uint32_t segment) {
  MutexLock lock(&mu_);
  state_.published.erase(segment);
  state_.freed.erase(segment);
}

void Manifest::WriteWaiting() {
  for (;;) {
    std::vector<ManifestEntry> entries;
    std::vector<IoDone> answers;
    {
      MutexLock lock(&mu_);
      if (answers_.empty()) {
        writing_ = false;
        idle_.NotifyAll();
        return;
      }
      entries = std::exchange(waiting_, {});
      answers = std::exchange(answers_, {});
    }
    absl::Status status;
    if (file_ != nullptr && !entries.empty()) {
      status = WriteFrame(std::move(entries));
      if (status.ok()) status = file_->SyncNow();
    }
    const bool long_enough = end_ > 2 * end_when_new_ + kRoomToGrow;
    if (file_ == nullptr || !status.ok() || long_enough) {  // nothing can follow a frame that is torn
      file_ = nullptr;
      status = WriteAnew();
    }
    for (IoDone& done : answers) std::move(done)(status);
  }
}

absl::Status Manifest::WriteFrame(std::vector<ManifestEntry> entries) {
  for (size_t from = 0; from == 0 || from < entries.size(); from += kMostInFrame) {
    ManifestFrame frame;
    frame.store = store_;
    frame.number = frames_;
    const size_t to = std::min(entries.size(), from + kMostInFrame);
    frame.entries.assign(std::make_move_iterator(entries.begin() + static_cast<int64_t>(from)),
                         std::make_move_iterator(entries.begin() + static_cast<int64_t>(to)));
    const AlignedBuffer bytes = EncodeFrame(frame);
    KVFERRY_RETURN_IF_ERROR(file_->WriteNow(end_, bytes.view()));
    end_ += bytes.size();
    ++frames_;
  }
  return absl::OkStatus();
}

// The new file is complete before it has its name, and the older ones go when that is sure to stay.
absl::Status Manifest::WriteAnew() {
  std::vector<ManifestEntry> entries;
  {
    MutexLock lock(&mu_);
    entries = state_.Entries();
  }
  absl::Status removed = folder_->Remove(kUnfinished);
  if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  KVFERRY_ASSIGN_OR_RETURN(file_, folder_->Create(kUnfinished, 0));
  end_ = frames_ = 0;
  absl::Status status = WriteFrame(std::move(entries));
  if (status.ok()) status = file_->SyncNow();
  if (status.ok()) status = folder_->Rename(kUnfinished, NameOf(number_ + 1));
  if (status.ok()) status = folder_->Sync();
  if (!status.ok()) {
    file_ = nullptr;
    return status;
  }
  ++number_;
  end_when_new_ = end_;
  KVFERRY_ASSIGN_OR_RETURN(const std::vector<std::string> names, folder_->List());
  for (const std::string& name : names) {
    const std::optional<uint32_t> number = NumberOf(name);
    if (number && *number < number_) (void)folder_->Remove(name);  // it is of no harm, and goes the next time
  }
  return absl::OkStatus();
}

absl::Status Manifest::Compact(uint64_t oldest_seq, const std::set<uint32_t>& segments) {
  {
    MutexLock lock(&mu_);
    const auto gone = [&segments](const auto& entry) { return !segments.contains(entry.first); };
    std::erase_if(state_.published, gone);
    std::erase_if(state_.freed, gone);
    absl::erase_if(state_.erased, [oldest_seq](const auto& entry) { return entry.second <= oldest_seq; });
    absl::erase_if(state_.dropped, [oldest_seq](const auto& entry) { return entry.second <= oldest_seq; });
  }
  return WriteAnew();
}

}  // namespace kvferry
