// A recorded trace of prompts, played to the store's policies without a store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/eviction.h"
#include "storage/write_policy.h"

namespace kvferry {

// The chunks of each request's prompt, by names of their prefixes, in order.
using Trace = std::vector<std::vector<uint64_t>>;

// From a file, plain or gzip, of one JSON object a line with an array of numbers "hash_ids". NOT_FOUND or
// INVALID_ARGUMENT name the file and the line.
absl::StatusOr<Trace> ReadTrace(const std::string& path);

struct TraceOptions {
  PolicyKind policy = PolicyKind::kS3Fifo;
  WritePolicy write = WritePolicy::kWriteBack;
  uint64_t memory = 0;  // chunks that each tier holds
  uint64_t disk = 0;
};

struct TraceResult {
  uint64_t asked = 0, hit_memory = 0, hit_disk = 0;  // chunks
  uint64_t written = 0;                              // to disk
  uint64_t largest_memory = 0, largest_disk = 0;     // what the tiers held at most

  double hit_ratio() const { return static_cast<double>(hit_memory + hit_disk) / static_cast<double>(asked); }
  double written_per_served() const {
    return static_cast<double>(written) / static_cast<double>(hit_memory + hit_disk);
  }
};

// Each request finds the leading run of its chunks, which are leased until its end, reads those that lie on disk into
// memory, and adds the rest. No chunk goes before its descendants. A request that is larger than the tiers keeps what
// fits.
TraceResult Play(const Trace& trace, const TraceOptions& options);

// `kvferry-bench trace FILE [CHUNKS...]`: plays the file with each policy, write policy and size (chunks in all, a
// tenth of them in memory) and prints an array of JSON objects. Returns the exit status.
int TraceMain(const std::vector<std::string>& args);

}  // namespace kvferry
