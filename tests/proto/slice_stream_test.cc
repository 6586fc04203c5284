#include "proto/slice_stream.h"

#include <string>

#include "gtest/gtest.h"

namespace kvferry {
namespace {

std::vector<grpc::Slice> Slices(const std::vector<std::string>& texts) {
  std::vector<grpc::Slice> slices;
  for (const std::string& text : texts) slices.emplace_back(text);
  return slices;
}

std::string Rest(SliceStream* stream) {
  std::string text;
  const void* data;
  int size;
  while (stream->Next(&data, &size)) text.append(static_cast<const char*>(data), size);
  return text;
}

TEST(SliceStream, ReadsAcrossSlicesUpToItsLimit) {
  const auto slices = Slices({"", "abc", "", "d", "efgh", ""});
  SliceStream all(&slices, 8);
  EXPECT_EQ(Rest(&all), "abcdefgh");
  EXPECT_EQ(all.ByteCount(), 8);
  SliceStream some(&slices, 5);
  EXPECT_EQ(Rest(&some), "abcde");
  SliceStream none(&slices, 0);
  EXPECT_EQ(Rest(&none), "");
}

TEST(SliceStream, BacksUpAndSkips) {
  const auto slices = Slices({"abc", "defg"});
  SliceStream stream(&slices, 7);
  const void* data;
  int size;
  ASSERT_TRUE(stream.Next(&data, &size));
  stream.BackUp(2);
  EXPECT_EQ(stream.ByteCount(), 1);
  ASSERT_TRUE(stream.Skip(3));  // b, c, d
  EXPECT_EQ(stream.ByteCount(), 4);
  EXPECT_EQ(Rest(&stream), "efg");
  EXPECT_FALSE(stream.Skip(1));
}

}  // namespace
}  // namespace kvferry
