// Python bindings. Addresses arrive as integers because ops.py and sparse.py have checked the tensors
// already.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "heartbeat.h"
#include "isa.h"
#include "kernels.h"
#include "mesh.h"
#include "shm_group.h"

namespace nb = nanobind;

namespace {

// An address that converts to the type of pointer that a kernel takes.
struct Address {
    uintptr_t value;
    template <typename T>
    operator T*() const {
        return reinterpret_cast<T*>(value);
    }
};

}  // namespace

namespace nanobind::detail {

template <>
struct type_caster<Address> {
    NB_TYPE_CASTER(Address, const_name("int"))
    bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
        make_caster<uintptr_t> number;
        if (!number.from_python(source, flags, cleanup)) return false;
        value.value = number.value;
        return true;
    }
};

}  // namespace nanobind::detail

namespace {

// (peer, address, bytes)
using PeerBuffers = std::vector<std::tuple<int, Address, int64_t>>;

std::vector<cgx::Message> to_messages(const PeerBuffers& buffers) {
    std::vector<cgx::Message> messages;
    for (const auto& [peer, data, num_bytes] : buffers) messages.push_back({peer, data, num_bytes});
    return messages;
}

using release = nb::call_guard<nb::gil_scoped_release>;

void bind_mesh(nb::module_& m) {
    nb::class_<cgx::Mesh> mesh(m, "Mesh");
    mesh.attr("TOKEN_BYTES") = cgx::kTokenBytes;
    mesh.attr("SEALED_BYTES") = cgx::kHeaderBytes;
    mesh.def("__init__", [](cgx::Mesh* self, int rank, int world_size, int num_streams,
                            const std::string& address, nb::bytes token, double far_s,
                            std::pair<int, int> ports) {
        new (self)
            cgx::Mesh(rank, world_size, num_streams, address, {token.c_str(), token.size()}, far_s, ports);
    });
    mesh.def_prop_ro("port", &cgx::Mesh::port);
    mesh.def("connect", &cgx::Mesh::connect, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), release());
    mesh.def(
        "post",
        [](cgx::Mesh& self, const PeerBuffers& sends, const PeerBuffers& receives, uint32_t channel,
           bool is_sealed) {
            return self.post(to_messages(sends), to_messages(receives), channel, is_sealed);
        },
        release());
    mesh.def(
        "post_minimum",
        [](cgx::Mesh& self, Address values, size_t num_bytes, bool is_int64,
           std::vector<std::vector<int>> rounds, uint32_t channel) {
            return self.post_minimum(values, num_bytes, is_int64, std::move(rounds), channel);
        },
        release());
    mesh.def("wait", &cgx::Mesh::wait, release());
    mesh.def("wait_any", &cgx::Mesh::wait_any, release());
    mesh.def("is_over", &cgx::Mesh::is_over, release());
    mesh.def("has_failed", &cgx::Mesh::has_failed, release());
    mesh.def("wake", &cgx::Mesh::wake, release());
    mesh.def("take_bursts", [](cgx::Mesh& self) {
        std::vector<std::tuple<int, int64_t, double>> bursts;
        for (const auto& [peer, num_bytes, seconds] : self.take_bursts())
            bursts.emplace_back(peer, num_bytes, seconds);
        return bursts;
    });
    mesh.def("close", &cgx::Mesh::close, release());
    mesh.def("close_copies", &cgx::Mesh::close_copies);
}

void bind_heartbeat(nb::module_& m) {
    nb::class_<cgx::Heartbeat> heartbeat(m, "Heartbeat");
    heartbeat.def("__init__",
                  [](cgx::Heartbeat* self, std::vector<int> sockets, nb::bytes beat, double every_s) {
                      new (self) cgx::Heartbeat(std::move(sockets), {beat.c_str(), beat.size()}, every_s);
                  });
    heartbeat.def("stop", &cgx::Heartbeat::stop, release());
    heartbeat.def("close_copy", &cgx::Heartbeat::close_copy);
}

