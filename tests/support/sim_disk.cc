#include "tests/support/sim_disk.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"

namespace kvferry {

bool SimScheduler::RunOne() {
  if (tasks_.empty()) return false;
  const size_t which = random_() % tasks_.size();
  std::swap(tasks_[which], tasks_.back());
  absl::AnyInvocable<void()> task = std::move(tasks_.back());
  tasks_.pop_back();
  std::move(task)();
  return true;
}

absl::Status SimDisk::Begin(absl::string_view what) {
  const int number = operations_++;
  if (faults.crash_after >= 0 && number >= faults.crash_after) {
    return absl::UnavailableError(absl::StrCat(what, ": the machine has crashed"));
  }
  if (number == faults.fail_at) return absl::UnavailableError(absl::StrCat(what, ": injected: input/output error"));
  if (faults.out_of > 0 && random_() % static_cast<uint64_t>(faults.out_of) == 0) {
    const bool full = random_() % 2 == 0;
    return full ? absl::ResourceExhaustedError(absl::StrCat(what, ": injected: no space"))
                : absl::UnavailableError(absl::StrCat(what, ": injected: input/output error"));
  }
  return absl::OkStatus();
}

// Does a change, and notes it for the crash that may come before the next sync. `random` is null where the change is
// whole.
void SimDisk::Apply(Inode* inode, const std::function<void(Contents*, std::mt19937_64*)>& change) {
  change(&inode->now, nullptr);
  inode->unsynced.push_back(change);
}

class SimFile : public File {
 public:
  SimFile(SimDisk* disk, SimScheduler* scheduler, std::shared_ptr<SimDisk::Inode> inode, std::string name)
      : disk_(disk), scheduler_(scheduler), inode_(std::move(inode)), name_(std::move(name)) {}

  void Read(uint64_t offset, MutableByteView to, IoDone done) override {
    scheduler_->Add([this, offset, to, done = std::move(done)]() mutable { std::move(done)(ReadNow(offset, to)); });
  }

  // The blocks of one write reach the disk in any order, and others' operations come between.
  void Write(uint64_t offset, IoPieces pieces, IoDone done) override {
    auto bytes = std::make_shared<std::vector<uint8_t>>();
    for (const ByteView& piece : pieces) bytes->insert(bytes->end(), piece.begin(), piece.end());
    scheduler_->Add([this, offset, bytes, done = std::move(done)]() mutable {
      const size_t half = bytes->size() / kDiskAlignment / 2 * kDiskAlignment;
      absl::Status status = WriteNow(offset, ByteView(*bytes).subspan(0, half));
      if (!status.ok()) return std::move(done)(status);
      scheduler_->Add([this, offset, half, bytes, done = std::move(done)]() mutable {
        std::move(done)(WriteNow(offset + half, ByteView(*bytes).subspan(half)));
      });
    });
  }

  void Sync(IoDone done) override {
    scheduler_->Add([this, done = std::move(done)]() mutable { std::move(done)(SyncNow()); });
  }

