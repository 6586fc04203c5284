#include "storage/base/namespace_spec.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "storage/base/bytes.h"
#include "storage/base/sha256.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

// Bounds. With them the bytes of a block stay below 2^56 while they are computed, and an image below 2^43.
constexpr size_t kMaxName = 4096;
constexpr size_t kMaxGroups = 64;
constexpr size_t kMaxLayers = 1024;
constexpr size_t kMaxParts = 16;
constexpr uint32_t kMaxHeads = 1 << 16;
constexpr uint32_t kMaxDim = 1 << 20;
constexpr uint32_t kMaxTokens = 4096;
constexpr uint32_t kMaxDtypeBytes = 16;
constexpr uint32_t kMaxShards = 1024;
constexpr uint64_t kMaxBlockBytes = 4 * kGiB;

absl::Status Between(absl::string_view field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("namespace spec: ", field, " is ", value, ", expected ", low, " to ", high));
}

absl::Status Named(absl::string_view field, const std::string& value, size_t low) {
  if (value.size() >= low && value.size() <= kMaxName) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("namespace spec: ", field, " has ", value.size(), " bytes (\"",
                                                 absl::CHexEscape(value.substr(0, 32)), "\"), expected ", low, " to ",
                                                 kMaxName));
}

// Size of the element types by the name that PyTorch gives them; 0: a name we do not know, and cannot check.
uint32_t KnownDtypeBytes(const std::string& dtype) {
  if (dtype == "float64" || dtype == "int64") return 8;
  if (dtype == "float32" || dtype == "int32") return 4;
  if (dtype == "float16" || dtype == "bfloat16" || dtype == "int16") return 2;
  if (dtype == "int8" || dtype == "uint8" || dtype == "float8_e4m3fn" || dtype == "float8_e5m2") return 1;
  return 0;
}

absl::Status ValidateLayer(const NamespaceSpec& spec, int group, int layer) {
  const LayerSpec& l = spec.groups[group].layers[layer];
  const std::string where = absl::StrCat("groups[", group, "].layers[", layer, "]");
  KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat(where, ": number of parts"), l.parts.size(), 1, kMaxParts));
  for (size_t i = 0; i < l.parts.size(); ++i) {
    KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat(where, ".parts[", i, "].heads"), l.parts[i].heads, 1, kMaxHeads));
    KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat(where, ".parts[", i, "].dim"), l.parts[i].dim, 1, kMaxDim));
  }
  return Between(absl::StrCat(where, ": bytes of a block"), spec.BlockBytes(group, layer), 1, kMaxBlockBytes);
}

absl::Status ValidateGroup(const NamespaceSpec& spec, int group) {
  const GroupSpec& g = spec.groups[group];
  const std::string where = absl::StrCat("groups[", group, "]");
  KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat(where, ".retention"), static_cast<uint8_t>(g.retention), 0, 2));
  if (g.retention == Retention::kWindow) {
    KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat(where, ".window"), g.window, 1, UINT32_MAX));
  } else {
    KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat(where, ".window of a group without one"), g.window, 0, 0));
  }
  KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat(where, ": number of layers"), g.layers.size(), 1, kMaxLayers));
  for (size_t layer = 0; layer < g.layers.size(); ++layer) {
    KVFERRY_RETURN_IF_ERROR(ValidateLayer(spec, group, static_cast<int>(layer)));
  }
  return absl::OkStatus();
}

// One field: tag (1 byte), length (4 bytes, little-endian), value. Lists are one field an element, in order.
void PutU32(uint32_t value, std::string* out) {
  for (int shift = 0; shift < 32; shift += 8) out->push_back(static_cast<char>(value >> shift));
}
void PutField(char tag, absl::string_view value, std::string* out) {
  out->push_back(tag);
  PutU32(static_cast<uint32_t>(value.size()), out);
  out->append(value.data(), value.size());
}
void PutField(char tag, uint32_t value, std::string* out) {
  std::string bytes;
  PutU32(value, &bytes);
  PutField(tag, bytes, out);
}