void bind_shared_memory(nb::module_& m) {
    nb::class_<cgx::Segment> segment(m, "Segment");
    segment.attr("SLOT_BYTES") = cgx::Segment::kSlotBytes;
    segment.def(nb::init<int>(), release());
    segment.def("__init__", [](cgx::Segment* self, int num_ranks, const std::string& name, nb::bytes nonce) {
        new (self) cgx::Segment(num_ranks, name, {nonce.c_str(), nonce.size()});
    });
    segment.def_prop_ro("name", &cgx::Segment::name);
    segment.def_prop_ro("nonce", [](const cgx::Segment& self) {
        return nb::bytes(self.nonce().data(), self.nonce().size());
    });
    segment.def("unlink", &cgx::Segment::unlink);
    using Group = cgx::LocalGroup;
    nb::class_<Group> group(m, "LocalGroup");
    group.def(nb::init<std::shared_ptr<cgx::Segment>, int, std::vector<int>, double>());
    group.def(
        "reduce_scatter",
        [](Group& self, Address values, int type, const Group::Bounds& bounds) {
            self.reduce_scatter(values, static_cast<Group::Type>(type), bounds);
        },
        release());
    group.def(
        "all_gather",
        [](Group& self, Address values, int type, const Group::Bounds& bounds) {
            self.all_gather(values, static_cast<Group::Type>(type), bounds);
        },
        release());
    group.def(
        "all_reduce",
        [](Group& self, Address values, int64_t numel, int type) {
            self.all_reduce(values, numel, static_cast<Group::Type>(type));
        },
        release());
}

void bind_bucket_codecs(nb::module_& m) {
    m.def("instruction_sets", &cgx::instruction_sets);
    m.def("use_instruction_set", &cgx::use_instruction_set);
    m.def(
        "qsgd_encode",
        [](Address grad, Address residual, Address next, int64_t numel, Address out, int bits,
           int64_t bucket_size, int grid, uint32_t key, bool stochastic, int num_threads) {
            cgx::qsgd_encode({grad, residual, next, numel}, out, bits, bucket_size, grid, key, stochastic,
                             num_threads);
        },
        release());
    m.def(
        "qsgd_decode",
        [](Address payload, Address out, int64_t numel, int bits, int64_t bucket_size, int grid, bool add,
           int num_threads) {
            cgx::qsgd_decode(payload, out, numel, bits, bucket_size, grid, add, num_threads);
        },
        release());
    m.def(
        "sign_encode",
        [](Address grad, Address residual, Address next, int64_t numel, Address out, int64_t bucket_size,
           int kind, int num_threads) {
            cgx::sign_encode({grad, residual, next, numel}, out, bucket_size, kind, num_threads);
        },
        release());
    m.def(
        "sign_decode",
        [](Address payload, Address out, int64_t numel, int64_t bucket_size, int kind, bool add,
           int num_threads) { cgx::sign_decode(payload, out, numel, bucket_size, kind, add, num_threads); },
        release());
}

void bind_gradient_passes(nb::module_& m) {
    m.def(
        "poison",
        [](Address grad, int64_t numel, int num_threads) { return cgx::poison(grad, numel, num_threads); },
        release());
    m.def(
        "add_poison",
        [](Address grad, int64_t numel, Address value, int num_threads) {
            static_cast<float*>(value)[0] += cgx::poison(grad, numel, num_threads);
        },
        release());
    m.def(
        "add_momentum",
        [](Address grad, Address momentum, Address residual, Address next_momentum, Address next,
           int64_t numel, float factor, float scale, int num_threads) {
            cgx::add_momentum(grad, momentum, residual, next_momentum, next, numel, factor, scale,
                              num_threads);
        },
        release());
}

