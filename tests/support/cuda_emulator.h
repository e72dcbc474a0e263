// Enough of CUDA to compile runtime_ext/csrc/cuda/*.cu as C++ and run them on a CPU; see cuda_emulator.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
// Blocks run one after another, so shared memory of a block may be static.
#define __shared__ static

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
extern Dim threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;

namespace emulator {

enum class Kind { kBlock, kWarp, kShuffle, kBallot, kMatch, kAdd, kMin, kMax, kOr, kCount };

// Arrival of one thread at a barrier. All threads must meet at the same `line`.
struct Arrival {
    Kind kind;
    int line;
    uint32_t mask;
    uint64_t value;
    unsigned source;  // lane that a shuffle reads
};

// Waits until all threads of the barrier have arrived; returns the barrier's result for this thread.
uint64_t meet(Arrival arrival);

template <typename T>
T shuffle(uint32_t mask, T value, unsigned source, int line) {
    static_assert(sizeof value <= 8);
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    word = meet({Kind::kShuffle, line, mask, word, source});
    memcpy(&value, &word, sizeof value);
    return value;
}

inline unsigned lane() { return threadIdx.x % 32; }

}  // namespace emulator

#define CGX_LINE int line = __builtin_LINE()

inline void __syncthreads(CGX_LINE) { emulator::meet({emulator::Kind::kBlock, line, 0, 0, 0}); }

inline int __syncthreads_count(int predicate, CGX_LINE) {
    return static_cast<int>(emulator::meet({emulator::Kind::kCount, line, 0, predicate != 0, 0}));
}

inline void __syncwarp(uint32_t mask = ~0u, CGX_LINE) {
    emulator::meet({emulator::Kind::kWarp, line, mask, 0, 0});
}

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, CGX_LINE) {
    const unsigned segment = emulator::lane() & ~(width - 1u);
    return emulator::shuffle(mask, value, segment | (source & (width - 1u)), line);
}

template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, CGX_LINE) {
    const unsigned lane = emulator::lane(), segment = lane & ~(width - 1u);
    return emulator::shuffle(mask, value, lane - segment < delta ? lane : lane - delta, line);
}

template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, CGX_LINE) {
    const unsigned lane = emulator::lane(), end = (lane & ~(width - 1u)) + width;
    return emulator::shuffle(mask, value, lane + delta < end ? lane + delta : lane, line);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32, CGX_LINE) {
    const unsigned lane = emulator::lane(), end = (lane & ~(width - 1u)) + width;
    const unsigned source = lane ^ lane_mask;
    return emulator::shuffle(mask, value, source < end ? source : lane, line);
}

inline unsigned __ballot_sync(uint32_t mask, int predicate, CGX_LINE) {
    return static_cast<unsigned>(emulator::meet({emulator::Kind::kBallot, line, mask, predicate != 0, 0}));
}
inline int __any_sync(uint32_t mask, int predicate, CGX_LINE) {
    return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, CGX_LINE) {
    return __ballot_sync(mask, predicate, line) == mask;
}
inline unsigned __match_any_sync(uint32_t mask, unsigned value, CGX_LINE) {
    return static_cast<unsigned>(emulator::meet({emulator::Kind::kMatch, line, mask, value, 0}));
}

inline unsigned __reduce_add_sync(uint32_t mask, unsigned value, CGX_LINE) {
    return static_cast<unsigned>(emulator::meet({emulator::Kind::kAdd, line, mask, value, 0}));
}
inline unsigned __reduce_or_sync(uint32_t mask, unsigned value, CGX_LINE) {
    return static_cast<unsigned>(emulator::meet({emulator::Kind::kOr, line, mask, value, 0}));
}
// Maps signed and unsigned numbers to uint64 in the same order, by flipping the sign bit.
inline uint64_t cgx_ordered(int value) { return static_cast<uint64_t>(int64_t{value}) ^ (1ull << 63); }
inline uint64_t cgx_ordered(unsigned value) { return cgx_ordered(0) + value; }
template <typename T>
T __reduce_min_sync(uint32_t mask, T value, CGX_LINE) {
    return static_cast<T>(emulator::meet({emulator::Kind::kMin, line, mask, cgx_ordered(value), 0}));
}
template <typename T>
T __reduce_max_sync(uint32_t mask, T value, CGX_LINE) {
    return static_cast<T>(emulator::meet({emulator::Kind::kMax, line, mask, cgx_ordered(value), 0}));
}

#undef CGX_LINE

inline void __threadfence() {}
inline void __threadfence_block() {}

// Threads are switched at barriers only, so plain reads and writes are atomic.
template <typename T>
T cgx_exchange(T* address, T next) {
    const T old = *address;
    *address = next;
    return old;
}
#define CGX_ATOMICS(T)                                                                              \
    inline T atomicAdd(T* address, T value) { return cgx_exchange<T>(address, *address + value); }  \
    inline T atomicOr(T* address, T value) { return cgx_exchange<T>(address, *address | value); }   \
    inline T atomicAnd(T* address, T value) { return cgx_exchange<T>(address, *address & value); }  \
    inline T atomicMax(T* address, T value) { return cgx_exchange(address, max(*address, value)); } \
    inline T atomicMin(T* address, T value) { return cgx_exchange(address, min(*address, value)); } \
    inline T atomicExch(T* address, T value) { return cgx_exchange(address, value); }               \
    inline T atomicCAS(T* address, T compare, T value) {                                            \
        return cgx_exchange(address, *address == compare ? value : *address);                       \
    }
CGX_ATOMICS(int)
CGX_ATOMICS(unsigned)
CGX_ATOMICS(unsigned long long)
#undef CGX_ATOMICS

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
    return reversed;
}
inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
template <typename T>
T __ldg(const T* address) {
    return *address;
}
template <typename T>
T __ldcs(const T* address) {
    return *address;
}
template <typename T>
void __stcs(T* address, T value) {
    *address = value;
}
