// One-bit codecs. A first pass over some buckets finds sums and signs. A second one writes what is not sent
// while the buckets are in the L1 cache.
#include "bucket_dispatch.h"
#include "qsgd.h"
#include "sign_loops.h"

namespace cgx {
namespace {

// Plain loops, which the compiler vectorizes.
struct Portable {
    static constexpr bool kPrefetches = true;

    template <int kKind>
    struct Sums {
        LaneSum low, high;

        // Adds the first num_rows rows of kLanes elements; returns a bit for each of kChunk elements.
        CGX_INLINE uint64_t add_chunk(Fed fed, int num_rows) {
            uint8_t sign[kChunk];
            for (int i = 0; i < kChunk; ++i) sign[i] = is_positive(fed[i]);
            for (int row = 0; row < num_rows; ++row) add_row(fed.from(row * kLanes));
            uint64_t bits = 0;
            for (int i = 0; i < kChunk / 8; ++i) {
                bits |= pack_eight<1>(load<uint64_t>(sign + 8 * i)) << 8 * i;
            }
            return bits;
        }

        CGX_INLINE void add_row(Fed fed) {
            float row[kLanes];
            if constexpr (kKind == kEfSignSgd) {
                for (int i = 0; i < kLanes; ++i) row[i] = std::fabs(fed[i]);
                high.add(row);
                return;
            }
            for (int i = 0; i < kLanes; ++i) row[i] = is_positive(fed[i]) ? 0.0f : fed[i];
            low.add(row);
            for (int i = 0; i < kLanes; ++i) row[i] = is_positive(fed[i]) ? fed[i] : 0.0f;
            high.add(row);
        }

        CGX_INLINE void add_zeros() {
            const float row[kLanes] = {};
            low.add(row);
            high.add(row);
        }

        CGX_INLINE float total_low() { return low.total(); }
        CGX_INLINE float total_high() { return high.total(); }
    };

    // Sets next.data (count,) to the error-fed gradient minus what is sent.
    static CGX_INLINE void write_next(Fed fed, int64_t count, Means means, Next next) {
        for (int64_t i = 0; i < count; ++i) {
            const float x = fed[i];
            next.data[i] = x - choose_mean(is_positive(x), means);
        }
    }

    // Decodes a bit per element to out (kChunk,), or adds it.
    template <bool kAdd>
    static CGX_INLINE void decode_chunk(uint64_t bits, float* out, Means means) {
        uint8_t sign[kChunk];
        for (int i = 0; i < kChunk / 8; ++i)
            store<uint64_t>(sign + 8 * i, unpack_eight<1>(bits >> 8 * i & 0xFF));
        for (int i = 0; i < kChunk; ++i) {
            const float x = choose_mean(sign[i] != 0, means);
            out[i] = kAdd ? out[i] + x : x;
        }
    }
};

}  // namespace

void sign_encode(Input input, uint8_t* out, int64_t bucket_size, int kind, int num_threads) {
    const SignEncoding encoding{{input, out, bucket_size}, kind};
    run_buckets<Portable>(encoding, num_threads);
}

void sign_decode(const uint8_t* payload, float* out, int64_t numel, int64_t bucket_size, int kind, bool add,
                 int num_threads) {
    const SignDecoding decoding{{payload, out, numel, bucket_size, add}, kind};
    run_buckets<Portable>(decoding, num_threads);
}

}  // namespace cgx
