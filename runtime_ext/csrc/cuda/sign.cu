// One-bit codecs. runtime_ext/reference/ is the specification.
#include "bucket.h"
#include "sign.h"

namespace cgx {
namespace {

__device__ int64_t num_mean_bytes(int64_t numel, int bucket_size, int kind) {
    return mean_bytes(kind) * ((numel + bucket_size - 1) / bucket_size);
}

template <typename Input>
__device__ Means find_means(const Input& input, const Bucket& bucket, int kind) {
    LaneSum low, high;
    if (kind == kEfSignSgd) {
        for_each_fed(bucket, input, [&](int, const Quad& quad) {
#pragma unroll
            for (int j = 0; j < kQuad; ++j) high.lanes[j] += fabsf(quad.x[j]);
        });
        return means_around_zero(make_mean(high.total(), bucket.count));
    }
    int num_positive = 0;
    for_each_fed(bucket, input, [&](int, const Quad& quad) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
            const bool positive = is_positive(quad.x[j]);
            low.lanes[j] += positive ? 0.0f : quad.x[j];
            high.lanes[j] += positive ? quad.x[j] : 0.0f;
            num_positive += positive && j < quad.valid;
        }
    });
    num_positive = over_team(num_positive, [](int a, int b) { return a + b; });
    return {make_mean(low.total(), bucket.count - num_positive), make_mean(high.total(), num_positive)};
}

template <typename Input>
__device__ void encode_bucket(const Input& input, const Bucket& bucket, uint8_t* out, int kind) {
    const Means means = find_means(input, bucket, kind);
    if (team_lane() == 0 && bucket.count > 0) {
        uint8_t* address = out + bucket.at(mean_bytes(kind));
        if (kind == kOneBit) store_word(address, float_bits(means.low));
        store_word(address + mean_bytes(kind) - 4, float_bits(means.high));
    }
    uint8_t* bits = out + num_mean_bytes(input.numel, bucket.size, kind) + Levels<1>::first_byte(bucket);
    for_each_fed(bucket, input, [&](int row, Quad& quad) {
        uint32_t piece = 0;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
            const bool positive = is_positive(quad.x[j]);
            piece |= static_cast<uint32_t>(positive && j < quad.valid) << j;
        }
        Levels<1>::store(bits + Levels<1>::row_bytes(row), quad, piece);
        if (input.next == nullptr) return;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
            quad.x[j] = input.left(quad.x[j] - choose_mean(is_positive(quad.x[j]), means));
        }
        store_quad(quad, input.next + bucket.mine() + row * kRow);
    });
}

template <typename T>
__device__ void encode(const Rows& rows, const Input<T>& gradient, uint8_t* out, int bucket_size, int kind) {
    const Row& part = rows.mine();
    const Input<T> input = part_of(gradient, part);
    for_each_bucket(rows, bucket_size,
                    [&](const Bucket& bucket) { encode_bucket(input, bucket, out + part.payload, kind); });
}

__device__ Means load_means(const uint8_t* payload, const Bucket& bucket, int kind) {
    const uint8_t* address = payload + bucket.at(mean_bytes(kind));
    const float first = bits_float(load_word(address));
    return kind == kOneBit ? Means{first, bits_float(load_word(address + 4))} : means_around_zero(first);
}

// One bucket of a payload whose bits begin at byte `bits`.
struct Encoded {
    Means means;
    const uint8_t* packed;

    __device__ Encoded(const uint8_t* payload, int64_t bits, const Bucket& bucket, int kind)
        : means(bucket.count > 0 ? load_means(payload, bucket, kind) : Means{}),
          packed(payload + bits + Levels<1>::first_byte(bucket)) {}

    // Sets x (kQuad,) to the elements of a row that are those of `quad`.
    __device__ void decode(int row, const Quad& quad, float* x) const {
        const uint32_t piece = Levels<1>::load(packed + Levels<1>::row_bytes(row), quad);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) x[j] = choose_mean(piece >> j & 1, means);
    }
};

}  // namespace
}  // namespace cgx

using namespace cgx;

// Arguments are those of the kernels of qsgd.
#define CGX_SIGN_ENCODE(dtype, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(kBlockSize, kBlocksAMultiprocessor)                 \
        sign_encode_##dtype(const __grid_constant__ Rows rows, const T* grad, const float* residual, \
                            float* next, uint8_t* out, int32_t bucket_size, int32_t kind) {          \
        encode<T>(rows, {grad, residual, next, 0}, out, bucket_size, kind);                          \
    }
CGX_SIGN_ENCODE(float32, float)
CGX_SIGN_ENCODE(float16, Half)
CGX_SIGN_ENCODE(bfloat16, BFloat16)

extern "C" __global__ void __launch_bounds__(kBlockSize, kBlocksAMultiprocessor)
    sign_decode(const __grid_constant__ Rows rows, const uint8_t* payload, float* out, int32_t bucket_size,
                int32_t kind, int32_t add) {
    const Row& part = rows.mine();
    payload += part.payload;
    out += part.start;
    const int64_t bits = num_mean_bytes(part.numel, bucket_size, kind);
    for_each_bucket(rows, bucket_size, [&](const Bucket& bucket) {
        decode_bucket(bucket, out, add != 0, Encoded(payload, bits, bucket, kind));
    });
}

extern "C" __global__ void __launch_bounds__(kBlockSize, kBlocksAMultiprocessor)
    sign_sum(const float* grad, const float* residual, float* next, int64_t numel, const uint8_t* payloads,
             int64_t pitch, int32_t count, int32_t num_ranks, uint8_t* out, int32_t bucket_size,
             int32_t kind) {
    const int64_t bits = num_mean_bytes(numel, bucket_size, kind);
    const auto open = [&](const uint8_t* payload, const Bucket& bucket) {
        return Encoded(payload, bits, bucket, kind);
    };
    const Average<decltype(open)> input = {
        {grad, residual, next, numel}, {payloads, pitch, count}, num_ranks, open};
    for_each_bucket(numel, bucket_size, blockIdx.x, gridDim.x,
                    [&](const Bucket& bucket) { encode_bucket(input, bucket, out, kind); });
}
