// kvferryd on a folder under random load is killed again and again: what was flushed is found, what was erased is not,
// no byte is wrong, and what the daemon says that it takes of the disk is what it takes. KVFERRY_SOAK_CYCLES says how
// often, KVFERRY_TEST_SEED repeats what is random about the load.
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/disk/file.h"
#include "tests/service/raw_client.h"
#include "tests/soak/expected_names.h"
#include "tests/support/child_daemon.h"
#include "tests/support/disk_folder.h"
#include "tests/support/put_and_get.h"
#include "tests/support/seeds.h"

namespace kvferry {
namespace {

constexpr int kWriters = 4;
constexpr size_t kNames = 60;         // of each writer
constexpr uint64_t kMostSteps = 800;  // of all writers, before the end

std::shared_ptr<Transport> Reach(const std::string& url) {
  auto transport = Connect(url, {});
  EXPECT_TRUE(transport.ok()) << transport.status();
  return transport.ok() ? *transport : nullptr;
}

struct Totals {
  std::atomic<uint64_t> published{0}, flushes{0}, erased{0}, read{0};
  uint64_t verified = 0, required = 0, killed = 0, ended = 0, killed_at_start = 0;
};

// What the daemon is told, and what may be expected of it.
struct Life {
  std::vector<std::string> flags;
  bool loses = false;  // what was asked for once and not flushed may be dropped
};

// One connection's load on names of its own.
class Writer {
 public:
  Writer(int number, uint64_t seed, Totals* totals) : number_(number), random_(seed), totals_(totals), names_(kNames) {}

  void Connect(const std::string& url) {
    transport_ = Reach(url);
    ASSERT_NE(transport_, nullptr);
    for (const NamespaceSpec& spec : Specs()) Open(transport_.get(), spec);
  }

  // Random steps until `over` and then the first failure.
  void Run(const Life& life, std::atomic<uint64_t>* steps, const std::atomic<bool>* over) {
    absl::Status status;
    for (; status.ok() && !testing::Test::HasFailure(); ++*steps) status = Step(life);
    EXPECT_TRUE(*over && absl::IsUnavailable(status)) << "writer " << number_ << ": " << status;
  }

  // Reads everything from a daemon that has just started.
  void Verify(Transport* transport) {
    for (size_t i = 0; i < names_.size(); ++i) {
      const ExpectedNames::Name& name = names_[i];
      const absl::StatusOr<std::optional<uint64_t>> found = Find(transport, i);
      ASSERT_TRUE(found.ok()) << ToString(KeyOf(i)) << ": " << found.status();
      const auto text = [](std::optional<uint64_t> version) { return version ? absl::StrCat(*version) : "nothing"; };
      EXPECT_TRUE(names_.Agrees(i, *found))
          << "writer " << number_ << ", name " << i << ": found " << text(*found) << ", last acknowledged "
          << text(name.now) << ", flushed " << text(name.must) << ", " << name.may.size() << " may be there";
      totals_->required += name.must.has_value() ? 1 : 0;
      ++totals_->verified;
      names_.Found(i, *found);
    }
  }

  void EndedInOrder() { names_.Flushed(); }

