// An element-wise minimum over ranks, which the threads that move messages pass on in rounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cgx {

struct Minimum {
    int64_t* values;  // (num_values,): that of the ranks heard so far
    size_t num_values;
    std::vector<std::vector<int>> rounds;  // ranks that each round sends to and receives from
    uint32_t channel;
    size_t num_begun = 0;                          // rounds
    std::vector<std::vector<int64_t>> received{};  // by rank of the round that has begun last, (num_values,)

    bool has_more() const { return num_begun < rounds.size(); }

    // Takes what the round has received into `values`.
    void fold() {
        for (const std::vector<int64_t>& one : received)
            std::transform(one.begin(), one.end(), values, values,
                           [](int64_t a, int64_t b) { return std::min(a, b); });
    }
};

}  // namespace cgx
