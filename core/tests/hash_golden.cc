// Files and shard owners depend on these values. They may change only together with the table file version.
#include "check.h"
#include "monolith/hash.h"

TEST("hash values are pinned") {
  for (std::int64_t id : {0L, 1L, -1L, 42L, INT64_MIN, INT64_MAX}) std::cerr << std::hex << monolith::hash_id(id) << "\n" << std::dec;
}
