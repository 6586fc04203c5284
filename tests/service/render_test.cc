#include "client/cli/render.h"

#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/key.h"

namespace kvferry {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

v1::ListReply Listing(const std::string& model) {
  v1::ListReply list;
  v1::ListReply::Chunk* chunk = list.add_chunks();
  chunk->set_tenant("default");
  chunk->set_model(model);
  return list;
}

// The JSON string that is the model's value, quotes included.
std::string ModelJson(const std::string& model) {
  const std::string json = cli::ChunkJson(Listing(model));
  const std::string before = "\"model\": ", after = "}]\n";
  const size_t at = json.find(before) + before.size();
  return json.substr(at, json.size() - after.size() - at);
}

std::string ModelCell(const std::string& model) {
  const std::string table = cli::ChunkTable(Listing(model));
  const size_t at = table.rfind("default") + 9;
  return table.substr(at, table.size() - 1 - at);
}

TEST(Render, NamesThatAreText) {
  EXPECT_EQ(ModelCell("org/model-7B"), "org/model-7B");
  EXPECT_EQ(ModelJson("org/model-7B"), "\"org/model-7B\"");
  const std::string utf8 = "mod\xc3\xa8le \xe6\xa8\xa1 \xf0\x9f\x9a\xa2";
  EXPECT_EQ(ModelCell(utf8), utf8);
  EXPECT_EQ(ModelJson(utf8), "\"" + utf8 + "\"");
}

TEST(Render, NamesThatAreNot) {
  EXPECT_EQ(ModelCell("a\x1b[2J\n\\b"), "a\\x1b[2J\\x0a\\\\b");
  EXPECT_EQ(ModelJson("a\"\\\n\x01"), "\"a\\\"\\\\\\u000a\\u0001\"");
  EXPECT_EQ(ModelCell("\xc2\x9b"), "\\xc2\\x9b") << "a terminal takes it for an escape";
  // Cut short, too long for its value, half of a pair, beyond the last character, a byte alone.
  for (const std::string bad : {"\xc3", "\xe6\xa8", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                "\xf0\x80\x80\x80", "\xff", "\x80"}) {
    std::string cell, json;
    for (const char c : bad) {
      char text[8];
      snprintf(text, sizeof(text), "\\x%02x", static_cast<unsigned char>(c));
      cell += text;
      json += "\\ufffd";
    }
    EXPECT_EQ(ModelCell(bad + "."), cell + ".");
    EXPECT_EQ(ModelJson(bad + "."), "\"" + json + ".\"");
  }
}

TEST(Render, ColumnsLineUpBehindNamesOfAnyScript) {
  v1::ListReply list = Listing("one");
  *list.add_chunks() = list.chunks(0);
  list.mutable_chunks(0)->set_tenant(
      "d\xc3\xa9"
      "fault");
  const std::string table = cli::ChunkTable(list);
  EXPECT_THAT(table, HasSubstr("d\xc3\xa9"
                               "fault  one\n"));
  EXPECT_THAT(table, EndsWith("default  one\n"));
}

// No byte that JSON forbids in a string, no escape that it does not know, and UTF-8 throughout.
TEST(Render, JsonIsValidWhateverTheBytes) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::string model(random() % 40, '\0');
    for (char& c : model) c = static_cast<char>(random() % (round % 2 == 0 ? 256 : 130));
    const std::string json = ModelJson(model);
    ASSERT_GE(json.size(), 2u);
    v1::StatsReply::Value text;  // protobuf takes a `string` only if it is UTF-8
    text.set_name(json);
    ASSERT_TRUE(text.ParseFromString(text.SerializeAsString())) << round;
    for (size_t i = 1; i + 1 < json.size(); ++i) {
      ASSERT_GE(static_cast<unsigned char>(json[i]), 0x20);
      ASSERT_NE(json[i], '"');
      if (json[i] != '\\') continue;
      ASSERT_LT(++i, json.size() - 1);
      ASSERT_THAT(std::string("\"\\u"), HasSubstr(json.substr(i, 1)));
    }
  }
}

}  // namespace
}  // namespace kvferry
