#include "storage/base/namespace_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>

#include "absl/strings/escaping.h"
#include "tests/base/specs.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

// The bytes that are hashed, written out: they are the same in every build and for ever (scheme 1).
TEST(NamespaceSpec, CanonicalBytesGolden) {
  NamespaceSpec spec = SmallSpec(1, 2, 8, 4, "m");
  spec.rope.assign(1, 'r');
  EXPECT_EQ(absl::BytesToHexString(Canonical(spec)),
            "01"
            "04000000"
            "01000000"  // scheme
            "02"
            "01000000"
            "6d"  // model
            "03"
            "07000000"
            "666c6f61743332"  // dtype
            "04"
            "04000000"
            "04000000"  // dtype_bytes
            "05"
            "03000000"
            "726177"  // codec
            "06"
            "01000000"
            "72"  // rope
            "07"
            "04000000"
            "04000000"  // block_tokens
            "08"
            "04000000"
            "01000000"  // shards
            "09"
            "45000000"  // group
            "01"
            "04000000"
            "00000000"  //   retention
            "02"
            "04000000"
            "00000000"  //   window
            "03"
            "2e000000"  //   layer, with K and V
            "01"
            "12000000"
            "01"
            "04000000"
            "02000000"
            "02"
            "04000000"
            "08000000"
            "01"
            "12000000"
            "01"
            "04000000"
            "02000000"
            "02"
            "04000000"
            "08000000");
}

TEST(NamespaceSpec, HashGolden) {
  EXPECT_EQ(ToString(HashNamespace("tenant", SmallSpec())), "13f05f28674eafa00594f503ba665e7b");
}

// B20: whatever differs in how bytes are to be read is another namespace.
TEST(NamespaceSpec, EveryFieldMakesAnotherNamespace) {
  const std::vector<std::function<void(NamespaceSpec&)>> changes = {
      [](NamespaceSpec&) {},
      [](NamespaceSpec& s) { s.model = std::string("test/model2"); },
      [](NamespaceSpec& s) { s.dtype = std::string("int32"); },
      [](NamespaceSpec& s) { s.dtype = std::string("float16"), s.dtype_bytes = 2; },
      [](NamespaceSpec& s) { s.dtype = std::string("bfloat16"), s.dtype_bytes = 2; },
      [](NamespaceSpec& s) { s.dtype = std::string("float8_e4m3fn"), s.dtype_bytes = 1; },
      [](NamespaceSpec& s) { s.dtype = std::string("float8_e5m2"), s.dtype_bytes = 1; },
      [](NamespaceSpec& s) { s.codec = std::string("int8"); },
      [](NamespaceSpec& s) { s.rope = std::string("dynamic"); },
      [](NamespaceSpec& s) { s.block_tokens = 8; },
      [](NamespaceSpec& s) { s.shards = 2; },
      [](NamespaceSpec& s) { s.groups.push_back(s.groups[0]); },
      [](NamespaceSpec& s) { s.groups[0].retention = Retention::kState; },
      [](NamespaceSpec& s) { s.groups[0].retention = Retention::kWindow, s.groups[0].window = 16; },
      [](NamespaceSpec& s) { s.groups[0].layers.pop_back(); },
      [](NamespaceSpec& s) { s.groups[0].layers[0].parts.pop_back(); },
      [](NamespaceSpec& s) { s.groups[0].layers[0].parts[0].heads = 3; },
      [](NamespaceSpec& s) { s.groups[0].layers[0].parts[0].dim = 3; },
      [](NamespaceSpec& s) { std::swap(s.model, s.rope); },  // the same bytes under another tag
      [](NamespaceSpec& s) { s.model = std::string("test/"), s.rope = std::string("model"); },
  };
  std::set<NamespaceId> ids;
  for (size_t i = 0; i < changes.size(); ++i) {
    NamespaceSpec spec = SmallSpec();
    changes[i](spec);
    EXPECT_TRUE(Validate(spec).ok()) << i << ": " << Validate(spec);
    EXPECT_TRUE(ids.insert(HashNamespace("tenant", spec)).second) << "change " << i << " meets another";
  }
  EXPECT_TRUE(ids.insert(HashNamespace("tenant2", SmallSpec())).second);
}

