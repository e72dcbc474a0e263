// QSGD with CGX_BITS bits per element, a macro that the compiler is given. runtime_ext/reference/ is the
// specification.
#include "bucket.h"
#include "qsgd.h"
#include "random.h"

namespace cgx {
namespace {

constexpr int kBits = CGX_BITS;
using Packing = Levels<kBits>;

struct Options {
    int bucket_size;
    int grid;
    RandomKey key;
    bool stochastic;

    CGX_DEVICE bool around_zero() const { return grid != kMaxMin; }
    CGX_DEVICE int32_t top() const { return top_level(kBits, around_zero()); }
    CGX_DEVICE int64_t num_grid_bytes(int64_t numel) const {
        return grid_bytes(grid) * ((numel + bucket_size - 1) / bucket_size);
    }
};

template <typename Input>
__device__ Grid find_max_min_grid(const Input& input, const Bucket& bucket, int32_t top) {
    int32_t low = 0x7FFFFFFF, high = -0x7FFFFFFF - 1;
    for_each_fed(bucket, input, [&](int, const Quad& quad) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
            const int32_t ordered = flip_negative(static_cast<int32_t>(float_bits(quad.x[j])));
            low = j < quad.valid ? lesser(low, ordered) : low;
            high = j < quad.valid ? greater(high, ordered) : high;
        }
    });
    low = over_team(low, [](int32_t a, int32_t b) { return lesser(a, b); });
    high = over_team(high, [](int32_t a, int32_t b) { return greater(a, b); });
    return make_grid(bits_float(static_cast<uint32_t>(flip_negative(low))),
                     bits_float(static_cast<uint32_t>(flip_negative(high))), top);
}

template <typename Input>
__device__ Grid find_grid_around_zero(const Input& input, const Bucket& bucket, int grid, int32_t top) {
    uint32_t largest = 0;
    for_each_fed(bucket, input, [&](int, const Quad& quad) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) largest = greater(largest, float_bits(quad.x[j]) & 0x7FFFFFFFu);
    });
    largest = over_team(largest, [](uint32_t a, uint32_t b) { return greater(a, b); });
    if (grid == kLinf) return make_grid_around_zero(bits_float(largest), top);
    const NormScale scale = norm_scale(largest);
    LaneSum squares;
    for_each_fed<kReread>(bucket, input, [&](int, const Quad& quad) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
            const float scaled = quad.x[j] * scale.down;
            squares.lanes[j] += scaled * scaled;
        }
    });
    return make_grid_around_zero(sqrtf(squares.total()) * scale.up, top);
}

__device__ void store_grid(Grid grid, const Bucket& bucket, const Options& options, uint8_t* out) {
    if (team_lane() != 0 || bucket.count == 0) return;
    uint8_t* address = out + bucket.at(grid_bytes(options.grid));
    if (options.around_zero()) {
        store_bytes(address, pack_grid_around_zero(grid), 2);
    } else {
        store_word(address, pack_grid(grid));
    }
}

__device__ Grid load_grid(const uint8_t* payload, const Bucket& bucket, const Options& options) {
    const uint8_t* address = payload + bucket.at(grid_bytes(options.grid));
    if (!options.around_zero()) return unpack_grid(load_word(address));
    return unpack_grid_around_zero(static_cast<uint16_t>(load_bytes(address, 2)), options.top());
}

__device__ int32_t level_of(uint32_t piece, int j) {
    return static_cast<int32_t>(piece >> j * kBits & ((1u << kBits) - 1));
}

// One bucket of a payload whose levels begin at byte `levels`.
struct Encoded {
    Grid grid;
    const uint8_t* packed;

    __device__ Encoded(const uint8_t* payload, int64_t levels, const Bucket& bucket, const Options& options)
        : grid(bucket.count > 0 ? load_grid(payload, bucket, options) : Grid{}),
          packed(payload + levels + Packing::first_byte(bucket)) {}

    // Sets x (kQuad,) to the elements of a row that are those of `quad`.
    __device__ void decode(int row, const Quad& quad, float* x) const {
        const uint32_t piece = Packing::load(packed + Packing::row_bytes(row), quad);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) x[j] = dequantize(level_of(piece, j), grid);
    }
};

__device__ float uniform(uint32_t half) { return static_cast<float>(half) * 0x1p-16f; }

// Sets rounding (kQuad,) for the elements from 2 * counter on.
__device__ void draw(const Options& options, uint32_t counter, float* rounding) {
#pragma unroll
    for (int pair = 0; pair < kQuad / 2; ++pair) {
        const uint32_t bits = random_bits(options.key, counter + pair);
        rounding[2 * pair] = options.stochastic ? uniform(bits & 0xFFFFu) : 0.5f;
        rounding[2 * pair + 1] = options.stochastic ? uniform(bits >> 16) : 0.5f;
    }
}

