// Pieces of a file, read by a thread of their own while other threads use the ones read before.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "huge_array.h"

namespace monolith {

// Any number of threads may call next(); all must have returned before the destructor, which does not wait for the pieces left.
class ReadAhead {
 public:
  struct Piece {
    std::size_t number = 0;
    std::byte* data = nullptr;  // what was read, as read() says
    // Uninitialised memory for so many bytes. It is used again for later pieces: fresh memory costs more than reading into it.
    std::byte* room(std::size_t bytes);

   private:
    HugeArray<std::byte> memory_;
    std::size_t size_ = 0;
  };
  using Read = std::function<void(Piece& piece)>;

  // Calls read() for the pieces 0 ... count - 1, in this order, with at most `room` of them in memory. Throws std::system_error
  // when the system gives no thread.
  ReadAhead(std::size_t count, std::size_t room, Read read);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Takes `piece` back, if there is one, and puts the next into its place; false after the last. Throws what read() threw.
  bool next(std::unique_ptr<Piece>& piece);

 private:
  void run();
  std::unique_ptr<Piece> unused();

  const std::size_t count_;
  const Read read_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Piece>> unused_, ready_;
  bool ended_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace monolith
