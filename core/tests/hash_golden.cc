// Files, initial values and shard owners depend on these values. They may change only together with the table file version.
#include <cstdint>

#include "check.h"
#include "monolith/hash.h"

TEST("hash values are pinned") {
  CHECK_EQ(monolith::hash_id(0), 0xE220A8397B1DCDAFull);
  CHECK_EQ(monolith::hash_id(1), 0x910A2DEC89025CC1ull);
  CHECK_EQ(monolith::hash_id(-1), 0xE4D971771B652C20ull);
  CHECK_EQ(monolith::hash_id(42), 0xBDD732262FEB6E95ull);
  CHECK_EQ(monolith::hash_id(INT64_MIN), 0x481EC0A212A9F3DBull);
  CHECK_EQ(monolith::hash_id(INT64_MAX), 0x2A67D7552E039EA7ull);
}

TEST("fast_range maps the whole hash range onto [0, n) in order") {
  CHECK_EQ(monolith::fast_range(0, 11), 0u);
  CHECK_EQ(monolith::fast_range(UINT64_MAX, 11), 10u);
  CHECK_EQ(monolith::fast_range(UINT64_MAX / 2, 10), 4u);
}
