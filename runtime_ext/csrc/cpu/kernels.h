// CPU kernels. Callers have checked sizes; buffers may be unaligned, except that floats sit on float
// boundaries.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
// One binary for every x86-64 machine: the loader picks the widest version that the CPU runs.
#define CGX_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CGX_MULTIVERSION
#endif

namespace cgx {

// data (num_bytes,)
uint32_t crc32c(const uint8_t* data, int64_t num_bytes, uint32_t seed);

// grad (numel,), out (payload bytes,)
void qsgd_encode(const float* grad, int64_t numel, uint8_t* out, int bits, int64_t bucket_size, uint32_t key,
                 bool stochastic);

// payload (payload bytes,), out (numel,)
void qsgd_decode(const uint8_t* payload, float* out, int64_t numel, int bits, int64_t bucket_size, bool add);

// grad (numel,), index and value (num_kept,)
void topk_select(const float* grad, int64_t numel, int32_t* index, float* value, int64_t num_kept);

}  // namespace cgx
