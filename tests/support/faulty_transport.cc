#include "tests/support/faulty_transport.h"

#include <algorithm>
#include <chrono>

#include "absl/time/clock.h"

namespace kvferry {
namespace {

class FaultyWriter final : public ChunkWriter {
 public:
  FaultyWriter(FaultyTransport* transport, std::unique_ptr<ChunkWriter> real)
      : transport_(transport), real_(std::move(real)) {}
  const ChunkKey& key() const override { return real_->key(); }
  MutableByteView Layer(int layer) override { return real_->Layer(layer); }
  void Commit(int layer, BlockSum sum, CommitDone done) override {
    ++transport_->commits;
    if (transport_->fail_commits > 0) {
      --transport_->fail_commits;
      transport_->Acknowledge(std::move(done), absl::UnavailableError("injected: the put failed"));
      return;
    }
    real_->Commit(layer, sum, [transport = transport_, done = std::move(done)](absl::Status status) mutable {
      transport->Acknowledge(std::move(done), std::move(status));
    });
  }
  void Discard(int layer) override { real_->Discard(layer); }

 private:
  FaultyTransport* const transport_;
  const std::unique_ptr<ChunkWriter> real_;
};

class FaultyStream final : public FetchStream {
 public:
  FaultyStream(FaultyTransport* transport, std::unique_ptr<FetchStream> real, absl::Time deadline)
      : transport_(transport), real_(std::move(real)), deadline_(deadline) {}
  absl::StatusOr<BlockView> Next() override {
    if (transport_->stall_fetches) {
      if (transport_->stalled_since_ns == 0) transport_->stalled_since_ns = absl::GetCurrentTimeNanos();
      absl::SleepFor(deadline_ - absl::Now());
      return absl::DeadlineExceededError("injected: no block by the deadline");
    }
    if (transport_->fail_fetch_after == 0) return absl::UnavailableError("injected: the store is gone");
    if (transport_->fail_fetch_after > 0) --transport_->fail_fetch_after;
    absl::StatusOr<BlockView> view = real_->Next();
    if (!view.ok()) return view;
    ++transport_->blocks_fetched;
    return transport_->copies ? InPieces(*view) : *std::move(view);
  }

 private:
  // A copy that lies in pieces of 1,000 bytes, which no token and no head divides.
  static BlockView InPieces(const BlockView& view) {
    auto bytes = std::make_shared<std::vector<uint8_t>>(view.size());
    view.CopyTo(0, view.size(), bytes->data());
    BlockView::Pieces pieces;
    for (size_t at = 0; at < bytes->size(); at += 1000) {
      pieces.push_back(ByteView(*bytes).subspan(at, std::min<size_t>(1000, bytes->size() - at)));
    }
    return BlockView(std::move(pieces), view.checksum(), bytes);
  }

  FaultyTransport* const transport_;
  const std::unique_ptr<FetchStream> real_;
  const absl::Time deadline_;
};

}  // namespace

FaultyTransport::FaultyTransport(std::shared_ptr<Transport> real)
    : real_(std::move(real)), deliverer_([this] { Deliver(); }) {}

FaultyTransport::~FaultyTransport() {
  ReleaseAcks();
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  deliverer_.join();
}

absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> FaultyTransport::Reserve(const ReserveRequest& request,
                                                                                   absl::Time deadline) {
  ++reserves;
  if (fail_reserves > 0) {
    --fail_reserves;
    return absl::Status(reserve_code, "injected: no room");
  }
  if (restarts_in_reserve > 0) {
    --restarts_in_reserve;
    ++epoch_added;
  }
  auto writers = real_->Reserve(request, deadline);
  if (!writers.ok()) return writers;
  for (std::unique_ptr<ChunkWriter>& writer : *writers) {
    writer = std::make_unique<FaultyWriter>(this, std::move(writer));
  }
  return writers;
}

std::unique_ptr<FetchStream> FaultyTransport::Fetch(absl::Span<const BlockKey> keys, absl::Time deadline) {
  ++fetches;
  last_deadline_ns = absl::ToUnixNanos(deadline);
  return std::make_unique<FaultyStream>(this, real_->Fetch(keys, deadline), deadline);
}

void FaultyTransport::Acknowledge(CommitDone done, absl::Status status) {
  {
    MutexLock lock(&mu_);
    if (hold_acks || late_acks) {
      (hold_acks ? held_ : late_).emplace_back(std::move(done), std::move(status));
      changed_.NotifyAll();
      return;
    }
  }
  done(std::move(status));
}

void FaultyTransport::ReleaseAcks() {
  hold_acks = false;
  std::vector<std::pair<CommitDone, absl::Status>> held;
  {
    MutexLock lock(&mu_);
    held.swap(held_);
  }
  for (auto& [done, status] : held) done(std::move(status));
}

void FaultyTransport::Deliver() {
  while (true) {
    std::vector<std::pair<CommitDone, absl::Status>> late;
    {
      MutexLock lock(&mu_);
      while (late_.empty() && !stopping_) changed_.Wait(&mu_);
      if (late_.empty()) return;
      late.swap(late_);
    }
    std::this_thread::sleep_for(
        std::chrono::microseconds(200));  // not a wait for anything: it only makes "late" likely
    for (auto& [done, status] : late) done(std::move(status));
  }
}

}  // namespace kvferry
