// The one-bit codecs on the walk of bucket_loops.h: a first pass finds signs and sums, a second one the means
// and what is not sent.
#pragma once

#include "bucket_loops.h"
#include "sign.h"

namespace cgx {

struct SignEncoding : BucketEncoding {
    int kind;
};

struct SignDecoding : BucketDecoding {
    int kind;
};

// The buckets of [first, last). Defined only where CGX_HAS_X86_LOOPS is.
void walk_avx2(const SignEncoding& encoding, int64_t first, int64_t last);
void walk_avx2(const SignDecoding& decoding, int64_t first, int64_t last);
void walk_avx512(const SignEncoding& encoding, int64_t first, int64_t last);
void walk_avx512(const SignDecoding& decoding, int64_t first, int64_t last);

// The sums that a bucket's means come from.
struct SignSums {
    float low;
    float high;  // for EF-SignSGD of all magnitudes
    int64_t num_high;
};

// The chunks of a bucket: writes a bit per element, and adds elements up.
template <typename Isa, int kKind>
struct SignChunks {
    Fed fed;
    typename Isa::template Sums<kKind> sums;
    int64_t num_high = 0;

    CGX_INLINE explicit SignChunks(Fed given) : fed(given) {}

    CGX_INLINE void encode(int64_t i, uint8_t* packed) {
        if constexpr (Isa::kPrefetches) prefetch_chunk(fed.from(i));
        const uint64_t bits = sums.add_chunk(fed.from(i), kChunk / kLanes);
        store<uint64_t>(packed, bits);
        num_high += std::popcount(bits);
    }

    CGX_INLINE void encode_rest(int64_t i, int64_t count, uint8_t* packed) {
        float x[kChunk];
        load_rest(fed.from(i), count, 0.0f, x);
        const uint64_t real = (uint64_t{1} << count) - 1;
        const uint64_t bits = sums.add_chunk({x, nullptr}, count > kLanes ? 2 : 1) & real;
        memcpy(packed, &bits, static_cast<size_t>((count + 7) / 8));
        num_high += std::popcount(bits);
    }
};

template <typename Isa, int kKind>
struct SignEncoder {
    static constexpr int kHeadBytes = mean_bytes(kKind);

    const SignEncoding& encoding;
    SignSums sums[kBatch] = {};

    CGX_INLINE explicit SignEncoder(const SignEncoding& given) : encoding(given) {}

    CGX_INLINE void measure(int64_t begin, int64_t end, uint8_t* packed) {
        for (int j = 0; begin < end; ++j, begin += encoding.bucket_size) {
            sums[j] = encode_signs(begin, std::min(begin + encoding.bucket_size, end), packed);
        }
    }

    CGX_INLINE SignSums encode_signs(int64_t begin, int64_t end, uint8_t* packed) const {
        SignChunks<Isa, kKind> chunks(encoding.fed());
        encode_chunks<1>(chunks, begin, end, packed);
        // Whole rows that a short bucket lacks count as +0, which turns -0 into +0.
        const int64_t num_rows = (end - begin + kLanes - 1) / kLanes;
        if (num_rows < (encoding.bucket_size + kLanes - 1) / kLanes) chunks.sums.add_zeros();
        return {chunks.sums.total_low(), chunks.sums.total_high(), chunks.num_high};
    }

    CGX_INLINE void finish(int j, int64_t begin, int64_t end, uint8_t* head, uint8_t*) const {
        const int64_t count = end - begin;
        Means means;
        if constexpr (kKind == kOneBit) {
            means = {make_mean(sums[j].low, count - sums[j].num_high),
                     make_mean(sums[j].high, sums[j].num_high)};
            memcpy(head, &means.low, sizeof means.low);
            memcpy(head + 4, &means.high, sizeof means.high);
        } else {
            means = means_around_zero(make_mean(sums[j].high, count));
            memcpy(head, &means.high, sizeof means.high);
        }
        const Next next = encoding.next().from(begin);
        if (next.data != nullptr) Isa::write_next(encoding.fed().from(begin), count, means, next);
    }
};

template <typename Isa, int kKind>
struct SignDecoder {
    static constexpr int kBits = 1;

    static CGX_INLINE int head_bytes() { return mean_bytes(kKind); }

    static CGX_INLINE Means load_head(const uint8_t* head) {
        float mean[2];
        memcpy(mean, head, mean_bytes(kKind));
        return kKind == kOneBit ? Means{mean[0], mean[1]} : means_around_zero(mean[0]);
    }

    template <bool kAdd>
    static CGX_INLINE void decode_chunk(const uint8_t* packed, float* out, Means values) {
        Isa::template decode_chunk<kAdd>(load<uint64_t>(packed), out, values);
    }
};

template <typename Isa, int kKind>
CGX_INLINE void encode_kind(const SignEncoding& encoding, int64_t first, int64_t last) {
    SignEncoder<Isa, kKind> encoder(encoding);
    encode_buckets(encoder, encoding, first, last);
}

template <typename Isa>
CGX_INLINE void walk(const SignEncoding& encoding, int64_t first, int64_t last) {
    if (encoding.kind == kOneBit) return encode_kind<Isa, kOneBit>(encoding, first, last);
    encode_kind<Isa, kEfSignSgd>(encoding, first, last);
}

template <typename Isa>
CGX_INLINE void walk(const SignDecoding& decoding, int64_t first, int64_t last) {
    if (decoding.kind == kOneBit) {
        return decode_buckets(SignDecoder<Isa, kOneBit>{}, decoding, first, last);
    }
    decode_buckets(SignDecoder<Isa, kEfSignSgd>{}, decoding, first, last);
}

}  // namespace cgx
