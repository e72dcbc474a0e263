// Splits a kernel's elements over threads that stay between calls.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cgx {

// Fewest elements that are worth a thread of their own. Handing over a part takes 5 us at best and 20 us in
// the median (3,000 hand-overs on two Zen 3 cores that others used too). In 20 us one core decodes 180,000
// elements of qsgd or encodes 50,000. Top-k selection gets through fewer. kMinOnePassPart is for kernels that
// look at each element once.
constexpr int64_t kMinPart = 1 << 15;
constexpr int64_t kMinOnePassPart = 1 << 17;

struct Range {
    int64_t begin;
    int64_t end;
};

// Number of parts for `numel` elements: at most num_threads, and each of several parts has at least min_part
// elements.
inline int count_parts(int num_threads, int64_t numel, int64_t min_part = kMinPart) {
    return static_cast<int>(std::clamp<int64_t>(numel / min_part, 1, std::max(num_threads, 1)));
}

// The range of one of num_parts near-equal parts of [0, numel). Parts begin at multiples of `granule`; the
// last ones may be empty.
inline Range part_range(int part, int num_parts, int64_t numel, int64_t granule) {
    const int64_t num_granules = (numel + granule - 1) / granule;
    const int64_t begin = num_granules * part / num_parts * granule;
    const int64_t end = num_granules * (part + 1) / num_parts * granule;
    return {std::min(begin, numel), std::min(end, numel)};
}

using PartFunction = void (*)(void* context, int part);

// Calls function(context, part) once for every part in [0, num_parts), on this thread and on up to
// num_parts - 1 others, and returns when all are done. `function` must not throw. Any thread may call, also
// while others do.
void run_parts(int num_parts, PartFunction function, void* context);

// Calls f(part) in the same way. A lambda is compiled for the oldest processor even inside a CGX_MULTIVERSION
// function, so let the lambda call such a function.
template <typename F>
void for_each_part(int num_parts, F f) {
    if (num_parts == 1) return f(0);
    run_parts(num_parts, [](void* context, int part) { (*static_cast<F*>(context))(part); }, &f);
}

// Calls f(begin, end), which looks at each element once, for parts that cover [0, numel) and begin at
// multiples of `granule`.
template <typename F>
void parallel_for(int num_threads, int64_t numel, int64_t granule, F f) {
    const int num_parts = count_parts(num_threads, numel, kMinOnePassPart);
    for_each_part(num_parts, [&](int part) {
        const Range range = part_range(part, num_parts, numel, granule);
        if (range.begin < range.end) f(range.begin, range.end);
    });
}

}  // namespace cgx
