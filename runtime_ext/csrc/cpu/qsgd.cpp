// qsgd: max-min quantization and bit packing, one bucket at a time while it is in the L1 cache.
#include "qsgd.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels.h"
#include "random.h"

static_assert(std::endian::native == std::endian::little, "the wire format is the memory's");

namespace cgx {
namespace {

// Elements that a loop of constant length handles: the compiler unrolls it fully at every vector width.
constexpr int kChunk = 64;

struct Rounding {
    RandomKey key;
    bool stochastic;
};

CGX_INLINE Grid find_grid(const float* x, int64_t count, int top_level) {
    int32_t low = flip_negative(static_cast<int32_t>(float_bits(x[0])));
    int32_t high = low;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t ordered = flip_negative(static_cast<int32_t>(float_bits(x[i])));
        low = ordered < low ? ordered : low;
        high = ordered > high ? ordered : high;
    }
    return make_grid(bits_float(static_cast<uint32_t>(flip_negative(low))),
                     bits_float(static_cast<uint32_t>(flip_negative(high))), top_level);
}

template <typename T>
CGX_INLINE uint64_t load(const uint8_t* data) {
    T word;
    memcpy(&word, data, sizeof word);
    return word;
}

template <typename T>
CGX_INLINE void store(uint8_t* data, uint64_t word) {
    const T low = static_cast<T>(word);
    memcpy(data, &low, sizeof low);
}

// A memcpy of kBytes bytes into a uint64_t would read back wider than it wrote and stall on the store buffer.
template <int kBytes>
CGX_INLINE uint64_t load_bytes(const uint8_t* data) {
    if constexpr (kBytes == 8) return load<uint64_t>(data);
    uint64_t word = 0;
    if constexpr (kBytes & 4) word = load<uint32_t>(data);
    if constexpr (kBytes & 2) word |= load<uint16_t>(data + (kBytes & 4)) << 8 * (kBytes & 4);
    if constexpr (kBytes & 1) word |= load<uint8_t>(data + (kBytes & 6)) << 8 * (kBytes & 6);
    return word;
}

template <int kBytes>
CGX_INLINE void store_bytes(uint8_t* data, uint64_t word) {
    if constexpr (kBytes == 8) return store<uint64_t>(data, word);
    if constexpr (kBytes & 4) store<uint32_t>(data, word);
    if constexpr (kBytes & 2) store<uint16_t>(data + (kBytes & 4), word >> 8 * (kBytes & 4));
    if constexpr (kBytes & 1) store<uint8_t>(data + (kBytes & 6), word >> 8 * (kBytes & 6));
}

// x (kChunk,), out (kChunk * kBits / 8,); counter belongs to x[0]
template <int kBits>
CGX_INLINE void encode_chunk(const float* x, uint8_t* out, Grid grid, float inverse, Rounding rounding,
                             uint32_t counter) {
    constexpr int32_t kTop = (1 << kBits) - 1;
    uint8_t level[kChunk];
    if (rounding.stochastic) {
        uint32_t word[kChunk / 2];
        uint16_t half[kChunk];
        for (int i = 0; i < kChunk / 2; ++i)
            word[i] = random_bits(rounding.key, counter + static_cast<uint32_t>(i));
        memcpy(half, word, sizeof half);
        for (int i = 0; i < kChunk; ++i) {
            const float u = static_cast<float>(static_cast<int32_t>(half[i])) * 0x1p-16f;
            level[i] = static_cast<uint8_t>(quantize(x[i], grid, inverse, u, kTop));
        }
    } else {
        for (int i = 0; i < kChunk; ++i) {
            level[i] = static_cast<uint8_t>(quantize(x[i], grid, inverse, 0.5f, kTop));
        }
    }
    for (int i = 0; i < kChunk / 8; ++i) {
        store_bytes<kBits>(out + kBits * i, pack_eight<kBits>(load<uint64_t>(level + 8 * i)));
    }
}

template <int kBits>
CGX_INLINE void encode(const float* grad, int64_t numel, uint8_t* out, int64_t bucket_size,
                       Rounding rounding) {
    constexpr int kTop = (1 << kBits) - 1;
    uint8_t* packed = out + 4 * ((numel + bucket_size - 1) / bucket_size);
    for (int64_t begin = 0; begin < numel; begin += bucket_size, out += 4) {
        const int64_t end = std::min(begin + bucket_size, numel);
        const Grid grid = find_grid(grad + begin, end - begin, kTop);
        const uint32_t grid_word = pack_grid(grid);
        memcpy(out, &grid_word, sizeof grid_word);
        const float inverse = inverse_scale(grid);
        if (inverse == 0.0f) {
            memset(packed + begin / 8 * kBits, 0, static_cast<size_t>(((end - begin) * kBits + 7) / 8));
            continue;
        }
        int64_t i = begin;
        for (; i + kChunk <= end; i += kChunk) {
            encode_chunk<kBits>(grad + i, packed + i / 8 * kBits, grid, inverse, rounding,
                                static_cast<uint32_t>(i / 2));
        }
        if (i == end) continue;
        // lo has level 0 whatever the rounding, so the unused bits come out zero.
        float rest[kChunk];
        uint8_t rest_out[kChunk];
        std::fill(rest, rest + kChunk, grid.lo);
        std::copy(grad + i, grad + end, rest);
        encode_chunk<kBits>(rest, rest_out, grid, inverse, rounding, static_cast<uint32_t>(i / 2));
        memcpy(packed + i / 8 * kBits, rest_out, static_cast<size_t>(((end - i) * kBits + 7) / 8));
    }
}

// packed (kChunk * kBits / 8,), out (kChunk,)
template <int kBits, bool kAdd>
CGX_INLINE void decode_chunk(const uint8_t* packed, float* out, Grid grid) {
    uint8_t level[kChunk];
    for (int i = 0; i < kChunk / 8; ++i) {
        store<uint64_t>(level + 8 * i, unpack_eight<kBits>(load_bytes<kBits>(packed + kBits * i)));
    }
    for (int i = 0; i < kChunk; ++i) {
        const float x = dequantize(level[i], grid);
        out[i] = kAdd ? out[i] + x : x;
    }
}

template <int kBits, bool kAdd>
CGX_INLINE void decode(const uint8_t* payload, float* out, int64_t numel, int64_t bucket_size) {
    const uint8_t* packed = payload + 4 * ((numel + bucket_size - 1) / bucket_size);
    for (int64_t begin = 0; begin < numel; begin += bucket_size, payload += 4) {
        const int64_t end = std::min(begin + bucket_size, numel);
        uint32_t grid_word;
        memcpy(&grid_word, payload, sizeof grid_word);
        const Grid grid = unpack_grid(grid_word);
        int64_t i = begin;
        for (; i + kChunk <= end; i += kChunk) {
            decode_chunk<kBits, kAdd>(packed + i / 8 * kBits, out + i, grid);
        }
        if (i == end) continue;
        float rest[kChunk] = {};
        uint8_t rest_packed[kChunk] = {};
        std::copy(out + i, out + end, rest);
        memcpy(rest_packed, packed + i / 8 * kBits, static_cast<size_t>(((end - i) * kBits + 7) / 8));
        decode_chunk<kBits, kAdd>(rest_packed, rest, grid);
        std::copy(rest, rest + (end - i), out + i);
    }
}

}  // namespace

