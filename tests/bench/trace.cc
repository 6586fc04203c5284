#include "tests/bench/trace.h"

#include <zlib.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "storage/ghosts.h"

namespace kvferry {
namespace {

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (file == nullptr) return absl::NotFoundError(absl::StrCat("trace ", path, " cannot be opened"));
  std::string text;
  char piece[1 << 16];
  int n;
  while ((n = gzread(file.get(), piece, sizeof(piece))) > 0) text.append(piece, static_cast<size_t>(n));
  if (n < 0) return absl::InvalidArgumentError(absl::StrCat("trace ", path, " is no whole gzip file"));
  return text;
}

absl::StatusOr<std::vector<uint64_t>> ParseNames(absl::string_view line) {
  const size_t key = line.find("\"hash_ids\"");
  const size_t from = key == line.npos ? key : line.find('[', key), to = line.find(']', from);
  if (from == line.npos || to == line.npos) return absl::InvalidArgumentError("has no array \"hash_ids\"");
  std::vector<uint64_t> names;
  const absl::string_view list = absl::StripAsciiWhitespace(line.substr(from + 1, to - from - 1));
  for (const absl::string_view name : absl::StrSplit(list, ',', absl::SkipEmpty())) {
    if (!absl::SimpleAtoi(name, &names.emplace_back())) {
      return absl::InvalidArgumentError(absl::StrCat("has \"", name, "\" in \"hash_ids\", expected numbers"));
    }
  }
  return names;
}

class Player {
 public:
  explicit Player(const TraceOptions& options)
      : options_(options), memory_queue_(options.policy), disk_queue_(options.policy) {}

  void Request(const std::vector<uint64_t>& names) {
    result_.asked += names.size();
    std::vector<ChunkNumber> leased;
    size_t at = 0;
    for (; at < names.size(); ++at) {
      const auto it = numbers_.find(names[at]);
      if (it == numbers_.end()) break;
      Lease(it->second, &leased);
      Use(it->second);
    }
    for (size_t i = 0; i < at; ++i) {
      Chunk& chunk = chunks_[leased[i]];
      ++(chunk.in_memory ? result_.hit_memory : result_.hit_disk);
      if (!chunk.in_memory && MakeRoomInMemory()) SetInMemory(leased[i], true);
    }
    for (; at < names.size(); ++at) {
      if (!MakeRoomInMemory()) break;
      const ChunkNumber parent = at == 0 ? kNone : leased[at - 1];
      Lease(Add(names[at], parent), &leased);
    }
    for (const ChunkNumber chunk : leased) {
      chunks_[chunk].leased = false;
      Settle(chunk);
    }
  }

  TraceResult result() const { return result_; }

 private:
  static constexpr ChunkNumber kNone = UINT32_MAX;
  // The same in every run, other than Abseil's.
  static uint64_t Hash(uint64_t name) { return name * 0x9e3779b97f4a7c15; }
  struct Chunk {
    uint64_t name = 0;
    ChunkNumber parent = kNone;
    uint32_t children = 0, children_in_memory = 0;
    bool in_memory = false, on_disk = false, leased = false, used_again = false;
    bool memory_queued = false, disk_queued = false;
  };

  void Lease(ChunkNumber n, std::vector<ChunkNumber>* leased) {
    chunks_[n].leased = true;
    Settle(n);
    leased->push_back(n);
  }

  void Use(ChunkNumber n) {
    Chunk& chunk = chunks_[n];
    chunk.used_again = true;
    if (chunk.in_memory) memory_queue_.Touch(n);
    if (chunk.on_disk) disk_queue_.Touch(n);
  }

  ChunkNumber Add(uint64_t name, ChunkNumber parent) {
    if (free_.empty()) free_.push_back(static_cast<ChunkNumber>(next_++));
    const ChunkNumber n = free_.back();
    free_.pop_back();
    chunks_[n] = Chunk{name, parent};
    chunks_[n].used_again = seen_.Take(Ghosts::Fingerprint(Hash(name)));
    numbers_.emplace(name, n);
    if (parent != kNone) ++chunks_[parent].children;
    SetInMemory(n, true);
    if (options_.write == WritePolicy::kWriteThrough) Write(n);
    return n;
  }

