// Any bytes to every method: noise, damaged messages and those of a later version. Each is refused or answered, and
// nothing of it stays.
#include <atomic>
#include <cstdio>
#include <optional>
#include <set>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/service/any_message.h"
#include "tests/service/bad_input_fixture.h"

namespace kvferry {
namespace {

using google::protobuf::Message;
using google::protobuf::MethodDescriptor;

constexpr int kSenders = 10;               // at once, each with a session of its own
constexpr int kStringsPerMethod = 10'000;  // a quarter each: noise, changed, cut short, with unknown fields

// One of those who send anything, with things of its own to name.
class Sender {
 public:
  Sender(std::unique_ptr<RawClient> client, const std::shared_ptr<grpc::Channel>& channel,
         const MethodDescriptor& method, Holdings holdings, uint64_t seed)
      : client_(std::move(client)),
        caller_(channel),
        method_(method),
        session_(holdings.session),
        maker_(std::move(holdings), seed) {}
  ~Sender() { EXPECT_TRUE(client_->Bye().ok()); }

  // Sends strings of three kinds in turn, to be refused or answered as their contents deserve.
  void SendDamaged(int count) {
    const std::unique_ptr<Message> parsed = NewRequest(method_);
    for (int i = 0; i < count; ++i) {
      std::string bytes;
      do {
        bytes = i % 3 == 0 ? maker_.Noise() : i % 3 == 1 ? maker_.CutShort(Whole()) : Changed();
      } while (parsed->ParseFromString(bytes) && TakesTime(*parsed));
      const bool is_message = parsed->ParseFromString(bytes);
      if (!is_message) ++malformed_;
      std::vector<std::string> requests = {bytes};
      if (method_.client_streaming() && maker_.Below(2) == 0) requests.insert(requests.begin(), Opening());
      Check(caller_.Call(method_, requests).status, is_message,
            is_message && Number(*parsed, "session", session_) != session_, bytes);
      if (testing::Test::HasFailure()) return;  // the first one tells enough
    }
  }

  // A message with unknown fields is answered as the one without, which is sent once for several of them.
  void SendWithUnknownFields(int count) {
    constexpr int kVariants = 5;
    for (int i = 0; i < count; i += kVariants) {
      const std::unique_ptr<Message> message = Filled();
      const Answer plain = Send(*message);
      std::optional<Answer> again;
      accepted_ += plain.status.ok();
      for (int variant = 0; variant < kVariants; ++variant) {
        const std::unique_ptr<Message> later(message->New());
        later->CopyFrom(*message);
        maker_.AddUnknownFields(later.get());
        const Answer answer = Send(*later);
        if (answer == plain) continue;
        // Unless the plain one has another answer each time (ids, counts), or had another effect the first time.
        if (!again.has_value()) again = Send(*message);
        const auto codes = {plain.status.error_code(), again->status.error_code()};
        EXPECT_FALSE(plain == *again) << Difference(plain, answer, *later);
        EXPECT_THAT(codes, testing::Contains(answer.status.error_code())) << Difference(plain, answer, *later);
        if (testing::Test::HasFailure()) return;
      }
    }
  }

  uint64_t malformed() const { return malformed_; }
  uint64_t accepted() const { return accepted_; }

 private:
  static constexpr uint64_t kHourMs = 3'600'000;

  std::unique_ptr<Message> Filled() {
    std::unique_ptr<Message> message = NewRequest(method_);
    maker_.Fill(message.get());
    auto* publish = dynamic_cast<v1::PublishRequest*>(message.get());
    if (publish != nullptr && TakesTime(*publish)) publish->set_ttl_ms(publish->ttl_ms() + kHourMs);
    return message;
  }
  std::string Whole() { return Filled()->SerializeAsString(); }
  std::string Changed() {
    if (maker_.Below(2) == 0) return maker_.Changed(Whole());
    const std::unique_ptr<Message> message = NewRequest(method_);
    maker_.FillWildly(message.get());
    return message->SerializeAsString();
  }
  Answer Send(const Message& message) { return caller_.Call(method_, {message.SerializeAsString()}); }
  static std::string Difference(const Answer& plain, const Answer& later, const Message& message) {
    return absl::StrCat("plain: ", plain.status.error_message(),
                        "\nwith unknown fields: ", later.status.error_message(), "\n", message.DebugString());
  }