CGX_MULTIVERSION
void qsgd_encode(const float* grad, int64_t numel, uint8_t* out, int bits, int64_t bucket_size, uint32_t key,
                 bool stochastic) {
    const Rounding rounding{make_random_key(key), stochastic};
    switch (bits) {
        case 1:
            return encode<1>(grad, numel, out, bucket_size, rounding);
        case 2:
            return encode<2>(grad, numel, out, bucket_size, rounding);
        case 3:
            return encode<3>(grad, numel, out, bucket_size, rounding);
        case 4:
            return encode<4>(grad, numel, out, bucket_size, rounding);
        case 5:
            return encode<5>(grad, numel, out, bucket_size, rounding);
        case 6:
            return encode<6>(grad, numel, out, bucket_size, rounding);
        case 7:
            return encode<7>(grad, numel, out, bucket_size, rounding);
        default:
            return encode<8>(grad, numel, out, bucket_size, rounding);
    }
}

namespace {

template <bool kAdd>
CGX_INLINE void decode_bits(const uint8_t* payload, float* out, int64_t numel, int bits,
                            int64_t bucket_size) {
    switch (bits) {
        case 1:
            return decode<1, kAdd>(payload, out, numel, bucket_size);
        case 2:
            return decode<2, kAdd>(payload, out, numel, bucket_size);
        case 3:
            return decode<3, kAdd>(payload, out, numel, bucket_size);
        case 4:
            return decode<4, kAdd>(payload, out, numel, bucket_size);
        case 5:
            return decode<5, kAdd>(payload, out, numel, bucket_size);
        case 6:
            return decode<6, kAdd>(payload, out, numel, bucket_size);
        case 7:
            return decode<7, kAdd>(payload, out, numel, bucket_size);
        default:
            return decode<8, kAdd>(payload, out, numel, bucket_size);
    }
}

}  // namespace

CGX_MULTIVERSION
void qsgd_decode(const uint8_t* payload, float* out, int64_t numel, int bits, int64_t bucket_size, bool add) {
    if (add) return decode_bits<true>(payload, out, numel, bits, bucket_size);
    decode_bits<false>(payload, out, numel, bits, bucket_size);
}

}  // namespace cgx
