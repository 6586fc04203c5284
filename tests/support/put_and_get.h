// Chunks of known bytes in and out of a transport.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/transport.h"

namespace kvferry {

// Far enough away never to decide a test.
absl::Time Soon();

// A spec whose blocks, one a layer, have these sizes in bytes.
NamespaceSpec SpecOf(const std::vector<uint32_t>& block_bytes);
NamespaceId Open(Transport* transport, const NamespaceSpec& spec);
Id128 PrefixKey(uint64_t n);

// Bytes that differ from those of another seed.
std::vector<uint8_t> Pattern(uint64_t seed, uint64_t size);
std::vector<uint8_t> Bytes(const BlockView& view);

// Packs Pattern(seed) into the layer, commits it and waits for the acknowledgement.
absl::Status Put(ChunkWriter* writer, int layer, uint64_t seed);
std::unique_ptr<ChunkWriter> ReserveOne(Transport* transport, const NamespaceId& ns);
// Reserves a chunk of `layers` layers and puts layer l as Pattern(seed + l).
ChunkKey PutChunk(Transport* transport, const NamespaceId& ns, int layers, uint64_t seed);

absl::StatusOr<BlockView> GetOne(Transport* transport, const BlockKey& key);
// Gets it until it is a miss; fails if that takes too long.
void AwaitMiss(Transport* transport, const BlockKey& key);

}  // namespace kvferry