  // What comes first in a stream: a greeting, or half a block.
  std::string Opening() {
    const std::unique_ptr<Message> message = Filled();
    if (auto* session = dynamic_cast<v1::SessionRequest*>(message.get())) {
      session->mutable_hello()->set_version_max(1);
    } else if (auto* put = dynamic_cast<v1::PutRequest*>(message.get())) {
      put->mutable_pieces()->DeleteSubrange(1, put->pieces_size() - 1);
      put->mutable_pieces(0)->set_size(put->pieces(0).size() / 2);
      put->mutable_data()->resize(put->pieces(0).size());
    }
    return message->SerializeAsString();
  }

  // Whoever asks to wait for memory, or to have something kept, is obeyed. A name that expired while the test runs
  // would change its answers.
  static bool TakesTime(const Message& message) {
    const uint64_t ttl = Number(message, "ttl_ms", 0);
    if (dynamic_cast<const v1::PublishRequest*>(&message) != nullptr) return ttl > 0 && ttl <= kHourMs;
    return Number(message, "wait_ms", 0) > 1 || (ttl > 20 && absl::Milliseconds(ttl) <= kMaxTicketLife);
  }

  // The value of a number field, where the message has it.
  static uint64_t Number(const Message& message, const std::string& name, uint64_t otherwise) {
    const auto* field = message.GetDescriptor()->FindFieldByName(name);
    if (field == nullptr || field->is_repeated()) return otherwise;
    if (field->cpp_type() == field->CPPTYPE_UINT64) return message.GetReflection()->GetUInt64(message, field);
    if (field->cpp_type() == field->CPPTYPE_UINT32) return message.GetReflection()->GetUInt32(message, field);
    return otherwise;
  }

  static void Check(const grpc::Status& status, bool is_message, bool of_another_session, const std::string& bytes) {
    static const std::set<int> usual = {grpc::INVALID_ARGUMENT,  grpc::NOT_FOUND,      grpc::ABORTED,
                                        grpc::DATA_LOSS,         grpc::ALREADY_EXISTS, grpc::FAILED_PRECONDITION,
                                        grpc::RESOURCE_EXHAUSTED};
    const bool named = usual.count(status.error_code()) == 1 && !status.error_message().empty();
    const bool malformed =
        status.error_code() == grpc::INVALID_ARGUMENT && absl::StartsWith(status.error_message(), "malformed message");
    const bool right = is_message ? named || (status.ok() && !of_another_session) : malformed;
    EXPECT_TRUE(right) << (is_message ? "a message" : "no message") << (of_another_session ? " of another session" : "")
                       << " was answered with code " << status.error_code() << " \"" << status.error_message()
                       << "\": " << absl::BytesToHexString(bytes);
  }

