// Eight threads on one small store, with the real executor: for ThreadSanitizer, and for whoever breaks a pin.
#include <atomic>
#include <random>
#include <thread>

#include "storage/base/mutex.h"
#include "tests/storage/store_fixture.h"

namespace kvferry {
namespace {

constexpr int kThreads = 8;
constexpr int kSteps = 400;

// Hands a callback's answer to the thread that waits for it.
template <typename T>
class Slot {
 public:
  void Set(T value) {
    MutexLock lock(&mu_);
    value_.emplace(std::move(value));
    set_.NotifyAll();
  }
  T Wait() {
    MutexLock lock(&mu_);
    while (!value_) set_.Wait(&mu_);
    return *std::move(value_);
  }

 private:
  Mutex mu_;
  CondVar set_;
  std::optional<T> value_ ABSL_GUARDED_BY(mu_);
};

class StoreThreads : public testing::Test {
 protected:
  static NamespaceSpec Spec() { return SmallSpec(2, 4, 64, 16); }

  void Work(int thread, uint32_t seed);
  absl::StatusOr<Writers> Reserve(SessionId session, const NamespaceId& ns, int count);

  std::unique_ptr<Executor> executor_ = NewThreadExecutor();
  std::unique_ptr<Store> store_;
  std::atomic<uint64_t> granted_{0}, refused_{0}, hits_{0};
};

absl::StatusOr<Writers> StoreThreads::Reserve(SessionId session, const NamespaceId& ns, int count) {
  ReserveOptions options;
  options.count = count;
  options.deadline = executor_->Now() + absl::Milliseconds(20);
  auto slot = std::make_shared<Slot<absl::StatusOr<Writers>>>();
  store_->Reserve(session, ns, options, [slot](absl::StatusOr<Writers> writers) { slot->Set(std::move(writers)); });
  return slot->Wait();
}

// Chunks of prefix id `i` always have the bytes of seed `i`, so any reader can check any chunk.
void StoreThreads::Work(int thread, uint32_t seed) {
  std::mt19937 random(seed + thread);
  const std::string tenant = thread % 2 == 0 ? "even" : "odd";
  SessionId session = *store_->OpenSession(tenant);
  NamespaceId ns = *store_->OpenNamespace(session, Spec());
  std::vector<ChunkKey> live;
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t id = 1 + random() % 30;
    const ChunkKey prefix{ns, {0, id}, 0, 0};
    switch (random() % 6) {
      case 0:
      case 1: {
        absl::StatusOr<Writers> writers = Reserve(session, ns, 1 + random() % 2);
        if (!writers.ok()) {
          ++refused_;
          store_->Release(session, live);
          live.clear();
          break;
        }
        ++granted_;
        for (auto& writer : *writers) {
          const int layers = random() % 8 == 0 ? 1 : 2;  // some are given up half way
          for (int layer = 0; layer < layers; ++layer) {
            const MutableByteView slot = writer->Layer(layer);
            for (size_t at = 0; at < slot.size(); ++at) slot[at] = ByteAt(id, layer, at);
            writer->Commit(layer, BlockChecksum(ByteView(slot)), [](absl::Status status) { EXPECT_TRUE(status.ok()); });
          }
          if (layers < 2) continue;
          live.push_back(writer->key());
          (void)store_->Publish(session, writer->key(), PublishOptions{{0, id}, {0, id - 1}});
        }
        break;
      }
      case 2:
        if (live.size() > 2) {
          store_->Release(session, {live.front()});
          live.erase(live.begin());
        }
        break;
      case 3: {
        const absl::StatusOr<Match> match = store_->Lookup(session, {prefix, prefix}, true);
        ASSERT_TRUE(match.ok()) << match.status();
        for (int i = 0; i < match->chunks; ++i) store_->Release(session, {prefix});
        break;
      }
      case 4:
        store_->Get(session, BlockKey{prefix, 1}, [this, id](absl::StatusOr<BlockView> view) {
          if (!view.ok()) {
            EXPECT_EQ(view.status().code(), absl::StatusCode::kNotFound);
            return;
          }
          ++hits_;
          EXPECT_TRUE(view->Verify().ok());
          EXPECT_EQ(view->pieces()[0][10], ByteAt(id, 1, 10));
        });
        break;
      case 5:
        switch (random() % 10) {
          case 0:
            store_->Erase(session, prefix, [](const absl::Status&) {});
            break;
          case 1:
            store_->SuspendSession(session);
            (void)store_->ResumeSession(tenant, session);
            break;
          case 2:
            store_->EndSession(session);
            live.clear();
            session = *store_->OpenSession(tenant);
            ns = *store_->OpenNamespace(session, Spec());
            break;
          case 3:
            for (uint64_t after = 0, seen = 1; seen != 0;) {
              const std::vector<ChunkInfo> chunks = store_->List(after, 4);
              seen = chunks.size();
              if (seen != 0) after = chunks.back().number;
            }
            break;
          default:
            (void)store_->Stats();
        }
        break;
    }
  }
  store_->EndSession(session);
}

TEST_F(StoreThreads, EightThreadsOneSmallStore) {
  const uint32_t seed = std::random_device()();
  std::printf("seed %u\n", seed);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  StoreOptions options;
  options.memory_bytes = BudgetFor(Spec(), 24);
  store_ = *OpenStore(options, executor_.get());
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([this, i, seed] { Work(i, seed); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(granted_, 0u);
  EXPECT_GT(hits_, 0u);
  for (const char* tenant : {"even", "odd"}) {
    const SessionId session = *store_->OpenSession(tenant);
    const NamespaceId ns = HashNamespace(tenant, Spec());
    for (uint64_t id = 1; id <= 30; ++id)
      store_->Erase(session, ChunkKey{ns, {0, id}, 0, 0}, [](const absl::Status&) {});
    store_->EndSession(session);
  }
  const StoreStats stats = store_->Stats();
  EXPECT_EQ(stats.memory_used_bytes, 0u);
  EXPECT_EQ(stats.chunks_live + stats.chunks_published + stats.chunks_reserved + stats.chunks_leased, 0u);
  EXPECT_EQ(stats.sessions + stats.namespaces, 0u);
  EXPECT_GT(stats.evictions, 0u);
}

// Views and writers of a store that is being closed, and a reservation that waits, on other threads.
TEST_F(StoreThreads, ClosingWhileOthersHold) {
  StoreOptions options;
  options.memory_bytes = BudgetFor(Spec(), 4);
  for (int round = 0; round < 20; ++round) {
    store_ = *OpenStore(options, executor_.get());
    const SessionId session = *store_->OpenSession("tenant");
    const NamespaceId ns = *store_->OpenNamespace(session, Spec());
    absl::StatusOr<Writers> writers = Reserve(session, ns, 4);
    ASSERT_TRUE(writers.ok()) << writers.status();
    ReserveOptions reserve;
    reserve.deadline = absl::InfiniteFuture();
    Slot<absl::Status> waiting;
    store_->Reserve(session, ns, reserve, [&](absl::StatusOr<Writers> granted) { waiting.Set(granted.status()); });
    std::thread writer([&] {
      writers->front()->Commit(0, 0, [](absl::Status) {});
      writers->clear();
    });
    store_.reset();
    (void)waiting.Wait();  // answered, whichever was first
    writer.join();
  }
}

}  // namespace
}  // namespace kvferry
