// The tests that make allocations fail prove nothing if the failures never reach the code under test.
#include <atomic>
#include <memory>
#include <thread>

#include "check.h"
#include "failing_new.h"

namespace {

struct alignas(256) Wide {
  char bytes[256];
};

// The compiler may leave out an allocation whose result nobody sees.
template <typename T>
T* seen(T* pointer) {
  asm volatile("" : : "r"(pointer) : "memory");
  return pointer;
}

bool allocation_fails() {
  try {
    delete seen(new int);
    return false;
  } catch (const std::bad_alloc&) {
    return true;
  }
}

}  // namespace

TEST("each form of operator new fails when told to") {
  for (int form = 0; form < 6; ++form) {
    bool failed = false;
    {
      const failing_new::FailFrom fail(0);
      try {
        if (form == 0) delete seen(new int);
        if (form == 1) delete[] seen(new int[10]);
        if (form == 2) delete seen(new Wide);
        if (form == 3) delete[] seen(new Wide[2]);
        if (form == 4) failed = seen(new (std::nothrow) int) == nullptr;
        if (form == 5) failed = seen(new (std::nothrow) Wide) == nullptr;
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
    CHECK(failed);
  }
}

TEST("only the chosen allocation fails") {
  bool failed[3];
  {
    const failing_new::FailOnly fail(1);
    for (bool& each : failed) each = allocation_fails();
  }
  CHECK(!failed[0]);
  CHECK(failed[1]);
  CHECK(!failed[2]);
  CHECK(!allocation_fails());
}

TEST("allocations of other threads do not fail") {
  std::atomic<int> stage{0};
  bool inside = false;
  std::thread other([&] {
    const failing_new::FailFrom fail(0);
    inside = allocation_fails();
    stage = 1;
    stage.notify_one();
    stage.wait(1);
  });
  stage.wait(0);
  CHECK(!allocation_fails());
  stage = 2;
  stage.notify_one();
  other.join();
  CHECK(inside);
}

TEST("each allocation fails in turn and the last run goes through") {
  int verified = 0;
  int finished = 0;
  const auto failures = failing_new::each_allocation(
      [] { return 0; },
      [&](int) {
        const std::unique_ptr<int> a(seen(new int));
        const std::unique_ptr<Wide> b(seen(new Wide));
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(b.get()) % alignof(Wide), 0u);
        ++finished;
      },
      [&](int) { ++verified; });
  CHECK_EQ(failures, 2);
  CHECK_EQ(verified, 2);
  CHECK_EQ(finished, 1);
}
