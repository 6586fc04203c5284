// kvferry-bench: what a data plane moves a second, put and get, against memcpy in the same process and the same run.
//
//   kvferry-bench [--quick] URL...           embedded://, unix:///path, grpc://host:port
//   kvferry-bench trace FILE [CHUNKS...]     see trace.h
//
// Prints the array of results that tests/bench/run.py collects. Rounds of all planes and of memcpy follow one another,
// so that a machine that drifts does so for all; figures are medians.
#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/transport.h"
#include "storage/base/checksum.h"
#include "storage/base/mutex.h"
#include "storage/base/status.h"
#include "tests/bench/trace.h"

namespace kvferry {
namespace {

constexpr int kLayers = 8;
constexpr uint32_t kBlockTokens = 64;
constexpr uint64_t kWorkingSet = 128 * kMiB;  // more than the caches hold

// Waits for the acknowledgements of one round. Thread-safe.
class AckCounter {
 public:
  void Done(absl::Status status) {
    MutexLock lock(&mu_);
    if (!status.ok()) status_ = std::move(status);
    ++done_;
    changed_.NotifyAll();
  }
  absl::Status WaitFor(int n, absl::Time deadline) {
    MutexLock lock(&mu_);
    while (done_ < n && status_.ok()) {
      if (changed_.WaitUntil(&mu_, deadline) && done_ < n)
        return absl::DeadlineExceededError("puts were not acknowledged");
    }
    return status_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  int done_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

// One data plane and one size of block.
class Plane {
 public:
  static absl::StatusOr<Plane> Open(std::shared_ptr<Transport> transport, uint64_t block_bytes) {
    NamespaceSpec spec;
    spec.dtype = "float32";
    spec.dtype_bytes = 4;
    spec.block_tokens = kBlockTokens;
    const PartSpec part{1, static_cast<uint32_t>(block_bytes / (2 * kBlockTokens * 4))};
    spec.groups.emplace_back().layers.assign(kLayers, LayerSpec{{part, part}});
    Plane plane;
    plane.transport_ = std::move(transport);
    plane.block_bytes_ = block_bytes;
    KVFERRY_ASSIGN_OR_RETURN(plane.request_.ns, plane.transport_->OpenNamespace(spec, Deadline()));
    plane.request_.count = static_cast<int>(std::max<uint64_t>(1, kWorkingSet / 2 / (kLayers * block_bytes)));
    return plane;
  }

  uint64_t round_bytes() const { return block_bytes_ * kLayers * static_cast<uint64_t>(request_.count); }

  // Packs, checks and hands over one round of chunks, layer by layer as a prefill does; until all are acknowledged.
  absl::Status Put(const std::vector<uint8_t>& source) {
    KVFERRY_ASSIGN_OR_RETURN(writers_, transport_->Reserve(request_, Deadline()));
    auto acks = std::make_shared<AckCounter>();
    const uint8_t* from = source.data();
    for (int layer = 0; layer < kLayers; ++layer) {
      for (auto& writer : writers_) {
        const MutableByteView slot = writer->Layer(layer);
        std::memcpy(slot.data(), from, slot.size());
        from += slot.size();
        writer->Commit(layer, BlockChecksum(slot), [acks](absl::Status status) { acks->Done(std::move(status)); });
        writer->Discard(layer);
      }
    }
    return acks->WaitFor(kLayers * request_.count, Deadline());
  }

  // Reads the round back into `to`, in the order it was put.
  absl::Status Get(std::vector<uint8_t>* to) {
    std::vector<BlockKey> keys;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const auto& writer : writers_) keys.push_back({writer->key(), static_cast<uint16_t>(layer)});
    }
    std::unique_ptr<FetchStream> stream = transport_->Fetch(keys, Deadline());
    uint8_t* out = to->data();
    for (size_t i = 0; i < keys.size(); ++i) {
      KVFERRY_ASSIGN_OR_RETURN(const BlockView view, stream->Next());
      view.CopyTo(0, view.size(), out);
      out += view.size();
    }
    return absl::OkStatus();
  }

  void Release() {
    std::vector<ChunkKey> keys;
    for (const auto& writer : writers_) keys.push_back(writer->key());
    writers_.clear();
    transport_->Release(keys, transport_->epoch());
  }

 private:
  static absl::Time Deadline() { return absl::Now() + absl::Seconds(60); }

