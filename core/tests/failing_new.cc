#include "failing_new.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <limits>

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

// Plain values, so that the first allocation of a thread needs no initialiser to run.
thread_local std::int64_t made = 0;
thread_local std::int64_t first_to_fail = kNever;
thread_local std::int64_t last_to_fail = kNever;

bool refused() noexcept {
  const std::int64_t number = made++;
  return number >= first_to_fail && number <= last_to_fail;
}

void* take(std::size_t size) noexcept { return refused() ? nullptr : std::malloc(size == 0 ? 1 : size); }

void* take(std::size_t size, std::align_val_t alignment) noexcept {
  const auto align = static_cast<std::size_t>(alignment);
  return refused() ? nullptr : std::aligned_alloc(align, (size + align - 1) / align * align);
}

void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

namespace failing_new {

FailFrom::FailFrom(std::int64_t n) noexcept {
  first_to_fail = made + n;
  last_to_fail = kNever;
}
FailFrom::~FailFrom() { first_to_fail = kNever; }

FailOnly::FailOnly(std::int64_t n) noexcept { first_to_fail = last_to_fail = made + n; }
FailOnly::~FailOnly() { first_to_fail = last_to_fail = kNever; }

std::int64_t allocations() noexcept { return made; }

}  // namespace failing_new

void* operator new(std::size_t size) { return or_throw(take(size)); }
void* operator new[](std::size_t size) { return or_throw(take(size)); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return take(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return take(size); }
void* operator new(std::size_t size, std::align_val_t align) { return or_throw(take(size, align)); }
void* operator new[](std::size_t size, std::align_val_t align) { return or_throw(take(size, align)); }
void* operator new(std::size_t size, std::align_val_t align, const std::nothrow_t&) noexcept { return take(size, align); }
void* operator new[](std::size_t size, std::align_val_t align, const std::nothrow_t&) noexcept { return take(size, align); }

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t, const std::nothrow_t&) noexcept { std::free(memory); }

// How reserved addresses get their memory (reserved_memory.cc).
extern "C" int mprotect(void* address, std::size_t size, int protection) noexcept {
  if (refused()) {
    errno = ENOMEM;
    return -1;
  }
  return static_cast<int>(syscall(SYS_mprotect, address, size, protection));
}
