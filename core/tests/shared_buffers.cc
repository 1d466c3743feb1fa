// Memory of another process: reading memory that can shrink kills this process, and a size that was not checked reads beyond its end.
#include "shared_buffers.h"

#if defined(__linux__)

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "check.h"

using monolith::SharedBuffers;

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

int memory_of(std::size_t size, int seals) {
  const int descriptor = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(descriptor >= 0);
  REQUIRE(ftruncate(descriptor, static_cast<off_t>(size)) == 0);
  if (seals != 0) REQUIRE(fcntl(descriptor, F_ADD_SEALS, seals) == 0);
  return descriptor;
}

}  // namespace

TEST("two mappings of one memory see the same bytes") {
  int descriptor = -1;
  const auto written = SharedBuffers::make(3, 10'000, descriptor);
  REQUIRE(written != nullptr);
  CHECK_EQ(written->capacity(), 12'288u);
  const auto read = SharedBuffers::of(3, descriptor);
  REQUIRE(read != nullptr);
  CHECK_EQ(read->capacity(), written->capacity());
  for (std::size_t i = 0; i < 3; ++i) std::memset(written->buffer(i), static_cast<int>(i + 1), written->capacity());
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(read->buffer(i)[0] == static_cast<std::byte>(i + 1));
    CHECK(read->buffer(i)[read->capacity() - 1] == static_cast<std::byte>(i + 1));
  }
  ::close(descriptor);
}

TEST("memory outlives its descriptor and the mapping it came from") {
  int descriptor = -1;
  auto written = SharedBuffers::make(1, 4096, descriptor);
  REQUIRE(written != nullptr);
  const auto read = SharedBuffers::of(1, descriptor);
  REQUIRE(read != nullptr);
  ::close(descriptor);
  std::memset(written->buffer(0), 7, 4096);
  written.reset();
  CHECK(read->buffer(0)[4095] == std::byte{7});
}

TEST("another process sees what is written") {
  int descriptor = -1;
  const auto shared = SharedBuffers::make(2, 4096, descriptor);
  REQUIRE(shared != nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto read = SharedBuffers::of(2, descriptor);
    if (read) read->buffer(1)[100] = std::byte{42};
    ::_exit(read ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK_EQ(status, 0);
  CHECK(shared->buffer(1)[100] == std::byte{42});
  ::close(descriptor);
}

TEST("memory cannot change its size once it was passed on") {
  int descriptor = -1;
  const auto shared = SharedBuffers::make(1, 4096, descriptor);
  REQUIRE(shared != nullptr);
  CHECK(ftruncate(descriptor, 1) != 0);
  CHECK(ftruncate(descriptor, 1 << 20) != 0);
  CHECK(fcntl(descriptor, F_ADD_SEALS, F_SEAL_WRITE) != 0);
  ::close(descriptor);
}

TEST("memory that could shrink, or is no memory, is refused") {
  for (const int seals : {0, F_SEAL_GROW, F_SEAL_SHRINK}) {
    const int descriptor = memory_of(3 * 4096, seals);
    CHECK(SharedBuffers::of(3, descriptor) == nullptr);
    ::close(descriptor);
  }
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  CHECK(SharedBuffers::of(3, ends[0]) == nullptr);
  CHECK(SharedBuffers::of(3, -1) == nullptr);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST("sizes that are not of whole buffers are refused") {
  for (const std::size_t size : {std::size_t{0}, std::size_t{4096}, std::size_t{3 * 4096 + 1}, std::size_t{4 * 4096}}) {
    const int descriptor = memory_of(size, kSeals);
    CHECK(SharedBuffers::of(3, descriptor) == nullptr);
    ::close(descriptor);
  }
  const int whole = memory_of(6 * 4096, kSeals);
  const auto shared = SharedBuffers::of(3, whole);
  REQUIRE(shared != nullptr);
  CHECK_EQ(shared->capacity(), 8192u);
  ::close(whole);
}

TEST("more memory than there is gives none") {
  int descriptor = -1;
  CHECK(SharedBuffers::make(3, std::size_t{1} << 60, descriptor) == nullptr);
  CHECK_EQ(descriptor, -1);
}

#endif
