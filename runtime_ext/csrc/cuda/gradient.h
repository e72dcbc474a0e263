// A gradient of any of three types, as kernels read it. Element numbers are unsigned, since they may run past
// the end.
#pragma once

#include "block.h"

namespace cgx {

// Loads that a thread has under way. 48 warps times 8 rows of 128 bytes are 48 KiB per multiprocessor of an
// H200, whose 4.8 TB/s need 26 KiB at 700 ns. So it is enough to load single elements, which need no
// alignment.
constexpr int kBatch = 8;

template <typename T>
struct Source {
    const T* grad;
    const float* residual;  // may be null
    uint32_t numel;

    // Loads the elements at `at` that are wanted, and zero for the others. All loads are under way before the
    // first one is waited for.
    template <int kNum>
    __device__ void load(const uint32_t (&at)[kNum], const bool (&is_wanted)[kNum], float (&x)[kNum]) const {
        for (int j = 0; j < kNum; ++j) x[j] = is_wanted[j] ? to_float(grad[at[j]]) : 0.0f;
        if (residual == nullptr) return;
        float owed[kNum];
        for (int j = 0; j < kNum; ++j) owed[j] = is_wanted[j] ? residual[at[j]] : 0.0f;
        for (int j = 0; j < kNum; ++j) x[j] += owed[j];
    }
};

}  // namespace cgx