  std::shared_ptr<Transport> transport_;
  uint64_t block_bytes_ = 0;
  ReserveRequest request_;
  std::vector<std::unique_ptr<ChunkWriter>> writers_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string SizeName(uint64_t bytes) {
  return bytes >= kMiB ? absl::StrCat(bytes / kMiB, "MiB") : absl::StrCat(bytes / kKiB, "KiB");
}

std::string PlaneName(const std::string& url) {
  if (absl::StartsWith(url, "unix://")) return "grpc-unix";
  return absl::StartsWith(url, "grpc://") ? "grpc-tcp" : "embedded";
}

// GB/s of one call that moves `bytes`.
template <typename Call>
absl::StatusOr<double> Rate(uint64_t bytes, Call call) {
  const absl::Time start = absl::Now();
  KVFERRY_RETURN_IF_ERROR(call());
  return static_cast<double>(bytes) / absl::ToDoubleNanoseconds(absl::Now() - start);
}

std::string Result(const std::string& name, double value, double reference) {
  return absl::StrFormat(
      R"({"name": "%s", "value": %.3f, "unit": "GB/s", "against": "memcpy", "limit": null, "ratio": %.3f})", name,
      value, value / reference);
}

absl::Status Measure(const std::vector<std::string>& urls, const std::vector<std::shared_ptr<Transport>>& transports,
                     uint64_t block_bytes, int rounds, std::vector<std::string>* results) {
  std::vector<Plane> planes;
  for (const auto& transport : transports) {
    KVFERRY_ASSIGN_OR_RETURN(Plane plane, Plane::Open(transport, block_bytes));
    planes.push_back(std::move(plane));
  }
  const uint64_t bytes = planes.front().round_bytes();
  std::vector<uint8_t> source(bytes), target(bytes);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 2654435761U >> 13);
  std::memset(target.data(), 1, target.size());
  std::vector<double> copies;
  std::vector<std::vector<double>> puts(planes.size()), gets(planes.size());
  for (int round = -1; round < rounds; ++round) {  // the first one touches memory and does not count
    KVFERRY_ASSIGN_OR_RETURN(const double copy, Rate(bytes, [&] {
                               std::memcpy(target.data(), source.data(), bytes);
                               return absl::OkStatus();
                             }));
    if (round >= 0) copies.push_back(copy);
    for (size_t p = 0; p < planes.size(); ++p) {
      KVFERRY_ASSIGN_OR_RETURN(const double put, Rate(bytes, [&] { return planes[p].Put(source); }));
      KVFERRY_ASSIGN_OR_RETURN(const double get, Rate(bytes, [&] { return planes[p].Get(&target); }));
      if (std::memcmp(source.data(), target.data(), bytes) != 0) {
        return absl::InternalError(absl::StrCat(urls[p], " returned other bytes than were put"));
      }
      planes[p].Release();
      if (round < 0) continue;
      puts[p].push_back(put);
      gets[p].push_back(get);
    }
  }
  for (size_t p = 0; p < planes.size(); ++p) {
    const std::string at = absl::StrCat("plane/", PlaneName(urls[p]), "/", SizeName(block_bytes));
    results->push_back(Result(absl::StrCat(at, "/put"), Median(puts[p]), Median(copies)));
    results->push_back(Result(absl::StrCat(at, "/get"), Median(gets[p]), Median(copies)));
  }
  return absl::OkStatus();
}

absl::Status Run(const std::vector<std::string>& urls, bool quick) {
  std::vector<std::shared_ptr<Transport>> transports;
  for (const std::string& url : urls) {
    ConnectOptions options;
    options.memory_bytes = 4 * kWorkingSet;
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<Transport> transport, Connect(url, options));
    transports.push_back(std::move(transport));
  }
  const std::vector<uint64_t> sizes =
      quick ? std::vector<uint64_t>{256 * kKiB, kMiB} : std::vector<uint64_t>{64 * kKiB, 256 * kKiB, kMiB, 4 * kMiB};
  std::vector<std::string> results;
  for (const uint64_t size : sizes) KVFERRY_RETURN_IF_ERROR(Measure(urls, transports, size, quick ? 5 : 15, &results));
  std::cout << "[" << absl::StrJoin(results, ",\n ") << "]\n";
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "trace") return kvferry::TraceMain({argv + 2, argv + argc});
  std::vector<std::string> urls;
  bool quick = false;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--quick") {
      quick = true;
    } else {
      urls.emplace_back(argv[i]);
    }
  }
  if (urls.empty()) urls.emplace_back("embedded://");
  const absl::Status status = kvferry::Run(urls, quick);
  if (status.ok()) return 0;
  std::cerr << "kvferry-bench: " << status.ToString() << "\n";
  return 1;
}
