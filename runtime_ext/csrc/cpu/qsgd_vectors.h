// The loops of qsgd over vectors, the same for every instruction set. They fuse a multiplication and an
// addition only where the product is exact, so that the result is rounded as without fusing.
#pragma once

#include "qsgd_loops.h"
#include "vectors.h"

namespace cgx {

// `V` has, besides what vectors.h needs,
//   to_bytes(level, top)           the levels of four vectors, one per byte; those above `top` become `top`
//   pack<kBits>(bytes, out)        packs the bytes of a chunk to out (8 * kBits,)
//   unpack<kBits>(packed, v)       the levels of vector `v` of a chunk, with any bits above them
//   kTableBits, look_up(table, i)  table[i], where bits of i above the lowest kTableBits do not matter
template <typename V>
class QsgdVectors {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    using Uints = typename V::Uints;
    using Bytes = typename V::Bytes;
    static constexpr int kWidth = V::kWidth;
    static constexpr int kFour = 4 * kWidth;  // elements of four vectors

  public:
    CGX_INLINE explicit QsgdVectors(const QsgdEncoding& encoding)
        : stochastic_(encoding.stochastic),
          outer_(keep(V::fill(encoding.key.outer))),
          inner_(keep(V::fill(encoding.key.inner))),
          first_factor_(keep(V::fill(kFirstFactor))),
          second_factor_(keep(V::fill(kSecondFactor))),
          unit_(keep(V::fill(0x1p-16f))) {
        const int32_t top = top_level(encoding.bits, encoding.grid != kMaxMin);
        top_ = keep(V::fill(top));
        top_bytes_ = keep(V::fill(static_cast<uint32_t>(top) * 0x01010101u));
        zero_level_ = keep(V::fill(static_cast<float>(top / 2)));
    }

    static CGX_INLINE void find_range(Fed fed, int64_t count, float& min, float& max) {
        // Compare the bits as integers. The largest signed integer is the largest number, unless all are
        // negative. The largest unsigned integer is the smallest number, unless none is negative. NaNs lie
        // beyond the infinities.
        Ints high[2] = {V::fill(INT32_MIN), V::fill(INT32_MIN)};
        Uints far[2] = {};
        for_each_vector<V>(fed, count, [&](Ints bits, int chain) {
            high[chain] = V::max(high[chain], bits);
            far[chain] = V::max(far[chain], (Uints)bits);
        });
        const int32_t high_1 = max_of<int32_t>(high);
        const uint32_t far_1 = max_of<uint32_t>(far);
        max = bits_float(static_cast<uint32_t>(high_1));
        min = bits_float(far_1);
        if (high_1 >= 0 && far_1 >> 31 != 0) return;
        // With one sign only, the number nearest to zero is the other end of the range.
        // The smallest unsigned integer is the largest complement.
        Uints farthest[2] = {};
        for_each_vector<V>(fed, count, [&](Ints bits, int chain) {
            farthest[chain] = V::max(farthest[chain], (Uints)~bits);
        });
        (high_1 < 0 ? max : min) = bits_float(~max_of<uint32_t>(farthest));
    }

    static CGX_INLINE uint32_t find_largest(Fed fed, int64_t count) {
        Ints largest[2] = {};
        for_each_vector<V>(fed, count, [&](Ints bits, int chain) {
            largest[chain] = V::max(largest[chain], bits & 0x7FFFFFFF);
        });
        return static_cast<uint32_t>(max_of<int32_t>(largest));
    }

    static CGX_INLINE float sum_squares(Fed fed, int64_t count, float down) {
        LaneSums<V> sum;
        for_each_row<V>(fed, count, [&](const Floats* x) {
            for (int v = 0; v < sum.kVectors; ++v) {
                const Floats scaled = x[v] * down;
                sum.lane[v] += scaled * scaled;
            }
        });
        return sum.total();
    }

    template <int kBits, bool kAroundZero>
    CGX_INLINE void encode_chunk(Fed fed, Next next, uint8_t* out, Scale scale, int64_t i) const {
        const Uints counter = V::fill(static_cast<uint32_t>(i / 2));
        Bytes level[kChunk / kFour];
        for (int j = 0; j < kChunk; j += kFour) {
            level[j / kFour] = quantize_four<kAroundZero>(fed.from(j), next.from(j), scale,
                                                          counter + static_cast<uint32_t>(j / 2));
        }
        V::template pack<kBits>(level, out);
    }

