// Messages of any type, whole and damaged, as a client that is not ours may send them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "google/protobuf/unknown_field_set.h"
#include "kvferry/v1/cache.pb.h"
#include "proto/codec.h"
#include "storage/base/checksum.h"
#include "tests/service/block_bytes.h"

namespace kvferry {

// What a client has, so that its messages can name it.
struct Holdings {
  uint64_t session = 0;
  NamespaceSpec spec;
  NamespaceId ns{};
  std::vector<ChunkKey> keys;  // reserved, live and published ones
  uint64_t ticket = 0;
};

// Fills messages by reflection, so it knows what to put into those that will be defined one day. Not thread-safe.
class MessageMaker {
 public:
  MessageMaker(Holdings holdings, uint64_t seed) : holdings_(std::move(holdings)), random_(seed) {}

  // As a well-meaning client would: names what is there, with numbers that fit.
  void Fill(google::protobuf::Message* message) {
    FillFields(message);
    if (auto* put = dynamic_cast<v1::PutRequest*>(message); put != nullptr && !wild_) AddBlocks(put);
  }
  // A message still, but one field in four has any value.
  void FillWildly(google::protobuf::Message* message) {
    wild_ = true;
    Fill(message);
    wild_ = false;
    if (auto* put = dynamic_cast<v1::PutRequest*>(message); put != nullptr && Below(2) == 0) AddBlocks(put);
  }

  // Fields that a later version may have, of every wire type, here and in the messages within.
  void AddUnknownFields(google::protobuf::Message* message) {
    const google::protobuf::Reflection& reflection = *message->GetReflection();
    google::protobuf::UnknownFieldSet* unknown = reflection.MutableUnknownFields(message);
    for (uint64_t left = 1 + Below(3); left > 0; --left) AddUnknownField(unknown);
    std::vector<const google::protobuf::FieldDescriptor*> fields;
    reflection.ListFields(*message, &fields);
    for (const auto* field : fields) {
      if (field->message_type() == nullptr || Below(2) == 0) continue;
      if (!field->is_repeated()) AddUnknownFields(reflection.MutableMessage(message, field));
      for (int i = 0; field->is_repeated() && i < reflection.FieldSize(*message, field); ++i) {
        AddUnknownFields(reflection.MutableRepeatedMessage(message, field, i));
      }
    }
  }