template <typename Input>
__device__ void encode_bucket(const Input& input, const Bucket& bucket, const Options& options,
                              uint8_t* out) {
    const int32_t top = options.top();
    const Grid grid = options.around_zero() ? find_grid_around_zero(input, bucket, options.grid, top)
                                            : find_max_min_grid(input, bucket, top);
    store_grid(grid, bucket, options, out);
    const float inverse = inverse_scale(grid);
    uint8_t* packed = out + options.num_grid_bytes(input.numel) + Packing::first_byte(bucket);
    const uint32_t counter = static_cast<uint32_t>(bucket.mine() / 2);
    for_each_fed<kReread>(bucket, input, [&](int row, Quad& quad) {
        float rounding[kQuad];
        draw(options, counter + row * (kRow / 2), rounding);
        uint32_t piece = 0;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
            int32_t level = unusable_level(top, options.around_zero());
            if (inverse != 0.0f && j < quad.valid) {
                level = options.around_zero()
                            ? quantize<true>(quad.x[j], grid.lo, inverse, rounding[j], top)
                            : quantize<false>(quad.x[j], grid.lo, inverse, rounding[j], top);
            }
            piece |= j < quad.valid ? static_cast<uint32_t>(level) << j * kBits : 0;
        }
        Packing::store(packed + Packing::row_bytes(row), quad, piece);
        if (input.next == nullptr) return;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
            quad.x[j] = input.left(quad.x[j] - dequantize(level_of(piece, j), grid));
        }
        store_quad(quad, input.next + bucket.mine() + row * kRow);
    });
}

template <typename T>
__device__ void encode(const Rows& rows, Input<T> input, uint8_t* out, int bucket_size, int grid,
                       bool stochastic) {
    const Row& part = rows.mine();
    Options options = {bucket_size, grid, make_random_key(part.key), stochastic};
    keep(options.key.inner);
    input = part_of(input, part);
    for_each_bucket(rows, bucket_size,
                    [&](const Bucket& bucket) { encode_bucket(input, bucket, options, out + part.payload); });
}

}  // namespace
}  // namespace cgx

using namespace cgx;

// grad, residual, next as long as `rows` say, out as long as their payloads
#define CGX_QSGD_ENCODE(dtype, T)                                                                           \
    extern "C" __global__ void __launch_bounds__(kBlockSize, kBlocksAMultiprocessor) qsgd_encode_##dtype(   \
        const __grid_constant__ Rows rows, const T* grad, const float* residual, float* next, uint8_t* out, \
        int32_t bucket_size, int32_t grid, int32_t stochastic) {                                            \
        encode<T>(rows, {grad, residual, next, 0}, out, bucket_size, grid, stochastic != 0);                \
    }
CGX_QSGD_ENCODE(float32, float)
CGX_QSGD_ENCODE(float16, Half)
CGX_QSGD_ENCODE(bfloat16, BFloat16)

// payload as long as the payloads of `rows`, out as long as they say
extern "C" __global__ void __launch_bounds__(kBlockSize, kBlocksAMultiprocessor)
    qsgd_decode(const __grid_constant__ Rows rows, const uint8_t* payload, float* out, int32_t bucket_size,
                int32_t grid, int32_t add) {
    const Options options = {bucket_size, grid, {}, false};
    const Row& part = rows.mine();
    payload += part.payload;
    out += part.start;
    const int64_t levels = options.num_grid_bytes(part.numel);
    for_each_bucket(rows, bucket_size, [&](const Bucket& bucket) {
        decode_bucket(bucket, out, add != 0, Encoded(payload, levels, bucket, options));
    });
}

// grad, residual, next (numel,), payloads (count, pitch) without the end of the last, out (payload bytes,)
extern "C" __global__ void __launch_bounds__(kBlockSize, kBlocksAMultiprocessor)
    qsgd_sum(const float* grad, const float* residual, float* next, int64_t numel, const uint8_t* payloads,
             int64_t pitch, int32_t count, int32_t num_ranks, uint8_t* out, int32_t bucket_size, int32_t grid,
             uint32_t key, int32_t stochastic) {
    const Options options = {bucket_size, grid, make_random_key(key), stochastic != 0};
    const int64_t levels = options.num_grid_bytes(numel);
    const auto open = [&](const uint8_t* payload, const Bucket& bucket) {
        return Encoded(payload, levels, bucket, options);
    };
    const Average<decltype(open)> input = {
        {grad, residual, next, numel}, {payloads, pitch, count}, num_ranks, open};
    for_each_bucket(numel, bucket_size, blockIdx.x, gridDim.x,
                    [&](const Bucket& bucket) { encode_bucket(input, bucket, options, out); });
}
