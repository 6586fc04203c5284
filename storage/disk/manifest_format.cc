#include "storage/disk/manifest_format.h"

#include <bit>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian and written as they lie in memory");

constexpr uint32_t kMagic = 0x4d46564b;  // "KVFM"

struct FixedHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t zero;
  uint64_t store[2];
  uint64_t number;
  uint32_t count;
  uint32_t payload;  // bytes of the entries; behind them lies the checksum of all before
};
static_assert(sizeof(FixedHeader) == 40 && std::is_trivially_copyable_v<FixedHeader>);

// What goes in front of an entry; its kind is the number of its type in ManifestEntry, from 1.
struct EntryHeader {
  uint8_t kind;
  uint8_t zero[3];
  uint32_t bytes;
};
static_assert(sizeof(EntryHeader) == 8);

absl::Status Bad(absl::string_view what, uint64_t value, absl::string_view expected) {
  return absl::DataLossError(absl::StrCat("manifest ", what, " is ", value, ", expected ", expected));
}

// Visits the fields of an entry in the order in which they lie in a frame: one description for all that is done with
// them.
template <typename Entry, typename Visit>
void ForEachField(Entry& entry, Visit visit) {
  using T = std::remove_const_t<Entry>;
  const auto key = [&visit](auto& k) { visit(k.ns[0], k.ns[1], k.id[0], k.id[1], k.group, k.shard); };
  if constexpr (std::is_same_v<T, NamespaceEntry>) {
    visit(entry.id[0], entry.id[1], entry.tenant, entry.spec);
  } else if constexpr (std::is_same_v<T, ErasedEntry>) {
    key(entry.key);
    visit(entry.seq);
  } else if constexpr (std::is_same_v<T, DroppedEntry>) {
    visit(entry.ns[0], entry.ns[1], entry.seq);
  } else if constexpr (std::is_same_v<T, PublishedEntry>) {
    visit(entry.place.segment, entry.place.block);
    key(entry.key);
    visit(entry.parent[0], entry.parent[1], entry.seq, entry.lifetime.priority, entry.lifetime.expires);
  } else {
    static_assert(std::is_same_v<T, FreedEntry>);
    visit(entry.place.segment, entry.place.block);
  }
}

class Sizer {
 public:
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (Add(fields), ...);
  }
  uint64_t bytes = 0;

 private:
  void Add(const std::string& text) { bytes += sizeof(uint32_t) + text.size(); }
  template <typename T>
  void Add(const T&) {
    bytes += sizeof(T);
  }
};

class Writer {
 public:
  explicit Writer(uint8_t* to) : at_(to) {}
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (Put(fields), ...);
  }
  void Put(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    std::memcpy(at_, text.data(), text.size());
    at_ += text.size();
  }
  template <typename T>
  void Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(at_, &value, sizeof(value));
    at_ += sizeof(value);
  }
  uint8_t* at() const { return at_; }

 private:
  uint8_t* at_;
};

class Reader {
 public:
  explicit Reader(ByteView from) : left_(from) {}
  template <typename... Fields>
  void operator()(Fields&... fields) {
    (Take(fields), ...);
  }
  void Take(std::string& text) {
    uint32_t size = 0;
    Take(size);
    if (size > left_.size()) return Fail();
    text.assign(reinterpret_cast<const char*>(left_.data()), size);
    left_.remove_prefix(size);
  }
  template <typename T>
  void Take(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (sizeof(value) > left_.size()) return Fail();
    std::memcpy(&value, left_.data(), sizeof(value));
    left_.remove_prefix(sizeof(value));
  }
  // Everything was there, and nothing else.
  bool done() const { return !failed_ && left_.empty(); }

 private:
  void Fail() {
    failed_ = true;
    left_ = {};
  }
  ByteView left_;
  bool failed_ = false;
};

uint64_t BodyBytes(const ManifestEntry& entry) {
  Sizer sizer;
  std::visit([&sizer](const auto& e) { ForEachField(e, [&sizer](const auto&... fields) { sizer(fields...); }); },
             entry);
  return sizer.bytes;
}

