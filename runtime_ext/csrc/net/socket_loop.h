// The thread that moves messages through all sockets of a rank, with edge-triggered epoll.
#pragma once

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "link_meter.h"
#include "sockets.h"
#include "streams.h"

namespace cgx {

class SocketLoop {
  public:
    explicit SocketLoop(LinkMeter& meter);

    // Adds a stream, before `run`.
    void watch(Stream& stream);

    // Moves messages until `stop`.
    void run();
    void stop();

    // Has the thread visit the stream at the next `wake`: something was posted that no event announces.
    void visit(Stream& stream);
    void wake();

    // Has the thread do `work` before it moves anything again. Takes only a lock of its own.
    void call(std::function<void()> work);

    // Does what was called for and is not done. By another thread only after `run` has returned.
    void do_called();

    // In a forked child: closes its copies. Takes no lock.
    void close_copies();

  private:
    LinkMeter& meter_;
    FileDescriptor epoll_, wake_;
    int num_watched_ = 0;
    std::mutex mutex_;  // guards what is below
    std::vector<Stream*> posted_;
    std::vector<std::function<void()>> called_;
    std::thread::id thread_;  // that is in `run`
    bool is_stopped_ = false;
};

}  // namespace cgx