  // A queue of each tier holds what may leave it.
  void Settle(ChunkNumber n, Turn turn = Turn::kLast) {
    Chunk& chunk = chunks_[n];
    const bool memory = chunk.in_memory && !chunk.leased && chunk.children_in_memory == 0;
    if (memory != chunk.memory_queued) memory ? memory_queue_.Insert(n, turn) : memory_queue_.Erase(n);
    chunk.memory_queued = memory;
    const bool disk = chunk.on_disk && !chunk.leased && chunk.children == 0;
    if (disk != chunk.disk_queued) disk ? disk_queue_.Insert(n, turn) : disk_queue_.Erase(n);
    chunk.disk_queued = disk;
  }

  void SetInMemory(ChunkNumber n, bool in_memory) {
    Chunk& chunk = chunks_[n];
    if (in_memory) memory_queue_.Add(n, Hash(chunk.name), kDefaultPriority);
    chunk.in_memory = in_memory;
    Settle(n);
    if (!in_memory) memory_queue_.Remove(n, true);
    in_memory ? ++memory_ : --memory_;
    result_.largest_memory = std::max(result_.largest_memory, memory_);
    if (chunk.parent == kNone) return;
    in_memory ? ++chunks_[chunk.parent].children_in_memory : --chunks_[chunk.parent].children_in_memory;
    Settle(chunk.parent, Turn::kNext);
  }

  void SetOnDisk(ChunkNumber n, bool on_disk) {
    Chunk& chunk = chunks_[n];
    if (on_disk) disk_queue_.Add(n, Hash(chunk.name), kDefaultPriority);
    chunk.on_disk = on_disk;
    Settle(n);
    if (!on_disk) disk_queue_.Remove(n, true);
    on_disk ? ++disk_ : --disk_;
    result_.largest_disk = std::max(result_.largest_disk, disk_);
  }

  bool Write(ChunkNumber n) {
    while (disk_ >= options_.disk) {
      const std::optional<ChunkNumber> victim = disk_queue_.Victim();
      if (!victim || *victim == n) return false;
      SetOnDisk(*victim, false);
      DropIfNowhere(*victim);
    }
    SetOnDisk(n, true);
    ++result_.written;
    return true;
  }

  bool MakeRoomInMemory() {
    while (memory_ >= options_.memory) {
      const std::optional<ChunkNumber> victim = memory_queue_.Victim();
      if (!victim) return false;
      const Chunk& chunk = chunks_[*victim];
      const bool wanted = options_.write != WritePolicy::kOnSecondHit || chunk.used_again || chunk.children > 0;
      const bool kept = chunk.on_disk || (wanted && Write(*victim));
      if (!kept && chunk.children > 0) return false;  // its descendants on disk need it, and the disk has no room
      if (!kept) seen_.Add(Ghosts::Fingerprint(Hash(chunk.name)), options_.memory + options_.disk);
      SetInMemory(*victim, false);
      DropIfNowhere(*victim);
    }
    return true;
  }

  void DropIfNowhere(ChunkNumber n) {
    const Chunk chunk = chunks_[n];
    if (chunk.in_memory || chunk.on_disk) return;
    numbers_.erase(chunk.name);
    free_.push_back(n);
    if (chunk.parent == kNone) return;
    --chunks_[chunk.parent].children;
    Settle(chunk.parent, Turn::kNext);
  }

  const TraceOptions options_;
  TraceResult result_;
  PagedVector<Chunk> chunks_;
  absl::flat_hash_map<uint64_t, ChunkNumber> numbers_;
  std::vector<ChunkNumber> free_;
  uint64_t next_ = 0, memory_ = 0, disk_ = 0;
  EvictionQueue memory_queue_, disk_queue_;
  Ghosts seen_;  // lost from memory for want of a second use
};

}  // namespace

absl::StatusOr<Trace> ReadTrace(const std::string& path) {
  absl::StatusOr<std::string> text = ReadWhole(path);
  if (!text.ok()) return text.status();
  Trace trace;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    absl::StatusOr<std::vector<uint64_t>> names = ParseNames(line);
    if (!names.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("trace ", path, ": line ", number, " ", names.status().message()));
    }
    trace.push_back(*std::move(names));
  }
  return trace;
}

TraceResult Play(const Trace& trace, const TraceOptions& options) {
  Player player(options);
  for (const std::vector<uint64_t>& names : trace) player.Request(names);
  return player.result();
}

}  // namespace kvferry