    template <int kBits, bool kAdd>
    static CGX_INLINE void decode_chunk(const uint8_t* packed, float* out, Grid grid) {
        const Floats table = dequantize(V::iota() & ((1 << kBits) - 1), grid);
        for (int v = 0; v < kChunk / kWidth; ++v) {
            const Ints level = V::template unpack<kBits>(packed, v);
            Floats x = kBits <= V::kTableBits ? V::look_up(table, level)
                                              : dequantize(level & ((1 << kBits) - 1), grid);
            if (kAdd) x = V::load(out + kWidth * v) + x;
            V::store(out + kWidth * v, x);
        }
    }

  private:
    // Returns the largest number of both chains.
    template <typename T, typename Vector>
    static CGX_INLINE T max_of(const Vector* chain) {
        return combine_lanes<V>(V::max(chain[0], chain[1]),
                                [&](Vector a, Vector b) { return V::max(a, b); })[0];
    }

    static CGX_INLINE Uints xor_shifted(Uints x, int count) { return x ^ x >> count; }

    static CGX_INLINE Floats dequantize(Ints level, Grid grid) {
        return V::fma(__builtin_convertvector(level, Floats), V::fill(grid.scale), V::fill(grid.lo));
    }

    // Returns the order in which the halves of 32-bit numbers must come so that low_halves and high_halves
    // give neighbours.
    static CGX_INLINE Ints order_of_halves() {
        const Ints lane = V::iota();
        return (lane >> 2) * 2 + (lane & 1) + (lane & 2) * (kWidth / 4);
    }

    // Draws the random halves for elements [2 * counter, 2 * counter + 2 * kWidth).
    CGX_INLINE void random_halves(Uints counter, Ints* half) const {
        Uints x = counter + (Uints)order_of_halves();
        x = xor_shifted(x ^ outer_, 16) * first_factor_ + inner_;
        x = xor_shifted(xor_shifted(x, 15) * second_factor_, 16);
        half[0] = V::low_halves(x);
        half[1] = V::high_halves(x);
    }

    // Returns the level of x before the upper clamp. half: a random half, 0 to 65535
    template <bool kAroundZero>
    CGX_INLINE Ints quantize(Floats x, Scale scale, Ints half) const {
        const Floats inverse = V::fill(scale.inverse);
        const Floats t = kAroundZero ? x * inverse + zero_level_ : (x - V::fill(scale.grid.lo)) * inverse;
        return __builtin_convertvector(V::fma(__builtin_convertvector(half, Floats), unit_, t), Ints);
    }

    // Returns the levels of four vectors, one per byte. counter: of the first element
    template <bool kAroundZero>
    CGX_INLINE Bytes quantize_four(Fed fed, Next next, Scale scale, Uints counter) const {
        Floats x[4];
        for (int v = 0; v < 4; ++v) x[v] = load_fed<V>(fed, kWidth * v);
        Ints half[4], level[4];
        if (stochastic_) {
            random_halves(counter, half);
            random_halves(counter + static_cast<uint32_t>(kWidth), half + 2);
        } else {
            for (Ints& each : half) each = V::fill(1 << 15);
        }
        for (int v = 0; v < 4; ++v) level[v] = quantize<kAroundZero>(x[v], scale, half[v]);
        if (next.data != nullptr) {
            for (int v = 0; v < 4; ++v) {
                const Floats decoded = dequantize(V::min(level[v], top_), scale.grid);
                float* data = next.data + kWidth * v;
                next.streams ? V::stream(data, x[v] - decoded) : V::store(data, x[v] - decoded);
            }
        }
        return V::to_bytes(level, top_bytes_);
    }

    bool stochastic_;
    Uints outer_, inner_, first_factor_, second_factor_;
    Floats unit_;
    Ints top_;
    Uints top_bytes_;
    Floats zero_level_;
};

}  // namespace cgx
