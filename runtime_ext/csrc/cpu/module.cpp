// Python bindings. Addresses arrive as integers because ops.py has checked the tensors already.
#include <nanobind/nanobind.h>

#include "kernels.h"

namespace nb = nanobind;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

NB_MODULE(_native, m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def(
        "crc32c",
        [](uintptr_t data, int64_t num_bytes, uint32_t seed) {
            return cgx::crc32c(pointer<const uint8_t>(data), num_bytes, seed);
        },
        release());
    m.def(
        "qsgd_encode",
        [](uintptr_t grad, int64_t numel, uintptr_t out, int bits, int64_t bucket_size, uint32_t key,
           bool stochastic) {
            cgx::qsgd_encode(pointer<const float>(grad), numel, pointer<uint8_t>(out), bits, bucket_size, key,
                             stochastic);
        },
        release());
    m.def(
        "qsgd_decode",
        [](uintptr_t payload, uintptr_t out, int64_t numel, int bits, int64_t bucket_size, bool add) {
            cgx::qsgd_decode(pointer<const uint8_t>(payload), pointer<float>(out), numel, bits, bucket_size,
                             add);
        },
        release());
    m.def(
        "topk_select",
        [](uintptr_t grad, int64_t numel, uintptr_t index, uintptr_t value, int64_t num_kept) {
            cgx::topk_select(pointer<const float>(grad), numel, pointer<int32_t>(index),
                             pointer<float>(value), num_kept);
        },
        release());
}
