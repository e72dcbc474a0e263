// Passes over a whole gradient that select nothing.
#include <algorithm>
#include <atomic>
#include <limits>

#include "kernels.h"
#include "sparse.h"
#include "threads.h"

namespace cgx {
namespace {

struct Found {
    bool not_finite;
    bool plus;
};

CGX_MULTIVERSION
Found look_for(const float* grad, int64_t numel) {
    uint32_t largest = 0, signs = ~0u;
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t bits = float_bits(grad[i]);
        largest = std::max(largest, bits & 0x7FFFFFFFu);
        signs &= bits;
    }
    return {largest >= kInfMagnitude, signs >> 31 == 0};
}

CGX_MULTIVERSION
void add_momentum_range(const float* grad, const float* momentum, const float* residual, float* next_momentum,
                        float* next, int64_t begin, int64_t end, float factor, float scale) {
#pragma GCC ivdep  // the outputs overlap nothing else
    for (int64_t i = begin; i < end; ++i) {
        const float sum = momentum[i] * factor + grad[i] * scale;
        next_momentum[i] = sum;
        next[i] = residual == nullptr ? sum : sum + residual[i];
    }
}

}  // namespace

float poison(const float* grad, int64_t numel, int num_threads) {
    std::atomic<bool> not_finite = false, plus = numel == 0;
    parallel_for(num_threads, numel, 1, [&](int64_t begin, int64_t end) {
        const Found found = look_for(grad + begin, end - begin);
        if (found.not_finite) not_finite = true;
        if (found.plus) plus = true;
    });
    if (not_finite) return std::numeric_limits<float>::quiet_NaN();
    return plus ? 0.0f : -0.0f;
}

void add_momentum(const float* grad, const float* momentum, const float* residual, float* next_momentum,
                  float* next, int64_t numel, float factor, float scale, int num_threads) {
    parallel_for(num_threads, numel, 1, [&](int64_t begin, int64_t end) {
        add_momentum_range(grad, momentum, residual, next_momentum, next, begin, end, factor, scale);
    });
}

}  // namespace cgx
