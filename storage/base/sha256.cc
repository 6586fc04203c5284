#include "storage/base/sha256.h"

#include <openssl/evp.h>

#include <cstdlib>

namespace kvferry {
namespace {

uint64_t BigEndian(const unsigned char* p) {
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word = word << 8 | p[i];
  return word;
}

}  // namespace

Id128 Sha256Id(absl::string_view bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  // Fails only where the library has no SHA-256 at all; a key made up instead would be a wrong byte.
  if (EVP_Digest(bytes.data(), bytes.size(), digest, &size, EVP_sha256(), nullptr) != 1 || size != 32) std::abort();
  return {BigEndian(digest), BigEndian(digest + 8)};
}

}  // namespace kvferry
