// qsgd on the walk of bucket_loops.h: the grid of a bucket, and its chunks at that grid.
#pragma once

#include "bucket_loops.h"
#include "qsgd.h"
#include "random.h"

namespace cgx {

struct QsgdEncoding : BucketEncoding {
    int bits;
    int grid;
    RandomKey key;
    bool stochastic;
};

struct QsgdDecoding : BucketDecoding {
    int bits;
    int grid;
};

// The buckets of [first, last). Defined only where CGX_HAS_X86_LOOPS is.
void walk_avx2(const QsgdEncoding& encoding, int64_t first, int64_t last);
void walk_avx2(const QsgdDecoding& decoding, int64_t first, int64_t last);
void walk_avx512(const QsgdEncoding& encoding, int64_t first, int64_t last);
void walk_avx512(const QsgdDecoding& decoding, int64_t first, int64_t last);

// A bucket's grid and the inverse of its scale, which is 0 if all its levels are the same.
struct Scale {
    Grid grid;
    float inverse;
};

// The grids of a batch of buckets, and the inverses of their scales.
struct Grids {
    float lo[kBatch] = {};
    float scale[kBatch] = {};
    float inverse[kBatch] = {};
};

// Finds the grids of the buckets of [begin, end), at most kBatch.
template <typename Isa, bool kAroundZero>
CGX_NOINLINE void find_grids(const QsgdEncoding& encoding, int64_t begin, int64_t end, Grids& grids) {
    float low[kBatch] = {}, high[kBatch] = {};
    for (int j = 0; begin < end; ++j, begin += encoding.bucket_size) {
        const int64_t count = std::min(encoding.bucket_size, end - begin);
        const Fed fed = encoding.fed().from(begin);
        if constexpr (!kAroundZero) {
            Isa::find_range(fed, count, low[j], high[j]);
        } else {
            const uint32_t largest = Isa::find_largest(fed, count);
            high[j] = bits_float(largest);
            if (encoding.grid == kL2) {
                const NormScale norm = norm_scale(largest);
                high[j] = std::sqrt(Isa::sum_squares(fed, count, norm.down)) * norm.up;
            }
        }
    }
    const int32_t top = top_level(encoding.bits, kAroundZero);
    for (int j = 0; j < kBatch; ++j) {
        const Grid grid = kAroundZero ? make_grid_around_zero(high[j], top) : make_grid(low[j], high[j], top);
        grids.lo[j] = grid.lo;
        grids.scale[j] = grid.scale;
        grids.inverse[j] = inverse_scale(grid);
    }
}

// Encodes elements [i, i + count) of a bucket into `packed`: less than a chunk, or at an unusable scale.
template <typename Isa, int kBits, bool kAroundZero>
CGX_NOINLINE void encode_rest(const Isa& isa, const QsgdEncoding& encoding, int64_t i, int64_t count,
                              Scale scale, uint8_t* packed) {
    const Fed fed = encoding.fed().from(i);
    Scale used = scale;
    // Zeros at a scale of 0 get the level that stands for zero where the scale is unusable.
    if (scale.inverse == 0.0f) used.grid.lo = 0.0f;
    float x[kChunk];
    uint8_t bytes[kChunk];
    load_rest(fed, scale.inverse == 0.0f ? 0 : count, used.grid.lo, x);
    isa.template encode_chunk<kBits, kAroundZero>({x, nullptr}, {}, bytes, used, i);
    const int64_t num_bytes = count * kBits / 8;
    if (count % 8 != 0) bytes[num_bytes] &= static_cast<uint8_t>((1 << count * kBits % 8) - 1);
    memcpy(packed, bytes, static_cast<size_t>((count * kBits + 7) / 8));
    float* next = encoding.input.next;
    if (next == nullptr) return;
    Isa::template decode_chunk<kBits, false>(bytes, x, scale.grid);
    for (int64_t j = 0; j < count; ++j) next[i + j] = fed[j] - x[j];
}

// The chunks of a bucket whose grid is known. Not `encode` at an unusable scale.
template <typename Isa, int kBits, bool kAroundZero>
struct QsgdChunks {
    const Isa& isa;
    const QsgdEncoding& encoding;
    Scale scale;