  absl::Status ReadNow(uint64_t offset, MutableByteView to) override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("read ", name_)));
    const SimDisk::Contents& now = inode_->now;
    if (offset + to.size() > now.size) return absl::OutOfRangeError(absl::StrCat("read ", name_, ": the file ends"));
    for (uint64_t at = 0; at < to.size(); at += kDiskAlignment) {
      const auto it = now.blocks.find((offset + at) / kDiskAlignment);
      if (it == now.blocks.end()) {
        std::memset(to.data() + at, 0, kDiskAlignment);
      } else {
        std::memcpy(to.data() + at, it->second.data(), kDiskAlignment);
      }
    }
    return absl::OkStatus();
  }

  absl::Status WriteNow(uint64_t offset, ByteView from) override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("write ", name_)));
    for (uint64_t at = 0; at < from.size(); at += kDiskAlignment) {
      const uint64_t number = (offset + at) / kDiskAlignment;
      const SimDisk::Block block(from.begin() + static_cast<int64_t>(at),
                                 from.begin() + static_cast<int64_t>(at + kDiskAlignment));
      SimDisk::Apply(inode_.get(), [number, block](SimDisk::Contents* to, std::mt19937_64* random) {
        if (random != nullptr && (*random)() % 2 == 0) return;  // lost
        to->size = std::max(to->size, (number + 1) * kDiskAlignment);
        to->allocated.insert(number);
        SimDisk::Block& there = to->blocks.try_emplace(number, kDiskAlignment, 0).first->second;
        const uint64_t sectors = random != nullptr && (*random)() % 4 == 0 ? (*random)() % 8 : 8;  // torn
        std::memcpy(there.data(), block.data(), sectors * 512);
      });
    }
    return absl::OkStatus();
  }

  absl::Status SyncNow() override {
    absl::Status status = disk_->Begin(absl::StrCat("sync ", name_));
    if (status.ok() && disk_->faults.syncs_to_fail > 0 && disk_->faults.syncs_to_fail-- > 0) {
      status = absl::UnavailableError(absl::StrCat("sync ", name_));
    }
    const bool crashed = disk_->faults.crash_after >= 0 && disk_->operations_ > disk_->faults.crash_after;
    if (!status.ok() && !crashed) inode_->given_up = true;
    if (!status.ok() || disk_->faults.lying_sync || inode_->given_up) return status;
    inode_->durable = inode_->now;
    inode_->unsynced.clear();
    return absl::OkStatus();
  }

  absl::Status Punch(uint64_t offset, uint64_t bytes) override {
    if (!disk_->faults.holes) return absl::UnimplementedError(absl::StrCat("punch ", name_));
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("punch ", name_)));
    for (uint64_t at = offset; at < offset + bytes; at += kDiskAlignment) {
      SimDisk::Apply(inode_.get(), [number = at / kDiskAlignment](SimDisk::Contents* to, std::mt19937_64* random) {
        if (random != nullptr && (*random)() % 2 == 0) return;
        to->blocks.erase(number);
        to->allocated.erase(number);
      });
    }
    return absl::OkStatus();
  }

  absl::Status Truncate(uint64_t bytes) override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("truncate ", name_)));
    SimDisk::Apply(inode_.get(), [bytes](SimDisk::Contents* to, std::mt19937_64* random) {
      if (random != nullptr && (*random)() % 2 == 0) return;
      to->size = bytes;
      to->blocks.erase(to->blocks.lower_bound(bytes / kDiskAlignment), to->blocks.end());
      to->allocated.erase(to->allocated.lower_bound(bytes / kDiskAlignment), to->allocated.end());
    });
    return absl::OkStatus();
  }

  absl::StatusOr<uint64_t> Size() override { return inode_->now.size; }
  absl::StatusOr<uint64_t> AllocatedBytes() override { return inode_->now.allocated.size() * kDiskAlignment; }

 private:
  SimDisk* const disk_;
  SimScheduler* const scheduler_;
  const std::shared_ptr<SimDisk::Inode> inode_;
  const std::string name_;
};

class SimFolder : public Folder {
 public:
  SimFolder(SimDisk* disk, SimScheduler* scheduler) : disk_(disk), scheduler_(scheduler) {}