template <size_t kind = 0>
std::optional<ManifestEntry> DecodeEntry(size_t wanted, ByteView body) {
  if constexpr (kind < std::variant_size_v<ManifestEntry>) {
    if (kind != wanted) return DecodeEntry<kind + 1>(wanted, body);
    std::variant_alternative_t<kind, ManifestEntry> entry;
    Reader reader(body);
    ForEachField(entry, [&reader](auto&... fields) { reader(fields...); });
    if (!reader.done()) return std::nullopt;
    return ManifestEntry(std::move(entry));
  } else {
    return std::nullopt;
  }
}

}  // namespace

uint64_t EncodedBytes(const ManifestEntry& entry) { return sizeof(EntryHeader) + BodyBytes(entry); }

AlignedBuffer EncodeFrame(const ManifestFrame& frame) {
  uint64_t payload = 0;
  for (const ManifestEntry& entry : frame.entries) payload += EncodedBytes(entry);
  AlignedBuffer buffer(sizeof(FixedHeader) + payload + sizeof(uint64_t));
  FixedHeader fixed = {};
  fixed.magic = kMagic;
  fixed.version = kManifestVersion;
  fixed.store[0] = frame.store[0];
  fixed.store[1] = frame.store[1];
  fixed.number = frame.number;
  fixed.count = static_cast<uint32_t>(frame.entries.size());
  fixed.payload = static_cast<uint32_t>(payload);
  Writer writer(buffer.view().data());
  writer.Put(fixed);
  for (const ManifestEntry& entry : frame.entries) {
    EntryHeader header = {};
    header.kind = static_cast<uint8_t>(entry.index() + 1);
    header.bytes = static_cast<uint32_t>(BodyBytes(entry));
    writer.Put(header);
    std::visit([&writer](const auto& e) { ForEachField(e, [&writer](const auto&... fields) { writer(fields...); }); },
               entry);
  }
  writer.Put(HeaderChecksum(buffer.view().subspan(0, sizeof(fixed) + payload)));
  return buffer;
}

absl::StatusOr<DecodedFrame> DecodeFrame(ByteView bytes) {
  FixedHeader fixed;
  if (bytes.size() < sizeof(fixed)) return Bad("frame size", bytes.size(), absl::StrCat("at least ", sizeof(fixed)));
  std::memcpy(&fixed, bytes.data(), sizeof(fixed));
  if (fixed.magic != kMagic) return Bad("magic", fixed.magic, absl::StrCat(kMagic));
  const uint64_t covered = sizeof(fixed) + uint64_t{fixed.payload};
  uint64_t checksum = 0;
  if (bytes.size() < covered + sizeof(checksum)) {
    return Bad("frame size", bytes.size(), absl::StrCat("at least ", covered + sizeof(checksum)));
  }
  std::memcpy(&checksum, bytes.data() + covered, sizeof(checksum));
  if (const uint64_t found = HeaderChecksum(bytes.subspan(0, covered)); found != checksum) {
    return Bad("checksum", found, absl::StrCat(checksum));
  }
  if (fixed.version != kManifestVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("manifest: version is ", fixed.version, ", this build reads ", kManifestVersion));
  }
  DecodedFrame decoded;
  decoded.bytes = RoundUp(covered + sizeof(checksum), kDiskAlignment);
  decoded.frame.store = {fixed.store[0], fixed.store[1]};
  decoded.frame.number = fixed.number;
  ByteView left = bytes.subspan(sizeof(fixed), fixed.payload);
  for (uint32_t i = 0; i < fixed.count; ++i) {
    EntryHeader header;
    if (left.size() < sizeof(header)) return Bad("entries", i, absl::StrCat(fixed.count));
    std::memcpy(&header, left.data(), sizeof(header));
    left.remove_prefix(sizeof(header));
    if (header.bytes > left.size()) return Bad("entry size", header.bytes, absl::StrCat(left.size(), " at most"));
    std::optional<ManifestEntry> entry = DecodeEntry(size_t{header.kind} - 1, left.subspan(0, header.bytes));
    if (!entry) return Bad("entry kind", header.kind, absl::StrCat("one whose fields take ", header.bytes, " bytes"));
    decoded.frame.entries.push_back(*std::move(entry));
    left.remove_prefix(header.bytes);
  }
  if (!left.empty()) return Bad("bytes behind the entries", left.size(), "0");
  return decoded;
}

}  // namespace kvferry
