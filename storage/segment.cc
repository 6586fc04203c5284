#include "storage/segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvferry {
namespace {

absl::Status Refused(absl::string_view call, uint64_t bytes, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("segment of ", bytes, " bytes: ", call, " failed: ", std::strerror(error)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Segment>> Segment::Create(absl::string_view tenant, uint64_t id, uint64_t bytes) {
  const int fd = memfd_create("kvferry-segment", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return Refused("memfd_create", bytes, errno);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd);
    return Refused("ftruncate", bytes, error);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(fd);
    return Refused("mmap", bytes, error);
  }
  // Advice: a kernel that does not take it still keeps the bytes right.
  (void)madvise(data, bytes, MADV_DONTDUMP);
  (void)madvise(data, bytes, MADV_DONTFORK);
  return std::unique_ptr<Segment>(new Segment(tenant, id, bytes, fd, static_cast<uint8_t*>(data)));
}

Segment::~Segment() {
  munmap(data_, bytes_);
  close(fd_);
}

}  // namespace kvferry