std::string CanonicalLayer(const LayerSpec& layer) {
  std::string out;
  for (const PartSpec& part : layer.parts) {
    std::string bytes;
    PutField(1, part.heads, &bytes);
    PutField(2, part.dim, &bytes);
    PutField(1, bytes, &out);
  }
  return out;
}

std::string CanonicalGroup(const GroupSpec& group) {
  std::string out;
  PutField(1, static_cast<uint32_t>(group.retention), &out);
  PutField(2, group.window, &out);
  for (const LayerSpec& layer : group.layers) PutField(3, CanonicalLayer(layer), &out);
  return out;
}

// Reads fields from the front of bytes.
class FieldReader {
 public:
  explicit FieldReader(absl::string_view bytes) : left_(bytes) {}
  // The tag of the next field; 0 if there is none.
  char tag() const { return left_.empty() ? 0 : left_[0]; }
  bool Take(char tag, absl::string_view* value) {
    if (this->tag() != tag || left_.size() < 5) return false;
    const uint64_t size = Number(left_.substr(1, 4));
    if (left_.size() - 5 < size) return false;
    *value = left_.substr(5, size);
    left_.remove_prefix(5 + size);
    return true;
  }
  bool Take(char tag, std::string* value) {
    absl::string_view bytes;
    if (!Take(tag, &bytes)) return false;
    *value = std::string(bytes);
    return true;
  }
  bool Take(char tag, uint32_t* value) {
    absl::string_view bytes;
    if (!Take(tag, &bytes) || bytes.size() != 4) return false;
    *value = Number(bytes);
    return true;
  }

 private:
  static uint32_t Number(absl::string_view bytes) {
    uint32_t value = 0;
    for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[static_cast<size_t>(i)]);
    return value;
  }
  absl::string_view left_;
};

bool ParseLayer(absl::string_view bytes, LayerSpec* layer) {
  FieldReader parts(bytes);
  while (parts.tag() == 1) {
    absl::string_view part;
    if (!parts.Take(1, &part)) return false;
    FieldReader fields(part);
    PartSpec& into = layer->parts.emplace_back();
    if (!fields.Take(1, &into.heads) || !fields.Take(2, &into.dim)) return false;
  }
  return true;
}

bool ParseGroup(absl::string_view bytes, GroupSpec* group) {
  FieldReader fields(bytes);
  uint32_t retention = 0;
  if (!fields.Take(1, &retention) || retention > 2 || !fields.Take(2, &group->window)) return false;
  group->retention = static_cast<Retention>(retention);
  while (fields.tag() == 3) {
    absl::string_view layer;
    if (!fields.Take(3, &layer) || !ParseLayer(layer, &group->layers.emplace_back())) return false;
  }
  return true;
}

bool ParseFields(absl::string_view bytes, NamespaceSpec* spec) {
  FieldReader fields(bytes);
  if (!fields.Take(1, &spec->scheme) || !fields.Take(2, &spec->model) || !fields.Take(3, &spec->dtype) ||
      !fields.Take(4, &spec->dtype_bytes) || !fields.Take(5, &spec->codec) || !fields.Take(6, &spec->rope) ||
      !fields.Take(7, &spec->block_tokens) || !fields.Take(8, &spec->shards)) {
    return false;
  }
  while (fields.tag() == 9) {
    absl::string_view group;
    if (!fields.Take(9, &group) || !ParseGroup(group, &spec->groups.emplace_back())) return false;
  }
  return true;
}

}  // namespace

std::vector<ElementRun> NamespaceSpec::ElementsOf(int group, int layer) const {
  const std::vector<PartSpec>& parts = groups[group].layers[layer].parts;
  std::vector<ElementRun> runs;
  runs.reserve(parts.size());
  for (const PartSpec& part : parts) {
    runs.push_back({uint64_t{part.heads} * part.dim * block_tokens * dtype_bytes, kvferry::ElementsOf(dtype)});
  }
  if (codec != "raw") return {};
  if (!absl::StrContains(dtype, '*') || group != 0) return runs;
  int first = 0;  // layer of the list's entry
  for (const absl::string_view entry : absl::StrSplit(dtype, ',')) {
    const std::pair<absl::string_view, absl::string_view> names_and_count =
        absl::StrSplit(entry, absl::MaxSplits('*', 1));
    int count = 0;
    if (!absl::SimpleAtoi(names_and_count.second, &count) || count < 1) return {};
    if (layer < first + count) {
      const std::vector<absl::string_view> names = absl::StrSplit(names_and_count.first, '+');
      for (size_t i = 0; i < runs.size(); ++i)
        runs[i].elements = kvferry::ElementsOf(names[std::min(i, names.size() - 1)]);
      return runs;
    }
    first += count;
  }
  return {};
}