 private:
  static std::vector<NamespaceSpec> Specs() { return {SpecOf({3'000, 40'000}), SpecOf({70'000, 70'000, 9'000})}; }
  static size_t SpecOfName(size_t i) { return i % 2; }
  static ChunkKey KeyOf(size_t i, int writer) {
    static const std::vector<NamespaceId> ids = {HashNamespace("default", Specs()[0]),
                                                 HashNamespace("default", Specs()[1])};
    return {ids[SpecOfName(i)], PrefixKey((static_cast<uint64_t>(writer) << 32) + i), 0, 0};
  }
  ChunkKey KeyOf(size_t i) const { return KeyOf(i, number_); }

  absl::Status Step(const Life& life) {
    const size_t i = random_() % names_.size();
    switch (random_() % 16) {
      case 0:
        return Flush(life);
      case 1:
        return LeaveHalf(i);
      case 2:
      case 3:
      case 4:
        return names_[i].now.has_value() ? Erase(i, life) : absl::OkStatus();
      case 5:
      case 6:
      case 7:
        return Check(i, life);
      default:
        return names_[i].now.has_value() ? absl::OkStatus() : Publish(i);
    }
  }

  absl::StatusOr<std::unique_ptr<ChunkWriter>> Reserve(size_t i) {
    ReserveRequest request;
    request.ns = KeyOf(i).ns;
    auto writers = transport_->Reserve(request, Soon());
    if (!writers.ok()) return writers.status();
    return std::move(writers->front());
  }

  absl::Status Publish(size_t i) {
    auto writer = Reserve(i);
    if (!writer.ok()) return writer.status();
    const uint64_t version = random_() | 1;
    const int layers = static_cast<int>(Specs()[SpecOfName(i)].groups[0].layers.size());
    for (int layer = 0; layer < layers; ++layer) {
      if (absl::Status put = Put(writer->get(), layer, version + static_cast<uint64_t>(layer)); !put.ok()) return put;
    }
    const ChunkKey live = (*writer)->key();
    PrefixName name{KeyOf(i).id, i < 2 ? Id128{} : KeyOf(i - 2).id};
    names_.Publishing(i, version);
    if (absl::Status published = transport_->Publish(live, name, Soon()); !published.ok()) return published;
    names_.Published(i, version);
    ++totals_->published;
    if (random_() % 4 != 0) transport_->Release({live}, transport_->epoch());  // else its session keeps it
    return absl::OkStatus();
  }

  absl::Status LeaveHalf(size_t i) {
    auto writer = Reserve(i);
    if (!writer.ok()) return writer.status();
    return Put(writer->get(), 0, random_());
  }

  absl::Status Erase(size_t i, const Life& life) {
    const bool may_be_lost = life.loses && !names_[i].must.has_value();
    names_.Erasing(i);
    const absl::Status erased = transport_->Erase(KeyOf(i), Soon());
    if (absl::IsNotFound(erased) && may_be_lost) {
      names_.Lost(i);
      return absl::OkStatus();
    }
    if (!erased.ok()) return erased;
    names_.Erased(i);
    ++totals_->erased;
    return absl::OkStatus();
  }

  absl::Status Flush(const Life& life) {
    if (absl::Status flushed = transport_->Flush(Soon()); !flushed.ok()) return flushed;
    ++totals_->flushes;
    // What was dropped before has not been flushed.
    for (size_t i = 0; life.loses && i < names_.size(); ++i) {
      if (!names_[i].now.has_value() || names_[i].must.has_value()) continue;
      const absl::StatusOr<LookupResult> there = transport_->Lookup({KeyOf(i)}, false, Soon());
      if (!there.ok()) return there.status();
      if (there->chunks == 0) names_.Lost(i);
    }
    names_.Flushed();
    return absl::OkStatus();
  }

  absl::Status Check(size_t i, const Life& life) {
    const absl::StatusOr<std::optional<uint64_t>> found = Find(transport_.get(), i);
    if (!found.ok()) return found.status();
    ++totals_->read;
    if (!found->has_value() && life.loses && !names_[i].must.has_value()) {
      names_.Lost(i);
    } else {
      EXPECT_EQ(*found, names_[i].now) << "writer " << number_ << ", name " << i;
    }
    return absl::OkStatus();
  }

  // The version whose bytes all layers have. An error that is none of the transport's: bytes of no version, or not all
  // layers.
  absl::StatusOr<std::optional<uint64_t>> Find(Transport* transport, size_t i) {
    const NamespaceSpec spec = Specs()[SpecOfName(i)];
    std::vector<BlockKey> keys;
    for (size_t layer = 0; layer < spec.groups[0].layers.size(); ++layer) {
      keys.push_back({KeyOf(i), static_cast<uint16_t>(layer)});
    }
    auto stream = transport->Fetch(keys, Soon());
    std::set<uint64_t> versions = names_[i].may;
    size_t missing = 0;
    for (size_t layer = 0; layer < keys.size(); ++layer) {
      const absl::StatusOr<BlockView> block = stream->Next();
      if (!block.ok() && !absl::IsNotFound(block.status())) return block.status();
      missing += block.ok() ? 0 : 1;
      if (!block.ok()) continue;
      const std::vector<uint8_t> bytes = Bytes(*block);
      std::erase_if(versions, [&](uint64_t version) { return Pattern(version + layer, bytes.size()) != bytes; });
    }
    if (missing == keys.size()) return std::nullopt;
    if (missing != 0) return absl::InternalError(absl::StrCat(missing, " of ", keys.size(), " layers are missing"));
    if (versions.size() != 1) return absl::InternalError("bytes that nobody wrote under this name, or erased ones");
    return *versions.begin();
  }

  const int number_;
  std::mt19937_64 random_;
  Totals* const totals_;
  ExpectedNames names_;
  std::shared_ptr<Transport> transport_;
};

class KillSoak : public testing::Test {
 protected:
  Life NewLife() {
    Life life;
    const std::vector<std::string> policies = {"write_back", "write_through", "on_second_hit"};
    const std::string& policy = policies[random_() % policies.size()];
    life.flags = {absl::StrCat("--memory=", 3 + random_() % 6, "MiB"), "--disk=" + folder_.path(),
                  "--disk-bytes=128MiB", "--disk-keep-free=0", "--write-policy=" + policy};
    life.loses = policy == "on_second_hit";
    return life;
  }

  // Of its segments, as `du` counts them.
  uint64_t TakenOfTheDisk() const {
    uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      struct stat info;
      if (entry.path().filename().string().rfind("segment-", 0) != 0) continue;
      if (stat(entry.path().c_str(), &info) == 0) bytes += static_cast<uint64_t>(info.st_blocks) * 512;
    }
    return bytes;
  }

  void ExpectUsage(const std::string& url) {
    uint64_t said = 0, taken = 0;
    const bool agree = Eventually([&] {  // what is given back is on its way
      said = RawClient(url).Stats()["disk_used_bytes"];
      taken = TakenOfTheDisk();
      return said < taken + kDiskAlignment && taken < said + kDiskAlignment;
    });
    EXPECT_TRUE(agree) << "the daemon says " << said << ", the disk " << taken;
    auto stats = RawClient(url).Stats();
    for (const char* name : {"corruptions", "disk_reads_failed", "disk_writes_failed", "disk_evictions"}) {
      EXPECT_EQ(stats[name], 0u) << name;
    }
  }

  void Verify(const std::string& url) {
    auto transport = Reach(url);
    ASSERT_NE(transport, nullptr);
    for (auto& writer : writers_) writer->Verify(transport.get());
    ExpectUsage(url);
  }

  // Load until some step of it, then the end.
  void LiveAndDie(ChildDaemon* daemon, const Life& life) {
    std::atomic<uint64_t> steps{0};
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (auto& writer : writers_) ASSERT_NO_FATAL_FAILURE(writer->Connect(daemon->unix_url()));
    for (auto& writer : writers_) {
      threads.emplace_back([&, writer = writer.get()] { writer->Run(life, &steps, &over); });
    }
    const uint64_t last = random_() % kMostSteps;
    while (steps < last && !HasFailure()) std::this_thread::yield();
    const bool in_order = random_() % 5 == 0;
    over = true;
    if (in_order) {
      daemon->Terminate();
    } else {
      daemon->Kill();
    }
    for (std::thread& thread : threads) thread.join();
    if (in_order && !life.loses) {
      for (auto& writer : writers_) writer->EndedInOrder();
    }
    ++(in_order ? totals_.ended : totals_.killed);
  }

  const TempFolder folder_;
  std::mt19937_64 random_;
  Totals totals_;
  std::vector<std::unique_ptr<Writer>> writers_;
};

TEST_F(KillSoak, NothingFlushedIsLostAndNothingErasedComesBack) {
  const char* const asked = std::getenv("KVFERRY_SOAK_CYCLES");
  uint64_t cycles = 0;
  ASSERT_TRUE(absl::SimpleAtoi(asked != nullptr ? asked : "10", &cycles)) << "KVFERRY_SOAK_CYCLES=" << asked;
  const Seeds seeds(1);
  random_.seed(seeds.first);
  for (int i = 0; i < kWriters; ++i) writers_.push_back(std::make_unique<Writer>(i, random_(), &totals_));
  for (uint64_t cycle = 0; cycle < cycles && !HasFailure(); ++cycle) {
    SCOPED_TRACE(testing::Message() << "cycle " << cycle << ", KVFERRY_TEST_SEED=" << seeds.first);
    const Life life = NewLife();
    ChildDaemon daemon(life.flags);
    Verify(daemon.unix_url());
    LiveAndDie(&daemon, life);
    if (random_() % 3 == 0) {  // killed again before anybody could use it
      daemon.Start();
      daemon.Kill();
      ++totals_.killed_at_start;
    }
  }
  if (!HasFailure()) {
    ChildDaemon daemon(NewLife().flags);
    Verify(daemon.unix_url());
  }
  std::printf(
      "%llu cycles: killed %llu, ended in order %llu, killed at start %llu; %llu published, %llu flushes, "
      "%llu erased, %llu read; after restarts %llu names verified, %llu of which had to be there\n",
      static_cast<unsigned long long>(cycles), static_cast<unsigned long long>(totals_.killed),
      static_cast<unsigned long long>(totals_.ended), static_cast<unsigned long long>(totals_.killed_at_start),
      static_cast<unsigned long long>(totals_.published), static_cast<unsigned long long>(totals_.flushes),
      static_cast<unsigned long long>(totals_.erased), static_cast<unsigned long long>(totals_.read),
      static_cast<unsigned long long>(totals_.verified), static_cast<unsigned long long>(totals_.required));
}

}  // namespace
}  // namespace kvferry
