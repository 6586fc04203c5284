#include "proto/frame.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

std::vector<uint8_t> Bytes(size_t n, uint8_t first = 0) {
  std::vector<uint8_t> bytes(n);
  std::iota(bytes.begin(), bytes.end(), first);
  return bytes;
}

// The buffer's bytes, flat, as they go over the wire.
std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string flat;
  for (const grpc::Slice& slice : slices) flat.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return flat;
}

// The same bytes as a receiver may see them: cut anywhere.
grpc::ByteBuffer Cut(const std::string& flat, size_t step) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < flat.size(); at += step) slices.emplace_back(flat.substr(at, step));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Join(const FramePayload::Pieces& pieces) {
  std::string joined;
  for (ByteView piece : pieces) joined.append(piece.begin(), piece.end());
  return joined;
}

v1::PutRequest PutHeader(const std::vector<uint64_t>& sizes) {
  v1::PutRequest header;
  header.set_session(42);
  for (const uint64_t size : sizes) {
    v1::PutPiece* piece = header.add_pieces();
    piece->mutable_block()->set_layer(3);
    piece->set_size(size);
    piece->set_checksum(99);
  }
  return header;
}

// The proof that nothing is copied: what goes to the wire lies at the caller's addresses.
TEST(Frame, EncodedSlicesPointIntoTheSource) {
  const std::vector<uint8_t> first = Bytes(5000), second = Bytes(100'000, 7);
  v1::GetReply header;
  header.add_pieces()->set_size(first.size());
  header.add_pieces()->set_size(second.size());
  const grpc::ByteBuffer buffer = EncodeFrame(header, {{first, nullptr}, {second, nullptr}});
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer.Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 3u);
  EXPECT_EQ(slices[1].begin(), first.data());
  EXPECT_EQ(slices[1].size(), first.size());
  EXPECT_EQ(slices[2].begin(), second.data());
  EXPECT_EQ(slices[2].size(), second.size());
}

TEST(Frame, PinIsHeldUntilTheLastSliceGoes) {
  const std::vector<uint8_t> bytes = Bytes(4096);
  auto pin = std::make_shared<int>(1);
  v1::GetReply header;
  header.add_pieces()->set_size(bytes.size());
  grpc::ByteBuffer buffer = EncodeFrame(header, {{bytes, pin}});
  std::vector<grpc::Slice> wire;
  ASSERT_TRUE(buffer.Dump(&wire).ok());
  buffer.Clear();
  EXPECT_GT(pin.use_count(), 1);
  wire.clear();
  EXPECT_EQ(pin.use_count(), 1);
}

