// qsgd: quantization and bit packing, some buckets at a time while they are in the L1 cache.
#include "bucket_dispatch.h"
#include "qsgd_loops.h"

namespace cgx {
namespace {

// Plain loops, which the compiler vectorizes.
class Portable {
  public:
    explicit Portable(const QsgdEncoding& encoding) : key_(encoding.key), stochastic_(encoding.stochastic) {}

    static CGX_INLINE void find_range(Fed fed, int64_t count, float& min, float& max) {
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int64_t i = 0; i < count; ++i) {
            const int32_t ordered = flip_negative(static_cast<int32_t>(float_bits(fed[i])));
            low = ordered < low ? ordered : low;
            high = ordered > high ? ordered : high;
        }
        min = bits_float(static_cast<uint32_t>(flip_negative(low)));
        max = bits_float(static_cast<uint32_t>(flip_negative(high)));
    }

    // Returns the bits of the largest magnitude.
    static CGX_INLINE uint32_t find_largest(Fed fed, int64_t count) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t magnitude = float_bits(fed[i]) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        return largest;
    }

    static CGX_INLINE float sum_squares(Fed fed, int64_t count, float down) {
        LaneSum sum;
        for (int64_t i = 0; i < count; i += kLanes) {
            float row[kLanes] = {};
            const int64_t num_real = std::min<int64_t>(count - i, kLanes);
            for (int64_t j = 0; j < num_real; ++j) row[j] = (fed[i + j] * down) * (fed[i + j] * down);
            sum.add(row);
        }
        return sum.total();
    }

    // Encodes the chunk `fed`, which begins with element i of the gradient, into out (kChunk * kBits / 8,).
    // Writes what `out` does not hold to next.data (kChunk,), which may be null.
    template <int kBits, bool kAroundZero>
    CGX_INLINE void encode_chunk(Fed fed, Next next, uint8_t* out, Scale scale, int64_t i) const {
        constexpr int32_t kTop = top_level(kBits, kAroundZero);
        uint8_t level[kChunk];
        if (stochastic_) {
            uint32_t word[kChunk / 2];
            uint16_t half[kChunk];
            const uint32_t counter = static_cast<uint32_t>(i / 2);
            for (uint32_t j = 0; j < kChunk / 2; ++j) word[j] = random_bits(key_, counter + j);
            memcpy(half, word, sizeof half);
            for (int j = 0; j < kChunk; ++j) {
                const float u = static_cast<float>(static_cast<int32_t>(half[j])) * 0x1p-16f;
                level[j] = static_cast<uint8_t>(
                    quantize<kAroundZero>(fed[j], scale.grid.lo, scale.inverse, u, kTop));
            }
        } else {
            for (int j = 0; j < kChunk; ++j) {
                level[j] = static_cast<uint8_t>(
                    quantize<kAroundZero>(fed[j], scale.grid.lo, scale.inverse, 0.5f, kTop));
            }
        }
        if (next.data != nullptr) {
            for (int j = 0; j < kChunk; ++j) next.data[j] = fed[j] - dequantize(level[j], scale.grid);
        }
        for (int j = 0; j < kChunk / 8; ++j) {
            store_bytes<kBits>(out + kBits * j, pack_eight<kBits>(load<uint64_t>(level + 8 * j)));
        }
    }

    // Decodes packed (kChunk * kBits / 8,) to out (kChunk,), or adds it.
    template <int kBits, bool kAdd>
    static CGX_INLINE void decode_chunk(const uint8_t* packed, float* out, Grid grid) {
        uint8_t level[kChunk];
        for (int i = 0; i < kChunk / 8; ++i) {
            store<uint64_t>(level + 8 * i, unpack_eight<kBits>(load_bytes<kBits>(packed + kBits * i)));
        }
        for (int i = 0; i < kChunk; ++i) {
            const float x = dequantize(level[i], grid);
            out[i] = kAdd ? out[i] + x : x;
        }
    }

  private:
    RandomKey key_;
    bool stochastic_;
};

}  // namespace

void qsgd_encode(Input input, uint8_t* out, int bits, int64_t bucket_size, int grid, uint32_t key,
                 bool stochastic, int num_threads) {
    const QsgdEncoding encoding{{input, out, bucket_size}, bits, grid, make_random_key(key), stochastic};
    run_buckets<Portable>(encoding, num_threads);
}

void qsgd_decode(const uint8_t* payload, float* out, int64_t numel, int bits, int64_t bucket_size, int grid,
                 bool add, int num_threads) {
    const QsgdDecoding decoding{{payload, out, numel, bucket_size, add}, bits, grid};
    run_buckets<Portable>(decoding, num_threads);
}

}  // namespace cgx
