// A disk in memory that does what disks do when they are let down: what was not synced may be lost, torn or there, and
// operations fail, in an order that a seed decides.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "storage/disk/file.h"

namespace kvferry {

// Runs tasks one at a time, on the thread that asks it to, in an order that the seed decides.
class SimScheduler {
 public:
  explicit SimScheduler(uint64_t seed) : random_(seed) {}
  ~SimScheduler() { RunAll(); }

  void Add(absl::AnyInvocable<void()> task) { tasks_.push_back(std::move(task)); }
  // False if there is nothing to run.
  bool RunOne();
  void RunAll() {
    while (RunOne()) {
    }
  }
  std::mt19937_64& random() { return random_; }

 private:
  std::mt19937_64 random_;
  std::vector<absl::AnyInvocable<void()>> tasks_;
};

// What stays when a process dies, and most of it when the power goes.
class SimDisk {
 public:
  explicit SimDisk(uint64_t seed) : random_(seed) {}

  // A folder on it, whose operations the scheduler runs. Several may follow one another.
  std::unique_ptr<Folder> Open(SimScheduler* scheduler);

  // What the next operations meet with. Probabilities are of one operation in `out_of`.
  struct Faults {
    int crash_after = -1;     // operations; from then on every one fails and changes nothing. -1: never
    int fail_at = -1;         // this operation alone fails. -1: none
    int out_of = 0;           // one operation in so many fails; 0: none
    bool lying_sync = false;  // syncs answer and do nothing
    int syncs_to_fail = 0;    // so many of files, the next ones
    bool holes = true;        // the file system can give back what lies within a file
    uint64_t free_bytes = ~uint64_t{0} >> 1;
  };
  Faults faults;
  // Operations so far: where a crash may come.
  int operations() const { return operations_; }

  // The power goes: of what was not synced each block, name and hole is lost or there, a block perhaps by half.
  void Crash();
  // Changes a bit of a file.
  void Flip(const std::string& name, uint64_t bit);

  uint64_t AllocatedBytes() const;  // as du counts
  uint64_t AllocatedBytes(const std::string& name) const;
  std::vector<std::string> Names() const;
  uint64_t SizeOf(const std::string& name) const;

 private:
  friend class SimFile;
  friend class SimFolder;
  using Block = std::vector<uint8_t>;
  struct Contents {
    uint64_t size = 0;
    std::map<uint64_t, Block> blocks;  // those that were written
    std::set<uint64_t> allocated;
  };
  struct Inode {
    Contents now, durable;
    bool given_up = false;  // a sync failed: for who has the file open, what was written is believed clean
    std::vector<std::function<void(Contents*, std::mt19937_64*)>> unsynced;  // each as a crash may leave it
  };
  using Names_ = std::map<std::string, std::shared_ptr<Inode>>;

  absl::Status Begin(absl::string_view what);
  static void Apply(Inode* inode, const std::function<void(Contents*, std::mt19937_64*)>& change);

  std::mt19937_64 random_;
  int operations_ = 0;
  Names_ names_, durable_names_;
  std::vector<std::function<void(Names_*)>> unsynced_names_;
};

}  // namespace kvferry
