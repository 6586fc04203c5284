#include "proto/frame.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "proto/slice_stream.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

static_assert(int{v1::PutRequest::kDataFieldNumber} == int{v1::GetReply::kDataFieldNumber});
constexpr int kDataField = v1::PutRequest::kDataFieldNumber;
constexpr uint32_t kDataTag = (static_cast<uint32_t>(kDataField) << 3) | WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
static_assert(kDataTag < 128, "the tag of `data` is one byte");
constexpr size_t kMaxVarint = 10;

// Refers to the caller's memory; frees its copy of the pin when gRPC drops the last reference.
grpc::Slice PinnedSlice(const PinnedBytes& piece) {
  auto* pin = new std::shared_ptr<const void>(piece.pin);
  return grpc::Slice(
      const_cast<uint8_t*>(piece.bytes.data()), piece.bytes.size(),
      [](void* p) { delete static_cast<std::shared_ptr<const void>*>(p); }, pin);
}

template <typename Message>
grpc::ByteBuffer Encode(const Message& header, absl::Span<const PinnedBytes> data) {
  uint64_t data_size = 0;
  for (const PinnedBytes& piece : data) data_size += piece.bytes.size();

  const size_t fields = header.ByteSizeLong();
  std::vector<uint8_t> head(fields + 1 + kMaxVarint);
  uint8_t* end = header.SerializeWithCachedSizesToArray(head.data());
  if (data_size > 0) {
    *end++ = static_cast<uint8_t>(kDataTag);
    end = CodedOutputStream::WriteVarint64ToArray(data_size, end);
  }

  std::vector<grpc::Slice> slices;
  slices.reserve(1 + data.size());
  slices.emplace_back(head.data(), static_cast<size_t>(end - head.data()));
  for (const PinnedBytes& piece : data) {
    if (!piece.bytes.empty()) slices.push_back(PinnedSlice(piece));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Where `data` lies in a message. Without the field, it is empty and at the end.
struct Extent {
  uint64_t header = 0;  // bytes before its tag
  uint64_t start = 0;   // of its bytes
  uint64_t size = 0;
};

absl::Status Malformed(const char* what, int64_t at) {
  return absl::InvalidArgumentError(absl::StrCat("malformed message: ", what, " at byte ", at));
}

// Serializers put fields that they do not know behind those that they do, so what a later version has may follow
// `data`.
absl::Status SkipLaterFields(CodedInputStream* in) {
  while (true) {
    const int64_t at = in->CurrentPosition();
    const uint32_t tag = in->ReadTag();
    if (tag == 0) return in->ConsumedEntireMessage() ? absl::OkStatus() : Malformed("no field tag", at);
    if (const int field = WireFormatLite::GetTagFieldNumber(tag); field <= kDataField) {
      return absl::InvalidArgumentError(absl::StrCat("malformed message: field ", field, " after `data`, at byte ", at,
                                                     "; `data` must be the last one"));
    }
    if (!WireFormatLite::SkipField(in, tag)) return Malformed("a field is cut short or has no valid type", at);
  }
}

// Walks over the fields around `data` without reading it.
absl::StatusOr<Extent> FindData(const std::vector<grpc::Slice>& slices, uint64_t total) {
  SliceStream stream(&slices, total);
  CodedInputStream in(&stream);
  while (true) {
    const int64_t at = in.CurrentPosition();
    const uint32_t tag = in.ReadTag();
    if (tag == 0) {
      if (!in.ConsumedEntireMessage()) return Malformed("no field tag", at);
      return Extent{total, total, 0};
    }
    if (WireFormatLite::GetTagFieldNumber(tag) != kDataField) {
      if (!WireFormatLite::SkipField(&in, tag)) return Malformed("a field is cut short or has no valid type", at);
      continue;
    }
    if (tag != kDataTag) return Malformed("`data` (field 15) is not of type bytes", at);
    uint64_t size;
    if (!in.ReadVarint64(&size)) return Malformed("the length of `data` is cut short", at);
    const uint64_t start = static_cast<uint64_t>(in.CurrentPosition());
    if (size > total - start) {
      return absl::InvalidArgumentError(
          absl::StrCat("malformed message: `data` is ", size, " bytes long, but only ", total - start, " follow"));
    }
    in.Skip(static_cast<int>(size));
    KVFERRY_RETURN_IF_ERROR(SkipLaterFields(&in));
    return Extent{static_cast<uint64_t>(at), start, size};
  }
}

template <typename Message>
absl::Status CheckSizes(const Message& header, uint64_t data_size) {
  uint64_t left = data_size;
  for (int i = 0; i < header.pieces_size(); ++i) {
    const uint64_t size = header.pieces(i).size();
    if (size > left) {
      return absl::InvalidArgumentError(absl::StrCat("piece ", i, " of ", header.pieces_size(), " is ", size,
                                                     " bytes long, but only ", left, " of the ", data_size,
                                                     " bytes of `data` are left for it"));
    }
    left -= size;
  }
  if (left > 0) {
    return absl::InvalidArgumentError(absl::StrCat("the sizes of ", header.pieces_size(), " pieces add up to ",
                                                   data_size - left, ", but `data` has ", data_size, " bytes"));
  }
  return absl::OkStatus();
}

std::vector<ByteView> Views(const std::vector<grpc::Slice>& slices, uint64_t start, uint64_t size) {
  std::vector<ByteView> views;
  for (const grpc::Slice& slice : slices) {
    const uint64_t skip = std::min<uint64_t>(start, slice.size());
    const uint64_t part = std::min<uint64_t>(size, slice.size() - skip);
    start -= skip;
    size -= part;
    if (part > 0) views.emplace_back(slice.begin() + skip, part);
  }
  return views;
}

// The slices of `buffer`, by reference.
absl::Status Slices(const grpc::ByteBuffer& buffer, std::vector<grpc::Slice>* slices) {
  if (buffer.Length() > static_cast<uint64_t>(std::numeric_limits<int>::max())) {
    return absl::InvalidArgumentError(
        absl::StrCat("message of ", buffer.Length(), " bytes, expected at most ", kMaxMessageBytes));
  }
  if (!buffer.Valid()) return absl::OkStatus();
  if (grpc::Status s = buffer.Dump(slices); !s.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("message cannot be read: ", s.error_message()));
  }
  return absl::OkStatus();
}

template <typename Message>
absl::StatusOr<Frame<Message>> Decode(const grpc::ByteBuffer& buffer) {
  // Short slices hold their bytes inside themselves, so the vector must not move once views exist: it is the pin.
  auto slices = std::make_shared<std::vector<grpc::Slice>>();
  KVFERRY_RETURN_IF_ERROR(Slices(buffer, slices.get()));
  const uint64_t total = buffer.Length();
  KVFERRY_ASSIGN_OR_RETURN(const Extent data, FindData(*slices, total));

  Frame<Message> frame;
  SliceStream header(slices.get(), data.header);
  if (!frame.header.ParseFromZeroCopyStream(&header))
    return Malformed("a field has wrong contents, header ends", data.header);
  KVFERRY_RETURN_IF_ERROR(CheckSizes(frame.header, data.size));
  std::vector<ByteView> views = Views(*slices, data.start, data.size);
  frame.payload = FramePayload(std::move(views), std::move(slices));
  return frame;
}

}  // namespace

