// A thread that writes the checksums of messages that go out, and checks those of messages that have come.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace cgx {

// A message begins with a header of kHeaderBytes. Its last four hold the CRC-32C of all other bytes of the
// message, little-endian.
constexpr size_t kHeaderBytes = 32, kChecksumAt = 28;

// Writes the checksum.
void seal(uint8_t* message, size_t num_bytes);

// Writes 0 over the first two bytes, the magic number, of a message whose checksum is wrong.
void mark_if_damaged(uint8_t* message, size_t num_bytes);

class Courier {
  public:
    // Called with true if the thread was stopped before: then nothing may be read any more.
    using Work = std::function<void(bool is_stopped)>;

    // Starts the thread unless it runs. Throws std::system_error if there can be no more threads.
    void start();

    // Has the thread do `work`, after all that it was asked before. After `stop` it does so at once: callers
    // hold no lock that `work` takes then.
    void call(Work work);

    // Ends the thread, once it has done what it has begun. By one thread at a time.
    void stop();

    // In a forked child: forgets the thread, which is not in the child. Takes no lock.
    void forget_thread();

  private:
    void run();

    std::mutex mutex_;  // guards what is below
    std::condition_variable changed_;
    std::deque<Work> called_;
    bool is_stopped_ = false;
    std::thread thread_;
};

}  // namespace cgx