  // Bytes that know nothing of protobuf; one in eight the same byte again and again, as nested groups are.
  std::string Noise() {
    const uint64_t size = Below(100) == 0 ? Below(20'000) : Below(120);
    if (Below(8) == 0) return std::string(size, Byte());
    std::string bytes(size, 0);
    for (char& byte : bytes) byte = Byte();
    return bytes;
  }
  std::string CutShort(const std::string& bytes) { return bytes.substr(0, bytes.empty() ? 0 : Below(bytes.size())); }
  // With bytes changed, put in, left out or doubled.
  std::string Changed(std::string bytes) {
    for (uint64_t left = 1 + Below(2); left > 0; --left) {
      const uint64_t at = Below(bytes.size() + 1), length = std::min<uint64_t>(1 + Below(8), bytes.size() - at);
      switch (Below(5)) {
        case 0:
          if (length > 0) bytes[at] = Byte();
          break;
        case 1:
          if (length > 0) bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
          break;
        case 2:
          bytes.insert(at, 1 + Below(4), Byte());
          break;
        case 3:
          bytes.erase(at, length);
          break;
        default:
          bytes.insert(Below(bytes.size() + 1), bytes.substr(at, length));
      }
    }
    return bytes;
  }

  uint64_t Below(uint64_t n) { return random_() % n; }

 private:
  // Fields whose value matters, by their name in every message; all others get anything.
  using Values = std::map<std::string, std::function<uint64_t()>>;
  Values MakeValues() {
    const auto always = [](uint64_t value) { return [value] { return value; }; };
    const auto up_to = [this](uint64_t most) { return [this, most] { return Below(most + 1); }; };
    return {{"session", always(holdings_.session)},
            {"resume", always(0)},
            {"version_min", always(1)},
            {"version_max", always(1)},
            {"group", always(0)},
            {"shard", always(0)},
            {"layer", up_to(holdings_.spec.groups[0].layers.size())},
            {"count", always(1)},
            {"wait_ms", always(0)},
            {"ttl_ms", [this] { return 1 + Below(20); }},
            {"ticket", always(holdings_.ticket)},
            {"offset", always(0)},
            {"window_bytes", up_to(1 << 20)}};
  }

  char Byte() {
    static constexpr char kTelling[] = {'\x00', '\x01', '\x7f', '\x80', '\xff', '\x0a', '\x0b', '\x08'};
    return Below(4) == 0 ? kTelling[Below(sizeof(kTelling))] : static_cast<char>(random_());
  }
  uint64_t Number() {
    switch (Below(4)) {
      case 0:
        return Below(4);
      case 1:
        return uint64_t{1} << Below(64);
      case 2:
        return Below(1'000'000);
      default:
        return random_();
    }
  }
  bool Wild() { return wild_ && Below(4) == 0; }
  std::string Text() { return std::string(Below(20), static_cast<char>('a' + Below(26))); }

  // True for the types of ours that have to be something that is there.
  bool FillOwnType(const std::string& name, google::protobuf::Message* message) {
    if (Wild()) return false;
    if (auto* spec = dynamic_cast<v1::NamespaceSpec*>(message)) {
      ToProto(holdings_.spec, spec);
    } else if (auto* key = dynamic_cast<v1::ChunkKey*>(message); key != nullptr && Below(16) != 0) {
      ToProto(holdings_.keys[Below(holdings_.keys.size())], key);
    } else if (auto* id = dynamic_cast<v1::Id*>(message); id != nullptr && Below(16) != 0) {
      ToProto(name == "ns" ? holdings_.ns : Id128{Below(3), 1 + Below(3)}, id);
    } else {
      return false;
    }
    return true;
  }

  void FillFields(google::protobuf::Message* message) {
    const google::protobuf::Descriptor& type = *message->GetDescriptor();
    for (int i = 0; i < type.field_count(); ++i) {
      if (type.field(i)->containing_oneof() == nullptr) FillField(type.field(i), message);
    }
    for (int i = 0; i < type.oneof_decl_count(); ++i) {
      const google::protobuf::OneofDescriptor& one = *type.oneof_decl(i);
      FillField(one.field(static_cast<int>(Below(one.field_count()))), message);
    }
  }

  void FillField(const google::protobuf::FieldDescriptor* field, google::protobuf::Message* message) {
    if (!field->is_repeated()) return SetField(field, message);
    for (uint64_t left = 1 + Below(3); left > 0; --left) SetField(field, message);
  }

  // Sets the field, or appends to it.
  void SetField(const google::protobuf::FieldDescriptor* field, google::protobuf::Message* message) {
    using Field = google::protobuf::FieldDescriptor;
    const google::protobuf::Reflection& to = *message->GetReflection();
    const bool add = field->is_repeated();
    const auto known = values_.find(field->name());
    const uint64_t number = known != values_.end() && !Wild() ? known->second() : Number();
    switch (field->cpp_type()) {
#define KVFERRY_SET(type, value) add ? to.Add##type(message, field, value) : to.Set##type(message, field, value)
      case Field::CPPTYPE_INT32:
        return KVFERRY_SET(Int32, static_cast<int32_t>(number));
      case Field::CPPTYPE_INT64:
        return KVFERRY_SET(Int64, static_cast<int64_t>(number));
      case Field::CPPTYPE_UINT32:
        return KVFERRY_SET(UInt32, static_cast<uint32_t>(number));
      case Field::CPPTYPE_UINT64:
        return KVFERRY_SET(UInt64, number);
      case Field::CPPTYPE_DOUBLE:
        return KVFERRY_SET(Double, static_cast<double>(number));
      case Field::CPPTYPE_FLOAT:
        return KVFERRY_SET(Float, static_cast<float>(number));
      case Field::CPPTYPE_BOOL:
        return KVFERRY_SET(Bool, number % 2 == 1);
      case Field::CPPTYPE_ENUM:
        return KVFERRY_SET(EnumValue, static_cast<int>(number));
      case Field::CPPTYPE_STRING:
        return KVFERRY_SET(String, Text());
#undef KVFERRY_SET
      case Field::CPPTYPE_MESSAGE: {
        auto* within = add ? to.AddMessage(message, field) : to.MutableMessage(message, field);
        if (!FillOwnType(field->name(), within)) FillFields(within);
      }
    }
  }

  // Whole blocks of the client's own chunks, always the same bytes for the same block.
  void AddBlocks(v1::PutRequest* put) {
    put->clear_data();
    for (v1::PutPiece& piece : *put->mutable_pieces()) {
      const uint32_t layer = piece.block().layer();
      const auto block = BlockBytes(holdings_.spec.BlockBytes(0, 0), piece.block().chunk().id().lo() * 16 + layer);
      piece.set_size(block.size());
      piece.set_checksum(BlockChecksum(ByteView(block)));
      put->mutable_data()->append(block.begin(), block.end());
    }
  }

  void AddUnknownField(google::protobuf::UnknownFieldSet* unknown) {
    const int number = static_cast<int>(100 + Below(500'000'000));
    switch (Below(5)) {
      case 0:
        return unknown->AddVarint(number, Number());
      case 1:
        return unknown->AddFixed32(number, static_cast<uint32_t>(random_()));
      case 2:
        return unknown->AddFixed64(number, random_());
      case 3:
        return unknown->AddLengthDelimited(number, Noise());
      default:
        return AddUnknownField(unknown->AddGroup(number));
    }
  }

  const Holdings holdings_;
  std::mt19937_64 random_;
  bool wild_ = false;
  const Values values_ = MakeValues();
};

}  // namespace kvferry