uint64_t NamespaceSpec::BlockBytes(int group, int layer) const {
  uint64_t elements = 0;
  for (const PartSpec& part : groups[group].layers[layer].parts) {
    elements += uint64_t{part.heads} * part.dim * block_tokens;
  }
  return elements * dtype_bytes;
}

absl::Status Validate(const NamespaceSpec& spec) {
  if (spec.scheme != NamespaceSpec::kScheme) {
    return absl::FailedPreconditionError(
        absl::StrCat("namespace spec: scheme is ", spec.scheme, ", this store speaks ", NamespaceSpec::kScheme));
  }
  KVFERRY_RETURN_IF_ERROR(Named("model", spec.model, 0));
  KVFERRY_RETURN_IF_ERROR(Named("dtype", spec.dtype, 1));
  KVFERRY_RETURN_IF_ERROR(Between("dtype_bytes", spec.dtype_bytes, 1, kMaxDtypeBytes));
  if (const uint32_t known = KnownDtypeBytes(spec.dtype); known != 0) {
    KVFERRY_RETURN_IF_ERROR(Between(absl::StrCat("dtype_bytes of ", spec.dtype), spec.dtype_bytes, known, known));
  }
  KVFERRY_RETURN_IF_ERROR(Named("codec", spec.codec, 1));
  KVFERRY_RETURN_IF_ERROR(Named("rope", spec.rope, 0));
  KVFERRY_RETURN_IF_ERROR(Between("block_tokens", spec.block_tokens, 1, kMaxTokens));
  KVFERRY_RETURN_IF_ERROR(Between("shards", spec.shards, 1, kMaxShards));
  KVFERRY_RETURN_IF_ERROR(Between("number of groups", spec.groups.size(), 1, kMaxGroups));
  for (size_t group = 0; group < spec.groups.size(); ++group) {
    KVFERRY_RETURN_IF_ERROR(ValidateGroup(spec, static_cast<int>(group)));
  }
  return absl::OkStatus();
}

std::string Canonical(const NamespaceSpec& spec) {
  std::string out;
  PutField(1, spec.scheme, &out);
  PutField(2, spec.model, &out);
  PutField(3, spec.dtype, &out);
  PutField(4, spec.dtype_bytes, &out);
  PutField(5, spec.codec, &out);
  PutField(6, spec.rope, &out);
  PutField(7, spec.block_tokens, &out);
  PutField(8, spec.shards, &out);
  for (const GroupSpec& group : spec.groups) PutField(9, CanonicalGroup(group), &out);
  return out;
}

absl::StatusOr<NamespaceSpec> ParseCanonical(absl::string_view bytes) {
  NamespaceSpec spec;
  // What is parsed is compared with what would be written, so nothing has to be said of what lies between or behind.
  if (!ParseFields(bytes, &spec)) {
    return absl::DataLossError(absl::StrCat("namespace spec: ", bytes.size(), " bytes, expected those of a spec"));
  }
  KVFERRY_RETURN_IF_ERROR(Validate(spec));
  if (Canonical(spec) != bytes) {
    return absl::DataLossError(absl::StrCat("namespace spec: ", bytes.size(), " bytes, expected canonical ones"));
  }
  return spec;
}

NamespaceId HashNamespace(absl::string_view tenant, const NamespaceSpec& spec) {
  std::string bytes;
  PutU32(static_cast<uint32_t>(tenant.size()), &bytes);
  absl::StrAppend(&bytes, tenant, Canonical(spec));
  return Sha256Id(bytes);
}

}  // namespace kvferry
