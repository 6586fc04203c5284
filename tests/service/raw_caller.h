// Calls with any bytes in place of messages.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/service/raw_client.h"

namespace kvferry {

struct Answer {
  grpc::Status status;
  std::string replies;  // one after another: of a repeated field that is the same as all in one
};
inline bool operator==(const Answer& a, const Answer& b) {
  return a.status.error_code() == b.status.error_code() && a.status.error_message() == b.status.error_message() &&
         a.replies == b.replies;
}

// One call after another. Not thread-safe; several may share a channel.
class RawCaller {
 public:
  explicit RawCaller(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {}

  Answer Call(const google::protobuf::MethodDescriptor& method, const std::vector<std::string>& requests) {
    const std::string path = absl::StrCat("/", method.service()->full_name(), "/", method.name());
    const bool streams = method.client_streaming() || method.server_streaming();
    return streams ? CallStream(path, requests) : CallUnary(path, requests[0]);
  }
  // `path`: "/package.Service/Method".
  Answer CallUnary(const std::string& path, const std::string& request) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    const auto call = stub_.PrepareUnaryCall(&context, path, Buffer(request), &queue_);
    call->StartCall();
    Answer answer;
    grpc::ByteBuffer reply;
    call->Finish(&reply, &answer.status, this);
    Wait();
    if (answer.status.ok()) Append(reply, &answer.replies);
    return answer;
  }

 private:
  Answer CallStream(const std::string& path, const std::vector<std::string>& requests) {
    grpc::ClientContext context;
    SetTestDeadline(&context);
    context.set_initial_metadata_corked(true);  // goes with the first message
    const auto call = stub_.PrepareCall(&context, path, &queue_);
    call->StartCall(this);
    for (size_t i = 0; i < requests.size(); ++i) {
      grpc::WriteOptions options;
      if (i + 1 == requests.size()) options.set_last_message();
      call->Write(Buffer(requests[i]), options, this);
      if (!Wait()) break;
    }
    Answer answer;
    grpc::ByteBuffer reply;
    for (call->Read(&reply, this); Wait(); call->Read(&reply, this)) Append(reply, &answer.replies);
    call->Finish(&answer.status, this);
    Wait();
    return answer;
  }

  static grpc::ByteBuffer Buffer(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    return grpc::ByteBuffer(&slice, 1);
  }
  static void Append(const grpc::ByteBuffer& reply, std::string* replies) {
    grpc::Slice flat;
    EXPECT_TRUE(reply.DumpToSingleSlice(&flat).ok());
    replies->append(flat.begin(), flat.end());
  }
  bool Wait() {
    void* tag;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
};

}  // namespace kvferry