    CGX_INLINE void encode(int64_t i, uint8_t* packed) const {
        const Fed fed = encoding.fed().from(i);
        prefetch_chunk(fed);
        isa.template encode_chunk<kBits, kAroundZero>(fed, encoding.next().from(i), packed, scale, i);
    }

    CGX_INLINE void encode_rest(int64_t i, int64_t count, uint8_t* packed) const {
        cgx::encode_rest<Isa, kBits, kAroundZero>(isa, encoding, i, count, scale, packed);
    }
};

template <typename Isa, int kBits, bool kAroundZero>
struct QsgdEncoder {
    static constexpr int kHeadBytes = grid_bytes(kAroundZero ? kLinf : kMaxMin);

    const QsgdEncoding& encoding;
    Isa isa;
    Grids grids;

    CGX_INLINE explicit QsgdEncoder(const QsgdEncoding& given) : encoding(given), isa(given) {}

    CGX_INLINE void measure(int64_t begin, int64_t end, uint8_t*) {
        find_grids<Isa, kAroundZero>(encoding, begin, end, grids);
    }

    CGX_INLINE void finish(int j, int64_t begin, int64_t end, uint8_t* head, uint8_t* packed) const {
        const Scale scale{{grids.lo[j], grids.scale[j]}, grids.inverse[j]};
        if constexpr (kAroundZero) {
            store<uint16_t>(head, pack_grid_around_zero(scale.grid));
        } else {
            store<uint32_t>(head, pack_grid(scale.grid));
        }
        const QsgdChunks<Isa, kBits, kAroundZero> chunks{isa, encoding, scale};
        if (scale.inverse != 0.0f) return encode_chunks<kBits>(chunks, begin, end, packed);
        for (int64_t i = begin; i < end; i += kChunk)
            chunks.encode_rest(i, std::min<int64_t>(end - i, kChunk), packed + i / 8 * kBits);
    }
};

template <typename Isa, int kBitsGiven>
struct QsgdDecoder {
    static constexpr int kBits = kBitsGiven;

    int grid;

    CGX_INLINE int head_bytes() const { return grid_bytes(grid); }

    CGX_INLINE Grid load_head(const uint8_t* head) const {
        if (grid == kMaxMin) return unpack_grid(static_cast<uint32_t>(load<uint32_t>(head)));
        return unpack_grid_around_zero(static_cast<uint16_t>(load<uint16_t>(head)), top_level(kBits, true));
    }

    template <bool kAdd>
    static CGX_INLINE void decode_chunk(const uint8_t* packed, float* out, Grid values) {
        Isa::template decode_chunk<kBits, kAdd>(packed, out, values);
    }
};

// Finds the loops for the number of bits, from kBits on. One bit has no grid around zero.
template <typename Isa, bool kAroundZero, int kBits = 1>
CGX_INLINE void encode_bits(const QsgdEncoding& encoding, int64_t first, int64_t last) {
    if constexpr (kBits < 8) {
        if (encoding.bits > kBits) {
            return encode_bits<Isa, kAroundZero, kBits + 1>(encoding, first, last);
        }
    }
    QsgdEncoder<Isa, kBits, kAroundZero && kBits != 1> encoder(encoding);
    encode_buckets(encoder, encoding, first, last);
}

template <typename Isa, int kBits = 1>
CGX_INLINE void decode_bits(const QsgdDecoding& decoding, int64_t first, int64_t last) {
    if constexpr (kBits < 8) {
        if (decoding.bits > kBits) return decode_bits<Isa, kBits + 1>(decoding, first, last);
    }
    decode_buckets(QsgdDecoder<Isa, kBits>{decoding.grid}, decoding, first, last);
}

template <typename Isa>
CGX_INLINE void walk(const QsgdEncoding& encoding, int64_t first, int64_t last) {
    if (encoding.grid == kMaxMin) return encode_bits<Isa, false>(encoding, first, last);
    encode_bits<Isa, true>(encoding, first, last);
}

template <typename Isa>
CGX_INLINE void walk(const QsgdDecoding& decoding, int64_t first, int64_t last) {
    decode_bits<Isa>(decoding, first, last);
}

}  // namespace cgx
