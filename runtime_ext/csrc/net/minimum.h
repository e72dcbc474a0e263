// An element-wise minimum over ranks, which the threads that move messages pass on in rounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cgx {

struct Minimum {
    uint8_t* values;  // (num_bytes,): the minimum over the ranks heard so far
    size_t num_bytes;
    bool is_int64;                         // else uint8
    std::vector<std::vector<int>> rounds;  // ranks that each round sends to and receives from
    uint32_t channel;
    size_t num_begun = 0;                          // rounds
    std::vector<std::vector<uint8_t>> received{};  // by rank of the round that has begun last, (num_bytes,)

    bool has_more() const { return num_begun < rounds.size(); }

    // Takes what the round has received into `values`.
    void fold() {
        for (const std::vector<uint8_t>& one : received) {
            if (is_int64) {
                lower<int64_t>(one);
            } else {
                lower<uint8_t>(one);
            }
        }
    }

  private:
    template <typename T>
    void lower(const std::vector<uint8_t>& one) {
        T* const own = reinterpret_cast<T*>(values);
        const T* const other = reinterpret_cast<const T*>(one.data());
        std::transform(other, other + num_bytes / sizeof(T), own, own,
                       [](T a, T b) { return std::min(a, b); });
    }
};

}  // namespace cgx
