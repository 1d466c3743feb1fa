#include "shared_buffers.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace monolith {

#if defined(__linux__)

namespace {

constexpr std::size_t kPage = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

std::shared_ptr<SharedBuffers> SharedBuffers::map(std::size_t count, std::size_t capacity, int descriptor) {
  void* data = mmap(nullptr, count * capacity, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) return nullptr;
  return std::shared_ptr<SharedBuffers>(new SharedBuffers(static_cast<std::byte*>(data), count, capacity));
}

std::shared_ptr<SharedBuffers> SharedBuffers::make(std::size_t count, std::size_t capacity, int& descriptor) {
  capacity = (capacity + kPage - 1) / kPage * kPage;
  descriptor = memfd_create("monolith-ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return nullptr;
  std::shared_ptr<SharedBuffers> made;
  if (ftruncate(descriptor, static_cast<off_t>(count * capacity)) == 0 && fcntl(descriptor, F_ADD_SEALS, kSeals) == 0) {
    made = map(count, capacity, descriptor);
  }
  if (!made) {
    ::close(descriptor);
    descriptor = -1;
  }
  return made;
}

std::shared_ptr<SharedBuffers> SharedBuffers::of(std::size_t count, int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0 || status.st_size <= 0) return nullptr;
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size % (count * kPage) != 0 || (fcntl(descriptor, F_GET_SEALS) & kSeals) != kSeals) return nullptr;
  return map(count, size / count, descriptor);
}

SharedBuffers::~SharedBuffers() { munmap(data_, size_); }

#else

std::shared_ptr<SharedBuffers> SharedBuffers::make(std::size_t, std::size_t, int&) { return nullptr; }
std::shared_ptr<SharedBuffers> SharedBuffers::of(std::size_t, int) { return nullptr; }
SharedBuffers::~SharedBuffers() = default;

#endif

}  // namespace monolith