  const std::unique_ptr<RawClient> client_;
  RawCaller caller_;
  const MethodDescriptor& method_;
  const uint64_t session_;
  MessageMaker maker_;
  uint64_t malformed_ = 0, accepted_ = 0;
};

class AnyBytesTest : public BadInputTest, public testing::WithParamInterface<const MethodDescriptor*> {
 protected:
  // Runs `send` for each of a few new senders at once, and ends their sessions.
  template <typename Send>
  void WithSenders(uint64_t seed, Send send) {
    const auto channel = DialUrl(server_->Addresses()[0]);  // one for all: many calls go in one packet
    std::vector<std::unique_ptr<Sender>> senders;
    for (int i = 0; i < kSenders; ++i) {
      auto client = NewClient();
      Holdings holdings{client->welcome.session(), spec_, client->Open(spec_), {}, 0};
      for (int chunk = 0; chunk < 4; ++chunk) holdings.keys.push_back(ReserveOne(client.get()));
      for (uint64_t salt = 10; salt < 12; ++salt) holdings.keys.push_back(PutChunk(client.get(), salt));
      const Id128 name{2000, static_cast<uint64_t>(i)};
      EXPECT_TRUE(client->Publish(holdings.keys.back(), name).ok());
      holdings.keys.push_back({ns_, name, 0, 0});
      const bool redeems = GetParam()->input_type()->FindFieldByName("ticket") != nullptr;
      if (redeems) holdings.ticket = Share(client.get(), name, absl::Seconds(2));
      senders.push_back(
          std::make_unique<Sender>(std::move(client), channel, *GetParam(), std::move(holdings), seed + i));
    }
    std::vector<std::thread> threads;
    threads.reserve(kSenders);
    for (const auto& sender : senders) threads.emplace_back([&send, &sender] { send(sender.get()); });
    for (std::thread& thread : threads) thread.join();
    senders.clear();
    EraseOthers();
  }

  uint64_t Share(RawClient* client, const Id128& name, absl::Duration ttl) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    v1::ShareRequest request;
    request.set_session(client->welcome.session());
    ToProto(ChunkKey{ns_, name, 0, 0}, request.add_keys());
    request.set_ttl_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(ttl)));
    v1::ShareReply reply;
    const grpc::Status status = client->stub->Share(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.ticket();
  }

  // What senders have published outlives them.
  void EraseOthers() {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    const auto list = witness_->admin->List(&context, v1::ListRequest());
    v1::ListReply reply;
    std::vector<v1::ChunkKey> others;
    while (list->Read(&reply)) {
      for (const auto& chunk : reply.chunks()) {
        const auto key = FromProto(chunk.key());
        if (chunk.state() == "published" && *key != published_) others.push_back(chunk.key());
      }
    }
    EXPECT_TRUE(list->Finish().ok());
    for (const v1::ChunkKey& key : others) {
      grpc::ClientContext erase;
      SetTestDeadline(&erase);
      v1::EraseRequest request;
      request.set_session(witness_->welcome.session());
      *request.mutable_key() = key;
      v1::EraseReply none;
      EXPECT_TRUE(witness_->stub->Erase(&erase, request, &none).ok());
    }
  }
};
INSTANTIATE_TEST_SUITE_P(EveryMethod, AnyBytesTest, testing::ValuesIn(Methods()), [](const auto& info) {
  return absl::StrCat(info.param->service()->name(), "_", info.param->name());
});

TEST_P(AnyBytesTest, AreRefusedOrAnsweredAndNothingStays) {
  printf("KVFERRY_SEED=%llu\n", static_cast<unsigned long long>(Seed()));
  SCOPED_TRACE(testing::Message() << "KVFERRY_SEED=" << Seed());
  std::atomic<uint64_t> malformed{0}, accepted{0};
  WithSenders(Seed(), [&](Sender* sender) {
    sender->SendDamaged(kStringsPerMethod / 4 * 3 / kSenders);
    malformed += sender->malformed();
  });
  EXPECT_GT(malformed, uint64_t{kStringsPerMethod / 5}) << "strings that are no message at all";
  EXPECT_GE(witness_->Stats()["malformed_messages"], malformed) << "each has come to the method";
  ExpectNothingChanged();
  WithSenders(Seed() + kSenders, [&](Sender* sender) {
    sender->SendWithUnknownFields(kStringsPerMethod / 4 / kSenders);
    accepted += sender->accepted();
  });
  EXPECT_GT(accepted, 0u) << "all of it was refused for something else: MessageMaker lacks what this method wants";
  ExpectNothingChanged();
}

}  // namespace
}  // namespace kvferry
