// How ranks find and recognize each other. Each rank dials the lower ranks, says who it is and shows half of
// the run's token; the other half is the answer.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "sockets.h"

namespace cgx {

constexpr size_t kTokenBytes = 32;

// This rank, and what it needs to recognize the others.
struct Identity {
    int rank, world_size;
    int num_streams;    // connections to each peer that is far
    double far_s;       // shortest round trip to a peer that is far
    std::string token;  // (kTokenBytes,): the dialling rank shows the first half, the other rank the second
};

// Sockets by peer, one or num_streams; none for this rank.
using Connections = std::vector<std::vector<FileDescriptor>>;

// Connects to every other rank. Hangs up on everyone who does not show the token. Throws std::runtime_error
// that names the ranks that did not come by `deadline`.
//
// listener   closed once all higher ranks have come, and after an error: nobody waits for an answer in vain
// addresses  (address, port) by rank
// is_local   by rank: shares memory with this one, so that a single connection will do
Connections shake_hands(const Identity& self, FileDescriptor listener,
                        const std::vector<std::pair<std::string, int>>& addresses,
                        const std::vector<bool>& is_local, double deadline);

}  // namespace cgx
