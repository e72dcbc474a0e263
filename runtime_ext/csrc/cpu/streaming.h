// Stores that bypass the caches. A usual store reads the cache line first, and nothing needs the line before
// the next step, when it has long left the cache.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace cgx {

constexpr int64_t kStreamedNumel = 1 << 22;  // 48 MiB of gradient, residual and next

// Whether `next` is large and begins at a multiple of `alignment` bytes. If it is `residual`, its lines are
// read anyway.
inline bool can_stream(Input input, uintptr_t alignment) {
    return input.next != nullptr && input.next != input.residual && input.numel >= kStreamedNumel &&
           reinterpret_cast<uintptr_t>(input.next) % alignment == 0;
}

}  // namespace cgx
