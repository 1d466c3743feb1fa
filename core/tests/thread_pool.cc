// A call spread over threads must do every task once, whatever executor runs it, and must not wait for itself when a task calls
// again. A task lost or done twice is a gradient lost or applied twice.
#include "monolith/thread_pool.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/error.h"

namespace {

// Sets the number of threads, and what lends them, for the length of a test.
struct Threads {
  explicit Threads(std::size_t n, monolith::Executor executor = nullptr) {
    monolith::set_num_threads(n);
    monolith::set_executor(executor);
  }
  ~Threads() {
    monolith::set_executor(nullptr);
    monolith::set_num_threads(1);
  }
};

std::vector<int> runs_of(std::size_t tasks) {
  std::vector<std::atomic<int>> counts(tasks);
  monolith::parallel_for(tasks, [&](std::size_t i) { counts[i].fetch_add(1); });
  return {counts.begin(), counts.end()};
}

std::atomic<int> asked{0};
std::atomic<std::size_t> asked_for{0};

bool lend(std::size_t threads, void (*body)(void*), void* context) {
  ++asked;
  asked_for = threads;
  std::vector<std::thread> helpers;
  for (std::size_t i = 1; i < threads; ++i) helpers.emplace_back(body, context);
  body(context);
  for (std::thread& helper : helpers) helper.join();
  return true;
}

bool decline(std::size_t, void (*)(void*), void*) {
  ++asked;
  return false;
}

}  // namespace

TEST("every task runs once") {
  for (const std::size_t threads : {1, 2, 4}) {
    const Threads use(threads);
    for (const std::size_t tasks : {0, 1, 2, 3, 50, 1000}) CHECK(runs_of(tasks) == std::vector<int>(tasks, 1));
  }
}

TEST("an executor is asked for all threads and runs every task once") {
  const Threads use(3, lend);
  asked = 0;
  CHECK(runs_of(100) == std::vector<int>(100, 1));
  CHECK_EQ(asked.load(), 1);
  CHECK_EQ(asked_for.load(), 3u);
  CHECK(runs_of(2) == std::vector<int>(2, 1));  // fewer tasks than threads: some find nothing to do
  CHECK_EQ(asked_for.load(), 3u);
}

TEST("one task, or one thread, needs no executor") {
  asked = 0;
  {
    const Threads use(3, lend);
    CHECK(runs_of(1) == std::vector<int>(1, 1));
  }
  const Threads use(1, lend);
  CHECK(runs_of(5) == std::vector<int>(5, 1));
  CHECK_EQ(asked.load(), 0);
}

TEST("the pool does what an executor declines") {
  const Threads use(3, decline);
  asked = 0;
  CHECK(runs_of(100) == std::vector<int>(100, 1));
  CHECK_EQ(asked.load(), 1);
}

TEST("the first exception comes out after the last task") {
  for (const monolith::Executor executor : {monolith::Executor{nullptr}, monolith::Executor{lend}}) {
    const Threads use(3, executor);
    std::atomic<int> done{0};
    const auto fail_once = [&](std::size_t i) {
      if (i == 7) throw std::runtime_error("task 7");
      done.fetch_add(1);
    };
    CHECK_THROWS(monolith::parallel_for(64, fail_once), std::runtime_error);
    CHECK_EQ(done.load(), 63);
    CHECK(runs_of(10) == std::vector<int>(10, 1));  // and the threads are there for the next call
  }
}

TEST("a task that calls again runs its tasks by itself") {
  for (const monolith::Executor executor : {monolith::Executor{nullptr}, monolith::Executor{lend}}) {
    const Threads use(3, executor);
    std::atomic<int> elsewhere{0};
    std::atomic<int> done{0};
    asked = 0;
    monolith::parallel_for(6, [&](std::size_t) {
      const auto here = std::this_thread::get_id();
      monolith::parallel_for(20, [&](std::size_t) {
        elsewhere.fetch_add(std::this_thread::get_id() != here);
        done.fetch_add(1);
      });
    });
    CHECK_EQ(elsewhere.load(), 0);
    CHECK_EQ(done.load(), 120);
    CHECK_EQ(asked.load(), executor == nullptr ? 0 : 1);  // not again by the tasks
  }
}

TEST("threads that call at once do all their tasks") {
  const Threads use(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) wrong.fetch_add(runs_of(30) != std::vector<int>(30, 1));
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST("the number of threads can change between calls, but not to none") {
  const Threads use(2);
  for (const std::size_t n : {4, 1, 3, 2}) {
    monolith::set_num_threads(n);
    CHECK_EQ(monolith::num_threads(), n);
    CHECK(runs_of(40) == std::vector<int>(40, 1));
  }
  CHECK_THROWS(monolith::set_num_threads(0), monolith::InvalidArgument);
  CHECK_EQ(monolith::num_threads(), 2u);
}
