// The walk over the buckets of a message, for every codec that sends all elements. A codec adds the
// arithmetic of one bucket or chunk; its loops over elements come from an instruction set, `Isa`.
//
// A message is a head per bucket (a grid or means), then `kBits` bits per element.
#pragma once

#include "chunks.h"
#include "kernels.h"
#include "streaming.h"

namespace cgx {

// Part of every codec's encoding: what to read and where to write.
struct BucketEncoding {
    Input input;
    uint8_t* out;  // (payload bytes,)
    int64_t bucket_size;

    CGX_INLINE int64_t numel() const { return input.numel; }
    CGX_INLINE Fed fed() const { return {input.grad, input.residual}; }
    CGX_INLINE Next next() const { return {input.next, streams_next()}; }

    // Chunks must begin at multiples of the widest vector, 64 bytes.
    CGX_INLINE bool streams_next() const { return bucket_size % 16 == 0 && can_stream(input, 64); }
};

// Part of every codec's decoding.
struct BucketDecoding {
    const uint8_t* payload;
    float* out;  // (num_elements,)
    int64_t num_elements;
    int64_t bucket_size;
    bool add;

    CGX_INLINE int64_t numel() const { return num_elements; }
};

// Bytes of all heads, which come before the packed elements.
CGX_INLINE int64_t heads_bytes(int head_bytes, int64_t numel, int64_t bucket_size) {
    return head_bytes * ((numel + bucket_size - 1) / bucket_size);
}

// Calls chunks.encode(i, packed) per kChunk elements of [begin, end), i being the first, and
// chunks.encode_rest(i, count, packed) for those left over.
template <int kBits, typename Chunks>
CGX_INLINE void encode_chunks(Chunks& chunks, int64_t begin, int64_t end, uint8_t* packed) {
    int64_t i = begin;
    for (; i + kChunk <= end; i += kChunk) chunks.encode(i, packed + i / 8 * kBits);
    if (i < end) chunks.encode_rest(i, end - i, packed + i / 8 * kBits);
}

// Encodes the buckets of [first, last), batch by batch. `Codec` has kHeadBytes and two passes over a batch,
// so that the second one finds it in the L1 cache:
//   measure(begin, end, packed)                 the buckets of [begin, end), at most kBatch
//   finish(j, begin, end, head, packed)         bucket j of the batch, [begin, end), and its head
template <typename Codec>
CGX_INLINE void encode_buckets(Codec& codec, const BucketEncoding& encoding, int64_t first, int64_t last) {
    const int64_t bucket_size = encoding.bucket_size, step = batch_numel(bucket_size);
    uint8_t* head = encoding.out + Codec::kHeadBytes * (first / bucket_size);
    uint8_t* packed = encoding.out + heads_bytes(Codec::kHeadBytes, encoding.numel(), bucket_size);
    for (int64_t batch = first; batch < last; batch += step) {
        const int64_t batch_end = std::min(batch + step, last);
        codec.measure(batch, batch_end, packed);
        int j = 0;
        for (int64_t begin = batch; begin < batch_end; begin += bucket_size, ++j, head += Codec::kHeadBytes) {
            codec.finish(j, begin, std::min(begin + bucket_size, batch_end), head, packed);
        }
    }
}

// Decodes the buckets of [first, last). `Codec` has kBits and
//   head_bytes()
//   load_head(head)                             the values that a bucket's elements decode to
//   decode_chunk<kAdd>(packed, out, values)     kChunk elements
template <bool kAdd, typename Codec>
CGX_INLINE void decode_buckets(const Codec& codec, const BucketDecoding& decoding, int64_t first,
                               int64_t last) {
    constexpr int kBits = Codec::kBits;
    const int64_t bucket_size = decoding.bucket_size;
    const uint8_t* head = decoding.payload + codec.head_bytes() * (first / bucket_size);
    const uint8_t* packed = decoding.payload + heads_bytes(codec.head_bytes(), decoding.numel(), bucket_size);
    float* out = decoding.out;
    for (int64_t begin = first; begin < last; begin += bucket_size, head += codec.head_bytes()) {
        const int64_t end = std::min(begin + bucket_size, last);
        const auto values = codec.load_head(head);
        int64_t i = begin;
        for (; i + kChunk <= end; i += kChunk) {
            Codec::template decode_chunk<kAdd>(packed + i / 8 * kBits, out + i, values);
        }
        if (i == end) continue;
        float rest[kChunk] = {};
        uint8_t bytes[kChunk] = {};
        memcpy(bytes, packed + i / 8 * kBits, static_cast<size_t>(((end - i) * kBits + 7) / 8));
        Codec::template decode_chunk<false>(bytes, rest, values);
        for (int64_t j = 0; j < end - i; ++j) out[i + j] = kAdd ? out[i + j] + rest[j] : rest[j];
    }
}

template <typename Codec>
CGX_INLINE void decode_buckets(const Codec& codec, const BucketDecoding& decoding, int64_t first,
                               int64_t last) {
    if (decoding.add) return decode_buckets<true>(codec, decoding, first, last);
    decode_buckets<false>(codec, decoding, first, last);
}

}  // namespace cgx
