// Which of the connections to a peer takes the next part of a message.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace cgx {

enum class Direction { kSend, kReceive };

// Both ends count alike, so they choose the same stream, in whatever order they post on different channels.
class StreamChoice {
  public:
    explicit StreamChoice(size_t num_streams) : num_streams_(num_streams) {}

    // The stream to which the fewest bytes of the channel were posted; channels begin at different ones.
    size_t next(uint32_t channel, Direction direction, int64_t num_bytes) {
        if (num_streams_ == 1) return 0;
        std::vector<int64_t>& posted = posted_bytes_[static_cast<size_t>(direction)][channel];
        posted.resize(num_streams_);
        size_t least = channel % num_streams_;
        for (size_t i = 1; i < num_streams_; ++i) {
            const size_t other = (channel + i) % num_streams_;
            if (posted[other] < posted[least]) least = other;
        }
        if (num_bytes >= kMinCountedBytes) posted[least] += num_bytes;
        return least;
    }

  private:
    // Shorter parts do not count: a header is to go where its message will go, so that both are read
    // together.
    static constexpr int64_t kMinCountedBytes = 1 << 10;

    size_t num_streams_;
    std::array<std::unordered_map<uint32_t, std::vector<int64_t>>, 2> posted_bytes_;  // by direction, channel
};

}  // namespace cgx