TEST(NamespaceSpec, ABadFieldIsNamedWithItsValue) {
  struct Case {
    std::function<void(NamespaceSpec&)> change;
    std::string named;
  };
  const std::vector<Case> cases = {
      {[](NamespaceSpec& s) { s.dtype.clear(); }, "dtype"},
      {[](NamespaceSpec& s) { s.dtype_bytes = 2; }, "dtype_bytes of float32 is 2, expected 4"},
      {[](NamespaceSpec& s) { s.dtype = std::string("x"), s.dtype_bytes = 17; }, "dtype_bytes is 17"},
      {[](NamespaceSpec& s) { s.model.assign(5000, 'x'); }, "model has 5000 bytes"},
      {[](NamespaceSpec& s) { s.codec.clear(); }, "codec"},
      {[](NamespaceSpec& s) { s.block_tokens = 0; }, "block_tokens is 0"},
      {[](NamespaceSpec& s) { s.block_tokens = 4097; }, "block_tokens is 4097"},
      {[](NamespaceSpec& s) { s.shards = 0; }, "shards is 0"},
      {[](NamespaceSpec& s) { s.groups.clear(); }, "number of groups is 0"},
      {[](NamespaceSpec& s) { s.groups[0].layers.clear(); }, "groups[0]: number of layers is 0"},
      {[](NamespaceSpec& s) { s.groups[0].layers[1].parts.clear(); }, "groups[0].layers[1]: number of parts is 0"},
      {[](NamespaceSpec& s) { s.groups[0].layers[1].parts[0].heads = 0; }, "groups[0].layers[1].parts[0].heads is 0"},
      {[](NamespaceSpec& s) { s.groups[0].layers[1].parts[1].dim = 1 << 21; }, "parts[1].dim is 2097152"},
      {[](NamespaceSpec& s) { s.groups[0].window = 5; }, "window"},
      {[](NamespaceSpec& s) { s.groups[0].retention = Retention::kWindow; }, "window is 0"},
      {[](NamespaceSpec& s) { s.groups[0].retention = static_cast<Retention>(7); }, "retention is 7"},
      {[](NamespaceSpec& s) {
         s.block_tokens = 4096, s.groups[0].layers[0].parts[0] = {1 << 16, 1 << 20};
       },
       "bytes of a block is"},
  };
  for (const Case& c : cases) {
    NamespaceSpec spec = SmallSpec();
    c.change(spec);
    const absl::Status status = Validate(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.named;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.named));
  }
  NamespaceSpec other_scheme = SmallSpec();
  other_scheme.scheme = 2;
  EXPECT_EQ(Validate(other_scheme).code(), absl::StatusCode::kFailedPrecondition);
}

// B78: sizes come from each layer's own parts.
TEST(NamespaceSpec, B78_BlockBytesPerLayer) {
  const NamespaceSpec spec = MixedSpec();
  ASSERT_TRUE(Validate(spec).ok()) << Validate(spec);
  EXPECT_EQ(spec.BlockBytes(0, 0), 2u * 8 * 64 * 16 * 4);
  EXPECT_EQ(spec.BlockBytes(0, 5), 2u * 4 * 128 * 16 * 4);
  EXPECT_EQ(spec.BlockBytes(0, 6), 576u * 16 * 4);
  EXPECT_EQ(spec.BlockBytes(1, 0), (16u + 6) * 16 * 4);
}

TEST(NamespaceSpec, CanonicalBytesAreParsedBack) {
  for (NamespaceSpec spec : {SmallSpec(), MixedSpec(), SmallSpec(7, 1, 1, 1, "")}) {
    spec.rope = "yarn";
    spec.shards = 3;
    const std::string bytes = Canonical(spec);
    const auto parsed = ParseCanonical(bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(Canonical(*parsed), bytes);
    EXPECT_EQ(parsed->groups.size(), spec.groups.size());
    EXPECT_EQ(parsed->model, spec.model);
    for (size_t size = 0; size < bytes.size(); ++size) {  // none, or one with fewer groups
      const auto cut = ParseCanonical(bytes.substr(0, size));
      EXPECT_TRUE(!cut.ok() || cut->groups.size() < spec.groups.size()) << size;
    }
    EXPECT_EQ(ParseCanonical(bytes + '\0').status().code(), absl::StatusCode::kDataLoss);
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {  // another spec, or none
      std::string changed = bytes;
      changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
      const auto other = ParseCanonical(changed);
      if (other.ok()) {
        EXPECT_EQ(Canonical(*other), changed);
      }
    }
  }
}

}  // namespace
}  // namespace kvferry