grpc::ByteBuffer EncodeFrame(const v1::PutRequest& header, absl::Span<const PinnedBytes> data) {
  return Encode(header, data);
}

grpc::ByteBuffer EncodeFrame(const v1::GetReply& header, absl::Span<const PinnedBytes> data) {
  return Encode(header, data);
}

absl::StatusOr<Frame<v1::PutRequest>> DecodePut(const grpc::ByteBuffer& buffer) {
  return Decode<v1::PutRequest>(buffer);
}

absl::StatusOr<Frame<v1::GetReply>> DecodeGet(const grpc::ByteBuffer& buffer) { return Decode<v1::GetReply>(buffer); }

grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message) {
  std::vector<uint8_t> bytes(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(bytes.data());
  const grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

absl::Status DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message) {
  std::vector<grpc::Slice> slices;
  KVFERRY_RETURN_IF_ERROR(Slices(buffer, &slices));
  SliceStream stream(&slices, buffer.Length());
  if (message->ParseFromZeroCopyStream(&stream)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("malformed message: ", buffer.Length(), " bytes that are no ", message->GetTypeName()));
}

FramePayload::FramePayload(std::vector<ByteView> views, std::shared_ptr<const void> pin)
    : views_(std::move(views)), pin_(std::move(pin)) {
  for (ByteView view : views_) remaining_ += view.size();
}

FramePayload::Pieces FramePayload::Take(uint64_t n) {
  Pieces pieces;
  remaining_ -= n;
  while (n > 0) {
    const ByteView view = views_[view_];
    const uint64_t part = std::min<uint64_t>(n, view.size() - offset_);
    pieces.push_back(view.subspan(offset_, part));
    offset_ += part;
    n -= part;
    if (offset_ == view.size()) {
      ++view_;
      offset_ = 0;
    }
  }
  return pieces;
}

}  // namespace kvferry