void bind_selection(nb::module_& m) {
    m.def(
        "topk_select",
        [](Address grad, Address residual, Address next, int64_t numel, Address layer_ends, Address kept_ends,
           int64_t num_layers, Address index, Address value, int64_t num_kept, int num_threads) {
            cgx::topk_select({grad, residual, next, numel}, {layer_ends, kept_ends, num_layers}, index, value,
                             num_kept, num_threads);
        },
        release());
    m.def(
        "topk_encode",
        [](Address grad, Address residual, Address next, int64_t numel, Address layer_ends, Address kept_ends,
           int64_t num_layers, Address payload, Address index, Address value, int64_t num_kept,
           int num_threads) {
            cgx::topk_encode({grad, residual, next, numel}, {layer_ends, kept_ends, num_layers}, payload,
                             index, value, num_kept, num_threads);
        },
        release());
    m.def(
        "magnitude_histogram",
        [](Address grad, int64_t numel, Address counts, int num_threads) {
            cgx::magnitude_histogram(grad, numel, counts, num_threads);
        },
        release());
    m.def(
        "bisect_thresholds",
        [](Address grad, int64_t numel, int64_t num_kept, int num_rounds, Address thresholds,
           int num_threads) {
            cgx::bisect_thresholds(grad, numel, num_kept, num_rounds, thresholds, num_threads);
        },
        release());
    m.def(
        "rank_thresholds",
        [](Address grad, int64_t numel, int64_t rank, Address thresholds, int num_threads) {
            cgx::rank_thresholds(grad, numel, rank, thresholds, num_threads);
        },
        release());
    m.def(
        "sidco_thresholds",
        [](Address grad, int64_t numel, const std::vector<double>& ratios, int64_t num_kept,
           Address thresholds, int num_threads) {
            cgx::sidco_thresholds(grad, numel, ratios, num_kept, thresholds, num_threads);
        },
        release());
    m.def(
        "collect",
        [](Address grad, int64_t numel, Address thresholds, uint32_t key, Address index, Address value,
           int64_t num_kept, Address count, int num_threads) {
            cgx::collect(grad, numel, thresholds, key, index, value, num_kept, count, num_threads);
        },
        release());
}

void bind_indices(nb::module_& m) {
    m.def(
        "random_indices",
        [](int64_t numel, uint32_t key, Address index, int64_t num_kept) {
            cgx::random_indices(numel, key, index, num_kept);
        },
        release());
    m.def(
        "pack_indices",
        [](Address index, Address count, int64_t num_kept, int64_t numel, Address out) {
            cgx::pack_indices(index, count, num_kept, numel, out);
        },
        release());
    m.def(
        "unpack_indices",
        [](Address packed, Address count, int64_t num_kept, int64_t numel, Address index) {
            return cgx::unpack_indices(packed, count, num_kept, numel, index);
        },
        release());
    m.def(
        "scatter_add",
        [](Address index, Address value, Address count, int64_t num_kept, Address out, int64_t numel) {
            cgx::scatter_add(index, value, count, num_kept, out, numel);
        },
        release());
    m.def(
        "scatter_zero",
        [](Address index, Address count, int64_t num_kept, Address out, int64_t numel) {
            cgx::scatter_zero(index, count, num_kept, out, numel);
        },
        release());
    m.def(
        "pack_message",
        [](Address index, Address value, Address count, int64_t num_kept, int64_t numel, Address payload) {
            cgx::pack_message(index, value, count, num_kept, numel, payload);
        },
        release());
    m.def(
        "unpack_message",
        [](Address payload, Address index, int64_t num_kept, Address out, int64_t numel, bool add,
           int num_threads) {
            return cgx::unpack_message(payload, index, num_kept, out, numel, add, num_threads);
        },
        release());
}

}  // namespace

NB_MODULE(_native, m) {
    // A mesh that is still open when the interpreter ends is closed with the process.
    nb::set_leak_warnings(false);
    bind_mesh(m);
    bind_heartbeat(m);
    bind_shared_memory(m);
    bind_bucket_codecs(m);
    bind_gradient_passes(m);
    bind_selection(m);
    bind_indices(m);
    m.def(
        "crc32c",
        [](Address data, int64_t num_bytes, uint32_t seed) { return cgx::crc32c(data, num_bytes, seed); },
        release());
}
