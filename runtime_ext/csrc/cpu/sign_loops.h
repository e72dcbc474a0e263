// The walk over the buckets of a one-bit message, for any instruction set. `Isa` has the loops over elements.
#pragma once

#include "chunks.h"
#include "kernels.h"
#include "sign.h"

namespace cgx {

struct SignEncoder {
    Input input;
    uint8_t* out;
    int64_t bucket_size;
    int kind;
};

struct SignDecoder {
    const uint8_t* payload;
    float* out;
    int64_t numel;
    int64_t bucket_size;
    int kind;
    bool add;
};

// The buckets of [first, last). Where CGX_HAS_AVX2 only.
void sign_encode_avx2(const SignEncoder& encoder, int64_t first, int64_t last);
void sign_decode_avx2(const SignDecoder& decoder, int64_t first, int64_t last);

// What a bucket's means come from.
struct SignSums {
    float low;
    float high;  // of EF-SignSGD all magnitudes
    int64_t num_high;
};

// Sums up a bucket, and writes to packed (ceil(count / 8),) a bit for each element.
template <typename Isa, int kKind>
CGX_INLINE SignSums encode_bucket(Fed fed, int64_t count, int64_t bucket_size, uint8_t* packed) {
    typename Isa::template Sums<kKind> sums;
    int64_t num_high = 0, i = 0;
    for (; i + kChunk <= count; i += kChunk) {
        prefetch_chunk(fed.grad + i);
        if (fed.residual != nullptr) prefetch_chunk(fed.residual + i);
        const uint64_t bits = sums.add_chunk(fed.from(i), kChunk / kLanes);
        store<uint64_t>(packed + i / 8, bits);
        num_high += std::popcount(bits);
    }
    if (i < count) {
        const int64_t num_left = count - i;
        float x[kChunk];
        load_rest(fed.from(i), num_left, 0.0f, x);
        const uint64_t real = (uint64_t{1} << num_left) - 1;
        const uint64_t bits = sums.add_chunk({x, nullptr}, num_left > kLanes ? 2 : 1) & real;
        memcpy(packed + i / 8, &bits, static_cast<size_t>((num_left + 7) / 8));
        num_high += std::popcount(bits);
    }
    // Whole rows that a short bucket lacks count as +0, which turns -0 into +0.
    if ((count + kLanes - 1) / kLanes < (bucket_size + kLanes - 1) / kLanes) sums.add_zeros();
    return {sums.total_low(), sums.total_high(), num_high};
}

template <typename Isa, int kKind>
CGX_INLINE void encode_part(const SignEncoder& encoder, int64_t first, int64_t last) {
    const Input& input = encoder.input;
    const Fed fed{input.grad, input.residual};
    const int64_t bucket_size = encoder.bucket_size;
    uint8_t* words = encoder.out + mean_bytes(kKind) * (first / bucket_size);
    uint8_t* packed = encoder.out + mean_bytes(kKind) * ((input.numel + bucket_size - 1) / bucket_size);
    const int64_t step = batch_numel(bucket_size);
    SignSums sums[kBatch] = {};
    for (int64_t begin = first; begin < last; begin += step) {
        const int64_t end = std::min(begin + step, last);
        int num_buckets = 0;
        for (int64_t i = begin; i < end; i += bucket_size, ++num_buckets) {
            sums[num_buckets] = encode_bucket<Isa, kKind>(fed.from(i), std::min(bucket_size, end - i),
                                                          bucket_size, packed + i / 8);
        }
        int64_t i = begin;
        for (int j = 0; j < num_buckets; ++j, i += bucket_size, words += mean_bytes(kKind)) {
            const int64_t count = std::min(bucket_size, end - i);
            Means means;
            if constexpr (kKind == kOneBit) {
                means = {make_mean(sums[j].low, count - sums[j].num_high),
                         make_mean(sums[j].high, sums[j].num_high)};
                memcpy(words, &means.low, sizeof means.low);
                memcpy(words + 4, &means.high, sizeof means.high);
            } else {
                means = means_around_zero(make_mean(sums[j].high, count));
                memcpy(words, &means.high, sizeof means.high);
            }
            if (input.next != nullptr) Isa::write_next(fed.from(i), count, means, input.next + i);
        }
    }
}

template <typename Isa, int kKind, bool kAdd>
CGX_INLINE void decode_part(const SignDecoder& decoder, int64_t first, int64_t last) {
    const int64_t bucket_size = decoder.bucket_size;
    const uint8_t* words = decoder.payload + mean_bytes(kKind) * (first / bucket_size);
    const uint8_t* packed =
        decoder.payload + mean_bytes(kKind) * ((decoder.numel + bucket_size - 1) / bucket_size);
    float* out = decoder.out;
    for (int64_t begin = first; begin < last; begin += bucket_size, words += mean_bytes(kKind)) {
        const int64_t end = std::min(begin + bucket_size, last);
        float word[2];
        memcpy(word, words, mean_bytes(kKind));
        const Means means = kKind == kOneBit ? Means{word[0], word[1]} : means_around_zero(word[0]);
        int64_t i = begin;
        for (; i + kChunk <= end; i += kChunk) {
            Isa::template decode_chunk<kAdd>(load<uint64_t>(packed + i / 8), out + i, means);
        }
        for (; i < end; ++i) {
            const float x = choose_mean(packed[i / 8] >> i % 8 & 1, means);
            out[i] = kAdd ? out[i] + x : x;
        }
    }
}

template <typename Isa>
CGX_INLINE void encode_part(const SignEncoder& encoder, int64_t first, int64_t last) {
    if (encoder.kind == kOneBit) return encode_part<Isa, kOneBit>(encoder, first, last);
    encode_part<Isa, kEfSignSgd>(encoder, first, last);
}

template <typename Isa, int kKind>
CGX_INLINE void decode_kind(const SignDecoder& decoder, int64_t first, int64_t last) {
    if (decoder.add) return decode_part<Isa, kKind, true>(decoder, first, last);
    decode_part<Isa, kKind, false>(decoder, first, last);
}

template <typename Isa>
CGX_INLINE void decode_part(const SignDecoder& decoder, int64_t first, int64_t last) {
    if (decoder.kind == kOneBit) return decode_kind<Isa, kOneBit>(decoder, first, last);
    decode_kind<Isa, kEfSignSgd>(decoder, first, last);
}

}  // namespace cgx
