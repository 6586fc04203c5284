// What the bytes of a namespace mean. Two specs that differ in any field are two namespaces, so KV of another model,
// dtype or layout is a miss and never wrong bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/base/checksum.h"
#include "storage/base/key.h"

namespace kvferry {

// One tensor of a layer within a block: [heads, T, dim] elements of the spec's dtype, contiguous.
struct PartSpec {
  uint32_t heads = 0;
  uint32_t dim = 0;
  friend bool operator==(const PartSpec& a, const PartSpec& b) { return a.heads == b.heads && a.dim == b.dim; }
};

// The tensors of one layer in the order they lie in its block: K, V; one latent tensor for MLA.
struct LayerSpec {
  std::vector<PartSpec> parts;
  friend bool operator==(const LayerSpec& a, const LayerSpec& b) { return a.parts == b.parts; }
};

enum class Retention : uint8_t {
  kFull = 0,    // every token is attended to for ever
  kWindow = 1,  // the last `window` tokens
  kState = 2,   // a snapshot, valid at one length only
};

// The layers of equal retention: they share chunks.
struct GroupSpec {
  Retention retention = Retention::kFull;
  uint32_t window = 0;  // tokens, for kWindow
  std::vector<LayerSpec> layers;
};

struct NamespaceSpec {
  static constexpr uint32_t kScheme = 1;  // version of this struct's meaning, of its hash and of the prefix keys

  uint32_t scheme = kScheme;
  std::string model;  // identity of the weights; empty: none known, so nothing can be published under a prefix key
  // "float32", "bfloat16", ...: the element type of the blocks. Where the layers of group 0 differ, a list with the
  // number of those that follow one another alike, "float32*2,float32+float16*30" (K of one and V of another); then the
  // element is a byte and `dim` counts bytes.
  std::string dtype;
  uint32_t dtype_bytes = 0;
  std::string codec = "raw";
  std::string rope;           // regime of the positions baked into K; empty where the model has one only
  uint32_t block_tokens = 0;  // T
  uint32_t shards = 1;        // KV shards (tensor-parallel ranks with different heads)
  std::vector<GroupSpec> groups;

  // Bytes of one block of this layer: the sum over its parts of heads * T * dim * dtype_bytes.
  // REQUIRES: Validate() is OK.
  uint64_t BlockBytes(int group, int layer) const;
  // What the elements of such a block are, as far as `dtype` tells and the codec leaves them as they are.
  std::vector<ElementRun> ElementsOf(int group, int layer) const;
};

// INVALID_ARGUMENT naming the field, its value and what was expected; FAILED_PRECONDITION for another scheme. Bounds
// every count, so that what follows from a valid spec (sizes, layouts) cannot overflow.
absl::Status Validate(const NamespaceSpec& spec);

// Canonical bytes: every field tagged and length-prefixed, so distinct specs never meet.
std::string Canonical(const NamespaceSpec& spec);

// The spec whose canonical bytes these are. DATA_LOSS if they are none's; errors as Validate.
absl::StatusOr<NamespaceSpec> ParseCanonical(absl::string_view bytes);

// SHA-256/128 over the tenant (length-prefixed) and Canonical(spec).
NamespaceId HashNamespace(absl::string_view tenant, const NamespaceSpec& spec);

}  // namespace kvferry
