// What is found out about the elements of a block beside its checksum.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "storage/base/checksum.h"
#include "tests/base/specs.h"

namespace kvferry {
namespace {

template <typename Word>
std::vector<uint8_t> Bytes(const std::vector<Word>& words) {
  std::vector<uint8_t> bytes(words.size() * sizeof(Word));
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

bool IsFinite(const std::vector<uint8_t>& bytes, const std::string& dtype) {
  const BlockSum sum = SumBlock(bytes, {{bytes.size(), ElementsOf(dtype)}});
  EXPECT_EQ(sum.checksum, BlockChecksum(ByteView(bytes)));
  return sum.is_finite;
}

// Against the compiler's own notion of what is finite, over every place of a block of several tiles.
TEST(SumBlock, AgreesWithTheLanguage) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::vector<float> floats(1 + random() % 9000);
    for (float& f : floats) f = static_cast<float>(static_cast<int32_t>(random()));
    const bool all = random() % 2 == 0;
    constexpr float kBad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()};
    if (!all) floats[random() % floats.size()] = kBad[random() % 3];
    ASSERT_EQ(IsFinite(Bytes(floats), "float32"), all);
  }
  EXPECT_TRUE(
      IsFinite(Bytes<float>({std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()}), "float32"));
  EXPECT_TRUE(IsFinite(Bytes<double>({std::numeric_limits<double>::max()}), "float64"));
  EXPECT_FALSE(IsFinite(Bytes<double>({1, std::nan("")}), "float64"));
}

// Every 16 bit pattern: a bfloat16 is the upper half of a float32, a float16 has five bits of exponent.
TEST(SumBlock, EveryHalf) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const std::vector<uint8_t> block = Bytes<uint16_t>({0, static_cast<uint16_t>(bits)});
    const uint32_t wide = bits << 16;
    float f;
    std::memcpy(&f, &wide, sizeof(f));
    ASSERT_EQ(IsFinite(block, "bfloat16"), std::isfinite(f)) << bits;
    ASSERT_EQ(IsFinite(block, "float16"), (bits >> 10 & 31) != 31) << bits;
  }
}

// OCP 8-bit floating point: e4m3fn has NaN at S.1111.111 alone, e5m2 is as IEEE's.
TEST(SumBlock, EveryByte) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const std::vector<uint8_t> block = {0, static_cast<uint8_t>(bits)};
    ASSERT_EQ(IsFinite(block, "float8_e4m3fn"), (bits & 127) != 127) << bits;
    ASSERT_EQ(IsFinite(block, "float8_e5m2"), (bits >> 2 & 31) != 31) << bits;
    ASSERT_TRUE(IsFinite(block, "uint8")) << bits;
    ASSERT_TRUE(IsFinite(block, "something new")) << bits;
  }
}

TEST(SumBlock, PartsMayBeOfSeveralKinds) {
  // 5 floats, then 20,000 bytes that mean nothing, then halves.
  std::vector<uint8_t> block(20 + 20000 + 8, 0);
  std::fill_n(block.begin() + 20, 20000, uint8_t{0xff});
  const std::vector<ElementRun> runs = {
      {20, Elements::kFloat32}, {0, Elements::kFloat64}, {20000, Elements::kOther}, {8, Elements::kFloat16}};
  EXPECT_TRUE(SumBlock(block, runs).is_finite);
  block[20 + 20000 + 7] = 0x7c;
  EXPECT_FALSE(SumBlock(block, runs).is_finite);
  EXPECT_TRUE(SumBlock(block, {}).is_finite);
}

TEST(SumBlock, ASpecTellsTheKinds) {
  NamespaceSpec spec = SmallSpec(3, 2, 8, 4);
  ASSERT_EQ(spec.ElementsOf(0, 1).size(), 2u);
  EXPECT_EQ(spec.ElementsOf(0, 1)[1].elements, Elements::kFloat32);
  EXPECT_EQ(spec.ElementsOf(0, 1)[1].bytes, 2 * 8 * 4 * 4u);
  spec.dtype = "bfloat16*1,float32+float16*2";
  spec.dtype_bytes = 1;
  EXPECT_EQ(spec.ElementsOf(0, 0)[1].elements, Elements::kBfloat16);
  EXPECT_EQ(spec.ElementsOf(0, 2)[0].elements, Elements::kFloat32);
  EXPECT_EQ(spec.ElementsOf(0, 2)[1].elements, Elements::kFloat16);
  spec.dtype = "float32*x";
  EXPECT_TRUE(spec.ElementsOf(0, 0).empty());
  spec.dtype = "float32";
  spec.codec = "packed";
  EXPECT_TRUE(spec.ElementsOf(0, 0).empty());
}

}  // namespace
}  // namespace kvferry