  absl::StatusOr<std::unique_ptr<File>> Create(absl::string_view name, uint64_t bytes) override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("create ", name)));
    if (disk_->names_.contains(std::string(name))) return absl::AlreadyExistsError(absl::StrCat("create ", name));
    auto inode = std::make_shared<SimDisk::Inode>();
    SimDisk::Apply(inode.get(), [bytes](SimDisk::Contents* to, std::mt19937_64* random) {
      if (random != nullptr && (*random)() % 2 == 0) return;
      to->size = bytes;
      for (uint64_t number = 0; number < bytes / kDiskAlignment; ++number) to->allocated.insert(number);
    });
    Rename([name = std::string(name), inode](SimDisk::Names_* names) { (*names)[name] = inode; });
    return std::make_unique<SimFile>(disk_, scheduler_, inode, std::string(name));
  }

  absl::StatusOr<std::unique_ptr<File>> Open(absl::string_view name) override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("open ", name)));
    const auto it = disk_->names_.find(std::string(name));
    if (it == disk_->names_.end()) return absl::NotFoundError(absl::StrCat("open ", name));
    return std::make_unique<SimFile>(disk_, scheduler_, it->second, std::string(name));
  }

  absl::Status Rename(absl::string_view from, absl::string_view to) override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("rename ", from)));
    if (!disk_->names_.contains(std::string(from))) return absl::NotFoundError(absl::StrCat("rename ", from));
    Rename([from = std::string(from), to = std::string(to)](SimDisk::Names_* names) {
      const auto it = names->find(from);
      if (it == names->end()) return;
      auto inode = it->second;
      names->erase(it);
      (*names)[to] = std::move(inode);
    });
    return absl::OkStatus();
  }

  absl::Status Remove(absl::string_view name) override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin(absl::StrCat("remove ", name)));
    if (!disk_->names_.contains(std::string(name))) return absl::NotFoundError(absl::StrCat("remove ", name));
    Rename([name = std::string(name)](SimDisk::Names_* names) { names->erase(name); });
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> List() override { return disk_->Names(); }

  absl::Status Sync() override {
    KVFERRY_RETURN_IF_ERROR(disk_->Begin("sync folder"));
    if (disk_->faults.lying_sync) return absl::OkStatus();
    disk_->durable_names_ = disk_->names_;
    disk_->unsynced_names_.clear();
    return absl::OkStatus();
  }

  absl::StatusOr<uint64_t> FreeBytes() override { return disk_->faults.free_bytes; }
  absl::string_view io() const override { return "simulated"; }
  bool direct() const override { return true; }
  void Post(absl::AnyInvocable<void()> task) override { scheduler_->Add(std::move(task)); }

 private:
  void Rename(const std::function<void(SimDisk::Names_*)>& change) {
    change(&disk_->names_);
    disk_->unsynced_names_.push_back(change);
  }

  SimDisk* const disk_;
  SimScheduler* const scheduler_;
};

std::unique_ptr<Folder> SimDisk::Open(SimScheduler* scheduler) {
  for (auto& [name, inode] : names_) inode->given_up = false;
  return std::make_unique<SimFolder>(this, scheduler);
}

void SimDisk::Crash() {
  faults.crash_after = -1;
  // The file system keeps an order among names: those up to some point are there.
  const size_t kept = unsynced_names_.empty() ? 0 : random_() % (unsynced_names_.size() + 1);
  for (size_t i = 0; i < kept; ++i) unsynced_names_[i](&durable_names_);
  unsynced_names_.clear();
  names_ = durable_names_;
  for (auto& [name, inode] : names_) {
    for (const auto& change : inode->unsynced) change(&inode->durable, &random_);
    inode->unsynced.clear();
    inode->given_up = false;
    inode->now = inode->durable;
  }
}

void SimDisk::Flip(const std::string& name, uint64_t bit) {
  Inode& inode = *names_.at(name);
  const uint64_t block = bit / 8 / kDiskAlignment;
  for (Contents* contents : {&inode.now, &inode.durable}) {
    const auto it = contents->blocks.find(block);
    if (it != contents->blocks.end()) it->second[bit / 8 % kDiskAlignment] ^= static_cast<uint8_t>(1 << bit % 8);
  }
}

uint64_t SimDisk::AllocatedBytes() const {
  uint64_t blocks = 0;
  for (const auto& [name, inode] : names_) blocks += inode->now.allocated.size();
  return blocks * kDiskAlignment;
}

uint64_t SimDisk::AllocatedBytes(const std::string& name) const {
  return names_.at(name)->now.allocated.size() * kDiskAlignment;
}

std::vector<std::string> SimDisk::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, inode] : names_) names.push_back(name);
  return names;
}

uint64_t SimDisk::SizeOf(const std::string& name) const { return names_.at(name)->now.size; }

}  // namespace kvferry
