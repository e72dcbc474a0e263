// The walk over the buckets of a qsgd message, for any instruction set. `Isa` has the loops over elements.
#pragma once

#include "chunks.h"
#include "kernels.h"
#include "qsgd.h"
#include "random.h"

namespace cgx {

struct QsgdEncoder {
    Input input;
    uint8_t* out;
    int bits;
    int64_t bucket_size;
    int grid;
    RandomKey key;
    bool stochastic;
};

struct QsgdDecoder {
    const uint8_t* payload;
    float* out;
    int64_t numel;
    int bits;
    int64_t bucket_size;
    int grid;
    bool add;
};

// The buckets of [first, last). Where CGX_HAS_AVX2 only.
void qsgd_encode_avx2(const QsgdEncoder& encoder, int64_t first, int64_t last);
void qsgd_decode_avx2(const QsgdDecoder& decoder, int64_t first, int64_t last);

// A bucket's grid and the inverse of its scale, which is 0 if all its levels are the same.
struct Scale {
    Grid grid;
    float inverse;
};

struct Grids {
    float lo[kBatch] = {};
    float scale[kBatch] = {};
    float inverse[kBatch] = {};
};

// The grids of the buckets of [begin, end), at most kBatch.
template <typename Isa, bool kAroundZero>
CGX_NOINLINE void find_grids(const QsgdEncoder& encoder, int64_t begin, int64_t end, Grids& grids) {
    float low[kBatch] = {}, high[kBatch] = {};
    const Fed all{encoder.input.grad, encoder.input.residual};
    for (int j = 0; begin < end; ++j, begin += encoder.bucket_size) {
        const int64_t count = std::min(encoder.bucket_size, end - begin);
        const Fed fed = all.from(begin);
        if constexpr (!kAroundZero) {
            Isa::find_range(fed, count, low[j], high[j]);
        } else {
            const uint32_t largest = Isa::find_largest(fed, count);
            high[j] = bits_float(largest);
            if (encoder.grid == kL2) {
                const NormScale norm = norm_scale(largest);
                high[j] = std::sqrt(Isa::sum_squares(fed, count, norm.down)) * norm.up;
            }
        }
    }
    const int32_t top = top_level(encoder.bits, kAroundZero);
    for (int j = 0; j < kBatch; ++j) {
        const Grid grid = kAroundZero ? make_grid_around_zero(high[j], top) : make_grid(low[j], high[j], top);
        grids.lo[j] = grid.lo;
        grids.scale[j] = grid.scale;
        grids.inverse[j] = inverse_scale(grid);
    }
}

// Encodes elements [i, i + count) of a bucket, less than a chunk or with an unusable scale, into `packed`.
template <typename Isa, int kBits, bool kAroundZero>
CGX_NOINLINE void encode_rest(const Isa& isa, const QsgdEncoder& encoder, int64_t i, int64_t count,
                              Scale scale, uint8_t* packed) {
    const Fed fed = Fed{encoder.input.grad, encoder.input.residual}.from(i);
    Scale used = scale;
    // Zeros at a scale of 0 get the level that is meant where the scale is unusable.
    if (scale.inverse == 0.0f) used.grid.lo = 0.0f;
    float x[kChunk];
    uint8_t bytes[kChunk];
    load_rest(fed, scale.inverse == 0.0f ? 0 : count, used.grid.lo, x);
    isa.template encode_chunk<kBits, kAroundZero>({x, nullptr}, nullptr, bytes, used, i);
    const int64_t num_bytes = count * kBits / 8;
    if (count % 8 != 0) bytes[num_bytes] &= static_cast<uint8_t>((1 << count * kBits % 8) - 1);
    memcpy(packed, bytes, static_cast<size_t>((count * kBits + 7) / 8));
    if (encoder.input.next == nullptr) return;
    Isa::template decode_chunk<kBits, false>(bytes, x, scale.grid);
    for (int64_t j = 0; j < count; ++j) encoder.input.next[i + j] = fed[j] - x[j];
}

template <typename Isa, int kBits, bool kAroundZero>
CGX_INLINE void encode_bucket(const Isa& isa, const QsgdEncoder& encoder, int64_t begin, int64_t end,
                              Scale scale, uint8_t* packed) {
    const Input& input = encoder.input;
    const Fed fed{input.grad, input.residual};
    for (int64_t i = begin; i < end; i += kChunk) {
        const int64_t count = std::min<int64_t>(end - i, kChunk);
        if (count < kChunk || scale.inverse == 0.0f) {
            encode_rest<Isa, kBits, kAroundZero>(isa, encoder, i, count, scale, packed + i / 8 * kBits);
            continue;
        }
        float* next = input.next == nullptr ? nullptr : input.next + i;
        prefetch_chunk(input.grad + i);
        if (input.residual != nullptr) prefetch_chunk(input.residual + i);
        isa.template encode_chunk<kBits, kAroundZero>(fed.from(i), next, packed + i / 8 * kBits, scale, i);
    }
}

template <typename Isa, int kBits, bool kAroundZero>
CGX_INLINE void encode_part(const QsgdEncoder& encoder, int64_t first, int64_t last) {
    constexpr int kGridBytes = grid_bytes(kAroundZero ? kLinf : kMaxMin);
    const int64_t bucket_size = encoder.bucket_size;
    uint8_t* out = encoder.out + kGridBytes * (first / bucket_size);
    uint8_t* packed = encoder.out + kGridBytes * ((encoder.input.numel + bucket_size - 1) / bucket_size);
    const int64_t step = batch_numel(bucket_size);
    const Isa isa(encoder);
    Grids grids;
    for (int64_t begin = first; begin < last; begin += step) {
        const int64_t end = std::min(begin + step, last);
        find_grids<Isa, kAroundZero>(encoder, begin, end, grids);
        int j = 0;
        for (int64_t bucket = begin; bucket < end; bucket += bucket_size, ++j, out += kGridBytes) {
            const Scale scale{{grids.lo[j], grids.scale[j]}, grids.inverse[j]};
            if constexpr (kAroundZero) {
                store<uint16_t>(out, pack_grid_around_zero(scale.grid));
            } else {
                store<uint32_t>(out, pack_grid(scale.grid));
            }
            encode_bucket<Isa, kBits, kAroundZero>(isa, encoder, bucket, std::min(bucket + bucket_size, end),
                                                   scale, packed);
        }
    }
}

template <typename Isa, int kBits, bool kAdd>
CGX_INLINE void decode_part(const QsgdDecoder& decoder, int64_t first, int64_t last) {
    const bool around_zero = decoder.grid != kMaxMin;
    const int64_t bucket_size = decoder.bucket_size;
    const uint8_t* words = decoder.payload + grid_bytes(decoder.grid) * (first / bucket_size);
    const uint8_t* packed =
        decoder.payload + grid_bytes(decoder.grid) * ((decoder.numel + bucket_size - 1) / bucket_size);
    float* out = decoder.out;
    for (int64_t begin = first; begin < last; begin += bucket_size, words += grid_bytes(decoder.grid)) {
        const int64_t end = std::min(begin + bucket_size, last);
        const Grid grid = around_zero ? unpack_grid_around_zero(static_cast<uint16_t>(load<uint16_t>(words)),
                                                                top_level(kBits, true))
                                      : unpack_grid(static_cast<uint32_t>(load<uint32_t>(words)));
        int64_t i = begin;
        for (; i + kChunk <= end; i += kChunk) {
            Isa::template decode_chunk<kBits, kAdd>(packed + i / 8 * kBits, out + i, grid);
        }
        if (i == end) continue;
        float rest[kChunk] = {};
        uint8_t bytes[kChunk] = {};
        memcpy(bytes, packed + i / 8 * kBits, static_cast<size_t>(((end - i) * kBits + 7) / 8));
        Isa::template decode_chunk<kBits, false>(bytes, rest, grid);
        for (int64_t j = 0; j < end - i; ++j) out[i + j] = kAdd ? out[i + j] + rest[j] : rest[j];
    }
}

template <typename Isa, bool kAroundZero>
CGX_INLINE void encode_bits(const QsgdEncoder& encoder, int64_t first, int64_t last) {
    switch (encoder.bits) {
        case 1:
            return encode_part<Isa, 1, false>(encoder, first, last);
        case 2:
            return encode_part<Isa, 2, kAroundZero>(encoder, first, last);
        case 3:
            return encode_part<Isa, 3, kAroundZero>(encoder, first, last);
        case 4:
            return encode_part<Isa, 4, kAroundZero>(encoder, first, last);
        case 5:
            return encode_part<Isa, 5, kAroundZero>(encoder, first, last);
        case 6:
            return encode_part<Isa, 6, kAroundZero>(encoder, first, last);
        case 7:
            return encode_part<Isa, 7, kAroundZero>(encoder, first, last);
        default:
            return encode_part<Isa, 8, kAroundZero>(encoder, first, last);
    }
}

template <typename Isa, bool kAdd>
CGX_INLINE void decode_bits(const QsgdDecoder& decoder, int64_t first, int64_t last) {
    switch (decoder.bits) {
        case 1:
            return decode_part<Isa, 1, kAdd>(decoder, first, last);
        case 2:
            return decode_part<Isa, 2, kAdd>(decoder, first, last);
        case 3:
            return decode_part<Isa, 3, kAdd>(decoder, first, last);
        case 4:
            return decode_part<Isa, 4, kAdd>(decoder, first, last);
        case 5:
            return decode_part<Isa, 5, kAdd>(decoder, first, last);
        case 6:
            return decode_part<Isa, 6, kAdd>(decoder, first, last);
        case 7:
            return decode_part<Isa, 7, kAdd>(decoder, first, last);
        default:
            return decode_part<Isa, 8, kAdd>(decoder, first, last);
    }
}

template <typename Isa>
CGX_INLINE void encode_part(const QsgdEncoder& encoder, int64_t first, int64_t last) {
    if (encoder.grid == kMaxMin) return encode_bits<Isa, false>(encoder, first, last);
    encode_bits<Isa, true>(encoder, first, last);
}

template <typename Isa>
CGX_INLINE void decode_part(const QsgdDecoder& decoder, int64_t first, int64_t last) {
    if (decoder.add) return decode_bits<Isa, true>(decoder, first, last);
    decode_bits<Isa, false>(decoder, first, last);
}

}  // namespace cgx