TEST(Frame, PlainProtobufReadsWhatWeWrite) {
  const std::vector<uint8_t> a = Bytes(300), b = Bytes(70'000, 5);
  const grpc::ByteBuffer buffer = EncodeFrame(PutHeader({300, 70'000}), {{a, nullptr}, {b, nullptr}});
  v1::PutRequest plain;
  ASSERT_TRUE(plain.ParseFromString(Flat(buffer)));
  EXPECT_EQ(plain.session(), 42u);
  ASSERT_EQ(plain.pieces_size(), 2);
  EXPECT_EQ(plain.pieces(1).checksum(), 99u);
  std::string expected(a.begin(), a.end());
  expected.append(b.begin(), b.end());
  EXPECT_EQ(plain.data(), expected);
  // Byte for byte what a plain serializer writes.
  EXPECT_EQ(plain.SerializeAsString(), Flat(buffer));
}

TEST(Frame, WeReadWhatPlainProtobufWrites) {
  v1::PutRequest plain = PutHeader({10, 0, 190});
  const std::vector<uint8_t> bytes = Bytes(200, 50);
  plain.set_data(bytes.data(), bytes.size());
  for (const size_t step : {1, 2, 7, 23, 24, 100, 10'000}) {
    auto frame = DecodePut(Cut(plain.SerializeAsString(), step));
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_EQ(frame->header.session(), 42u);
    EXPECT_EQ(frame->header.pieces_size(), 3);
    EXPECT_TRUE(frame->header.data().empty());
    ASSERT_EQ(frame->payload.remaining(), 200u);
    EXPECT_EQ(Join(frame->payload.Take(10)), plain.data().substr(0, 10));
    EXPECT_EQ(Join(frame->payload.Take(0)), "");
    EXPECT_EQ(Join(frame->payload.Take(190)), plain.data().substr(10));
    EXPECT_EQ(frame->payload.remaining(), 0u);
  }
}

TEST(Frame, DecodedPayloadIsNotCopied) {
  const std::vector<uint8_t> bytes = Bytes(100'000);
  const grpc::ByteBuffer buffer = EncodeFrame(PutHeader({bytes.size()}), {{bytes, nullptr}});
  auto frame = DecodePut(buffer);
  ASSERT_TRUE(frame.ok());
  const auto pieces = frame->payload.Take(bytes.size());
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].data(), bytes.data());
}

TEST(Frame, PinOutlivesTheBuffer) {
  v1::GetReply plain;
  plain.add_pieces()->set_size(20);  // short slices hold their bytes within themselves
  plain.set_data(std::string(20, 'q'));
  FramePayload::Pieces pieces;
  std::shared_ptr<const void> pin;
  {
    auto frame = DecodeGet(Cut(plain.SerializeAsString(), 5));
    ASSERT_TRUE(frame.ok());
    pieces = frame->payload.Take(20);
    pin = frame->payload.pin();
  }
  EXPECT_EQ(Join(pieces), plain.data());
}

TEST(Frame, WithoutDataThereIsNoPayload) {
  v1::GetReply miss;
  miss.add_pieces()->set_code(5);
  auto frame = DecodeGet(EncodeFrame(miss, {}));
  ASSERT_TRUE(frame.ok());
  EXPECT_EQ(frame->header.pieces(0).code(), 5u);
  EXPECT_EQ(frame->payload.remaining(), 0u);
  EXPECT_TRUE(DecodeGet(grpc::ByteBuffer()).ok());
}

TEST(Frame, SkipsUnknownFields) {
  v1::PutRequest plain = PutHeader({4});
  plain.set_data("abcd");
  const std::string bytes = plain.SerializeAsString();
  const std::string data = bytes.substr(bytes.size() - 6);  // tag, length, four bytes
  const std::string unknown_varint = "\xa0\x06\x07";        // field 100
  const std::string unknown_bytes("\xaa\x06\x03xyz", 6);    // field 101
  const std::string later = bytes.substr(0, bytes.size() - 6) + unknown_varint + unknown_bytes + data;
  auto frame = DecodePut(Cut(later, 3));
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ(Join(frame->payload.Take(4)), "abcd");
}

// Where a serializer puts what it does not know, or a later version has put fields of its own.
TEST(Frame, SkipsUnknownFieldsBehindData) {
  v1::PutRequest plain = PutHeader({4, 3});
  plain.set_data("abcdefg");
  for (const std::string& unknown : {std::string("\xa0\x06\x07"), std::string("\xaa\x06\x03xyz", 6),
                                     std::string("\x83\x01\x08\x01\x84\x01"), std::string("\x80\x01\x00", 3)}) {
    for (const size_t step : {1, 3, 100}) {
      auto frame = DecodePut(Cut(plain.SerializeAsString() + unknown, step));
      ASSERT_TRUE(frame.ok()) << frame.status();
      ASSERT_EQ(frame->payload.remaining(), 7u);
      EXPECT_EQ(Join(frame->payload.Take(4)), "abcd");
      EXPECT_EQ(Join(frame->payload.Take(3)), "efg");
    }
    const std::string cut = unknown.substr(0, unknown.size() - 1);
    EXPECT_THAT(DecodePut(Cut(plain.SerializeAsString() + cut, 100)).status().message(),
                HasSubstr("malformed message"));
  }
}

TEST(Frame, RefusesFieldsAfterData) {
  v1::PutRequest plain = PutHeader({4});
  plain.set_data("abcd");
  const std::string twice = plain.SerializeAsString() + plain.SerializeAsString();
  const auto status = DecodePut(Cut(twice, 1000)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(status.message(), HasSubstr("after `data`"));
}

TEST(Frame, RefusesSizesThatDoNotAddUp) {
  const std::vector<uint8_t> bytes = Bytes(100);
  const auto decode = [&](const std::vector<uint64_t>& sizes) {
    return std::string(DecodePut(EncodeFrame(PutHeader(sizes), {{bytes, nullptr}})).status().message());
  };
  EXPECT_THAT(decode({99}), HasSubstr("add up to 99, but `data` has 100"));
  EXPECT_THAT(decode({60, 41}), HasSubstr("piece 1 of 2 is 41 bytes long, but only 40"));
  EXPECT_THAT(decode({}), HasSubstr("add up to 0"));
  // The sum would wrap around to 100.
  EXPECT_THAT(decode({UINT64_MAX, 101}), HasSubstr("piece 0 of 2 is 18446744073709551615"));
}

TEST(Frame, RefusesDataOfAnotherType) {
  EXPECT_THAT(DecodePut(Cut("\x78\x01", 10)).status().message(), HasSubstr("not of type bytes"));
}

TEST(Frame, RefusesALengthBeyondTheMessage) {
  EXPECT_THAT(DecodePut(Cut("\x7a\x7f"
                            "ab",
                            10))
                  .status()
                  .message(),
              HasSubstr("`data` is 127 bytes long, but only 2 follow"));
}

// A message cut anywhere, or with any byte changed, is decoded to something that adds up, or refused.
TEST(Frame, EveryCutAndManyChangesAreRefusedOrConsistent) {
  v1::PutRequest plain = PutHeader({30, 20});
  plain.set_data(std::string(50, 'd'));
  const std::string whole = plain.SerializeAsString();
  for (size_t n = 0; n < whole.size(); ++n) {
    const auto frame = DecodePut(Cut(whole.substr(0, n), 9));
    EXPECT_FALSE(frame.ok() && frame->payload.remaining() > 0) << n;
  }
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 5'000; ++i) {
    std::string changed = whole;
    changed[random() % changed.size()] = static_cast<char>(random());
    auto frame = DecodePut(Cut(changed, 1 + random() % 40));
    if (!frame.ok()) {
      EXPECT_TRUE(absl::IsInvalidArgument(frame.status()));
      continue;
    }
    uint64_t sum = 0;
    for (const auto& piece : frame->header.pieces()) sum += Join(frame->payload.Take(piece.size())).size();
    EXPECT_EQ(frame->payload.remaining(), 0u);
    EXPECT_TRUE(sum == 50 || sum == 0) << sum;
  }
}

TEST(Message, RoundTrips) {
  v1::PutReply reply;
  reply.add_acks()->set_code(7);
  v1::PutReply back;
  ASSERT_TRUE(DecodeMessage(Cut(Flat(EncodeMessage(reply)), 1), &back).ok());
  EXPECT_EQ(back.acks(0).code(), 7u);
  EXPECT_THAT(DecodeMessage(Cut("\x0a\x7f", 5), &back).message(), HasSubstr("no kvferry.v1.PutReply"));
}

}  // namespace
}  // namespace kvferry
