// Memory for rows and index blocks: large slabs on huge pages (a table is all random access; with small pages every touch
// would also miss the TLB), carved by bumping a pointer. Pieces are never returned singly: callers keep free lists.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace monolith {

// Thread-safe.
class Arena {
 public:
  static constexpr std::size_t kAlignment = 128;

  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { release(); }

  // Uninitialised, aligned to kAlignment. Throws std::bad_alloc, leaving the arena as it was.
  std::byte* allocate(std::size_t bytes);

  // Takes one slab of at least this size from the system now. Throws std::bad_alloc, leaving the arena as it was.
  void reserve(std::size_t bytes);

  // Returns all memory; every piece handed out is gone.
  void release() noexcept;

  // What the arena holds from the system, used or not.
  std::size_t bytes() const noexcept;

 private:
  struct Slab {
    std::byte* base;
    std::size_t size;
    std::size_t used;
  };

  Slab& add_slab(std::size_t size);

  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;
  std::size_t total_ = 0;
};

}  // namespace monolith
