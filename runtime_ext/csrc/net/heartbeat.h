// Signs of life, sent by a thread that needs no lock of Python's: a process counts as alive while it runs.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "errors.h"
#include "sockets.h"

namespace cgx {

class Heartbeat {
  public:
    // Sends `beat` on each of `sockets`, now and every `every_s` seconds until `stop`. The sockets stay the
    // caller's, who may send on them too, and must not close them before. Errors are ignored: the receiver
    // notices that beats are missing.
    Heartbeat(std::vector<int> sockets, std::string beat, double every_s)
        : sockets_(std::move(sockets)),
          beat_(std::move(beat)),
          every_ms_(static_cast<int>(every_s * 1e3)),
          stopped_(eventfd(0, EFD_CLOEXEC)) {
        if (!stopped_.is_open()) fail_socket("cannot make an eventfd", errno);
        thread_ = std::thread([this] { run(); });
    }
    ~Heartbeat() { stop(); }
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    // Returns when nothing is sent any more. One thread at a time.
    void stop() {
        if (!thread_.joinable()) return;
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(stopped_.get(), &one, sizeof one);
        thread_.join();
    }

    // In a forked child, which does not have the thread.
    void close_copy() {
        // The destructor of a thread that is not in this process would end it.
        new (&thread_) std::thread;
        stopped_.close();
    }

  private:
    void run() const {
        pollfd stop{stopped_.get(), POLLIN, 0};
        do {
            for (const int fd : sockets_) {
                // Whole or not at all, except if hundreds of kilobytes wait for a receiver that is gone.
                [[maybe_unused]] const ssize_t sent =
                    send(fd, beat_.data(), beat_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            }
        } while (poll(&stop, 1, every_ms_) <= 0);
    }

    const std::vector<int> sockets_;
    const std::string beat_;
    const int every_ms_;
    FileDescriptor stopped_;
    std::thread thread_;
};

}  // namespace cgx
