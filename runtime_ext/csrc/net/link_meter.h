// The rates at which bytes arrive through the sockets of a rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "arrivals.h"

namespace cgx {

class LinkMeter {
  public:
    static constexpr size_t kMaxBursts = 1024;

    explicit LinkMeter(int world_size) {
        for (int peer = 0; peer < world_size; ++peer) meters_.emplace_back(peer);
        meters_.emplace_back(-1);
    }

    // `add` and `settle` as in ArrivalMeter, for the thread that reads the sockets.
    void add(int peer, double at, int64_t num_bytes, bool begins, bool ends) {
        meters_[peer].add(at, num_bytes, begins, ends);
        meters_.back().add(at, num_bytes, begins, ends);
    }

    void settle() {
        std::vector<Burst> done;
        for (ArrivalMeter& meter : meters_) meter.settle(done);
        if (done.empty()) return;
        std::lock_guard lock(mutex_);
        bursts_.insert(bursts_.end(), done.begin(), done.end());
        if (bursts_.size() > kMaxBursts) bursts_.erase(bursts_.begin(), bursts_.end() - kMaxBursts);
    }

    // Bursts since the last call, the newest kMaxBursts. From any thread.
    std::vector<Burst> take() {
        std::lock_guard lock(mutex_);
        return std::exchange(bursts_, {});
    }

  private:
    std::vector<ArrivalMeter> meters_;  // by peer, then of all peers together
    std::mutex mutex_;                  // guards bursts_
    std::vector<Burst> bursts_;
};

}  // namespace cgx
